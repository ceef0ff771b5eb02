"""Usage from engines' answers to the store: two real control planes with routers of their own, and a router process beside them."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import trio

from llmgw.admin.auth import CALLER
from llmgw.admin.peer_client import USAGE_PATH
from llmgw.domain.usage import UsageBatch, UsageRow
from llmgw.protocol.codec import unstructure
from llmgw.wiring.server import CONTROL_TOKEN_FILE, Running
from tests.router.fakes import CHAT, CHAT_S, DONE, END, FIN, OK, SH, Client, E, Engine, RouterProcess, post
from tests.wiring.test_standby import LIMIT_S, ask, code, pair

USE = ["c", 'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":3,"total_tokens":4}}\n\n']
STREAM = [SH, E("a"), FIN, USE, DONE, END]
FOLLOWING = """
[router]
listen = "127.0.0.1:0"
control_planes = [{planes}]
token_file = "{token}"
data_dir = "{folder}"
"""
SINCE = "since=1970-01-01T00:00:00Z"


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine()
    made.script = [OK]
    yield made
    made.close()


async def served(address: tuple[str, int], body: bytes) -> int:
    def work() -> int:
        with Client(address) as client:
            client.send(post(body))
            answer = client.answer()
            return answer.status if answer.whole else 0

    return await trio.to_thread.run_sync(work)


async def totals(of: Running) -> dict[str, Any]:
    status, body = await ask(of, "GET", f"/api/v1/usage?by=model&{SINCE}")
    assert status == 200
    assert isinstance(body, dict)
    found = body["total"]
    assert isinstance(found, dict)
    return found


def address_of(one: Running) -> tuple[str, int]:
    split = urlsplit(one.router_listen if "//" in one.router_listen else f"//{one.router_listen}")
    assert split.hostname is not None
    assert split.port is not None
    return split.hostname, split.port


async def test_sums_are_what_engines_said_at_every_router_through_a_change_of_the_leader(tmp_path: Path, engine: Engine) -> None:
    async with pair(tmp_path) as (first, second):
        profile = {"name": "p", "engine": "openai", "url": f"http://127.0.0.1:{engine.port}"}
        assert (await ask(first, "PUT", "/api/v1/models/m1", {"name": "m1", "profile": [profile]}, **{"If-None-Match": "*"}))[0] == 201
        folder = tmp_path / "router"
        folder.mkdir()
        planes = f'"{first.admin_url}", "{second.admin_url}"'
        text = FOLLOWING.format(planes=planes, token=first.agent_token_file, folder=folder)
        router = await trio.to_thread.run_sync(lambda: RouterProcess(folder, text))
        try:
            addresses = (address_of(first), address_of(second), router.address)
            plain = streamed = 0

            async def use_all() -> None:
                nonlocal plain, streamed
                for address in addresses:
                    with trio.fail_after(LIMIT_S):
                        while await served(address, CHAT) != 200:  # the list is still on its way to it
                            await trio.sleep(0.1)
                    plain += 1
                    engine.once.append(STREAM)
                    assert await served(address, CHAT_S) == 200
                    streamed += 1

            async def told() -> None:
                expected = {"requests": plain + streamed, "prompt_tokens": plain + streamed, "completion_tokens": plain + 3 * streamed}
                expected = {**expected, "cached_tokens": 0, "unknown": 0}
                with trio.move_on_after(2 * LIMIT_S):
                    while not await totals(first) == await totals(second) == expected:
                        await trio.sleep(0.2)
                    return
                raise AssertionError(f"expected {expected}, {await totals(first)}")

            await use_all()
            await use_all()
            assert (await ask(first, "POST", "/api/v1/leader/hand-over", {}))[0] == 202
            await use_all()
            with trio.fail_after(LIMIT_S):
                while not second.controller.leadership.is_leader:
                    await trio.sleep(0.05)
            await use_all()
            await told()
            # What a router has counted right before it is told to stop is told, or on its disk for the next.
            assert await served(router.address, CHAT) == 200
            plain += 1
            router.signal(signal.SIGTERM)
            assert await trio.to_thread.run_sync(lambda: router.process.wait(LIMIT_S)) == 0
            await told()
            assert json.loads((folder / "usage.json").read_text()) == {"format": 1, "waiting": None, "open": []}
        finally:
            router.close()


async def test_a_standby_tells_usage_with_the_control_planes_token_and_only_the_leader_takes_it(tmp_path: Path) -> None:
    async with pair(tmp_path) as (leader, standby):
        token = (tmp_path / "shared" / CONTROL_TOKEN_FILE).read_text().strip()
        peer = {CALLER: "admin ctl"}
        batch = unstructure(UsageBatch("b", 1, (UsageRow(3600, "k", "m", 1),)))
        assert code(await ask(standby, "POST", USAGE_PATH, batch, token, **peer)) == (503, "not_leader")
        for bad in ({}, {**batch, "number": 0}, {**batch, "rows": [{**batch["rows"][0], "prompt": -1}]}, {**batch, "rows": 3}):
            assert (await ask(leader, "POST", USAGE_PATH, bad, token, **peer))[0] == 400
        for _ in range(2):
            assert await ask(leader, "POST", USAGE_PATH, batch, token, **peer) == (200, {})
        assert (await totals(standby))["requests"] == 1
