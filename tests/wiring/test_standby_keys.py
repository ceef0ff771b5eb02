"""Keys of clients through a standby: carried to the leader, shown where they were asked for, and in force in its own router."""

from __future__ import annotations

import http.client
from pathlib import Path

import trio

from llmgw.wiring.server import Running
from tests.wiring.test_standby import ask, pair, until

PATH = "/api/v1/keys"


async def models_status(of: Running, secret: str) -> int:
    """What the control plane's own router answers to this key."""

    def work() -> int:
        connection = http.client.HTTPConnection(of.router_listen, timeout=20)
        connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {secret}"})
        status = connection.getresponse().status
        connection.close()
        return status

    return await trio.to_thread.run_sync(work)


async def test_a_key_that_a_standby_was_asked_for_is_good_and_ended_at_both(tmp_path: Path) -> None:
    async with pair(tmp_path) as (leader, standby):
        match = {"If-Match": '"1"'}
        assert (await ask(standby, "PATCH", "/api/v1/settings", {"set": {"auth.required": True}}, **match))[0] == 200
        status, made = await ask(standby, "POST", PATH, {"name": "team-a"})
        assert (status, made["change"], len(made["secret"])) == (201, "created", 67)
        for one in (standby, leader):
            status, found = await ask(one, "GET", f"{PATH}/team-a")
            assert (status, found["prefix"], "secret" in found) == (200, made["prefix"], False)
            await until_status(one, made["secret"], 200)
        assert (await ask(standby, "POST", f"{PATH}/team-a/revoke"))[1]["change"] == "revoked"
        for one in (standby, leader):
            await until_status(one, made["secret"], 401)
            assert (await ask(one, "GET", f"{PATH}/team-a"))[1]["state"] == "revoked"


async def test_a_standby_looks_at_the_store_when_it_is_told_that_a_key_is_new(tmp_path: Path) -> None:
    async with pair(tmp_path) as (leader, standby):
        await until(lambda: bool(leader.controller.peers.standbys()), "the standby has presented itself")
        looks = []
        standby.controller.on_reread(lambda: _noted(looks))
        assert (await ask(leader, "POST", PATH, {"name": "team-a"}))[0] == 201
        await until(lambda: bool(looks), "it has read the store")
        await until(lambda: [key.name for key in standby.controller.policy().keys] == ["team-a"], "it knows the key")


async def _noted(looks: list[int]) -> None:
    looks.append(1)


async def until_status(one: Running, secret: str, status: int) -> None:
    with trio.fail_after(20):
        while await models_status(one, secret) != status:
            await trio.sleep(0.02)
