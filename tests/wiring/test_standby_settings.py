"""The cluster's settings, changed and read through a standby: whoever changes something there reads it there."""

from __future__ import annotations

from pathlib import Path

import trio

from llmgw.domain.errors import Unavailable
from tests.wiring.test_standby import ask, code, name_of, pair, until

PATH = "/api/v1/settings"


def match(version: int) -> dict[str, str]:
    return {"If-Match": f'"{version}"'}


async def test_what_is_changed_through_a_standby_is_read_there_at_once(tmp_path: Path):
    async with pair(tmp_path) as (leader, standby):
        status, body = await ask(standby, "PATCH", PATH, {"set": {"guard.max_messages": 7}, "reason": "r"}, **match(1))
        assert (status, body["version"]) == (200, 2)
        keys = (await ask(standby, "GET", f"{PATH}/effective"))[1]
        assert keys["version"] == 2
        assert {row["path"]: row["value"] for row in keys["keys"]}["guard.max_messages"] == 7
        history = (await ask(standby, "GET", f"{PATH}/history"))[1]["versions"]
        assert [(one["version"], one["author"]) for one in history] == [(2, name_of(standby)), (1, "one")]
        assert (await ask(standby, "GET", "/api/v1/status"))[1]["settings"]["live"] == 2
        assert (await ask(leader, "GET", PATH))[1]["version"] == 2
        again = await ask(standby, "PATCH", PATH, {"set": {"guard.max_messages": 8}}, **match(1))
        assert code(again) == (412, "revision_moved")
        assert (await ask(standby, "POST", "/api/v1/pause", {"reason": "r"}))[0] == 200
        assert (await ask(standby, "GET", "/api/v1/pause"))[1]["pause"]["reason"] == "r"


async def test_every_control_plane_is_told_of_and_the_one_asked_is_marked(tmp_path: Path):
    async with pair(tmp_path) as (leader, standby):
        await until(
            lambda: any(one.settings.live == 1 for one, _ in leader.controller.peers.standbys()), "the standby has said what it runs"
        )
        for one, asked in ((leader, "one"), (standby, "two")):
            planes = (await ask(one, "GET", PATH))[1]["control_planes"]
            assert [(plane["name"], plane["leads"], plane["me"]) for plane in planes] == [
                ("one", True, asked == "one"),
                ("two", False, asked == "two"),
            ]
            assert all(plane["live"] == 1 and plane["heard_s"] is not None for plane in planes)


async def test_a_standby_that_cannot_read_what_its_client_changed_says_so_until_it_can(tmp_path: Path):
    async with pair(tmp_path) as (leader, standby):
        await until(lambda: bool(leader.controller.peers.standbys()), "the standby has presented itself")
        reread = standby.controller.reread

        async def silent() -> None:
            raise Unavailable("the store does not answer")

        standby.controller.reread = silent  # type: ignore[method-assign]  # its own disk fails it, the leader's does not
        assert (await ask(standby, "PATCH", PATH, {"set": {"guard.max_messages": 7}}, **match(1)))[0] == 200
        assert code(await ask(standby, "GET", f"{PATH}/effective")) == (503, "behind")
        assert code(await ask(standby, "GET", "/api/v1/models")) == (503, "behind")
        assert (await ask(standby, "GET", "/api/v1/status"))[0] == 200
        assert (await ask(standby, "GET", PATH))[1]["version"] == 2  # the leader's answer
        assert (await ask(standby, "GET", "/api/v1/models", token=leader.admin_token))[0] == 200
        standby.controller.reread = reread  # type: ignore[method-assign]
        assert (await ask(standby, "GET", f"{PATH}/effective"))[1]["version"] == 2
        assert (await ask(standby, "GET", "/api/v1/models"))[0] == 200


async def test_a_standby_answers_questions_of_the_settings_when_its_leader_does_not(tmp_path: Path):
    async with pair(tmp_path) as (leader, standby):
        await until(
            lambda: any(one.settings.live == 1 for one, _ in leader.controller.peers.standbys()), "the standby has said what it runs"
        )
        await until(lambda: bool(standby.controller.peers.leader_address()), "the standby knows who leads")
        with trio.socket.socket() as deaf:  # takes connections and answers nothing
            await deaf.bind(("127.0.0.1", 0))
            deaf.listen(5)
            address = f"http://127.0.0.1:{deaf.getsockname()[1]}"
            standby.controller.peers.leader_address = lambda: address  # type: ignore[method-assign]
            with trio.fail_after(8):
                found = (await ask(standby, "GET", PATH))[1]
        assert found["version"] == 1
        assert {plane["name"]: plane["heard_s"] for plane in found["control_planes"]}["two"] == 0.0
