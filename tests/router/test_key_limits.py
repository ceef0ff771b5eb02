"""Limits per minute, their headers, and operators' keys, at a real port (cases B166, B168)."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import attrs
import pytest
import trio

from llmgw.domain.endpoint import EndpointList
from llmgw.domain.policy import ApiKey, Policy
from llmgw.settings.objects import hash_key
from llmgw.wiring.machine import RealMachine
from tests.router.fakes import CHAT, CHAT_S, DONE, END, FIN, OK, SH, Answer, Client, E, Engine, answer, event, get, post
from tests.router.test_router import Here, endpoint, engine_of, running, stamp, until

KEY = ApiKey("team-a", hash_key("K"))
OPERATOR = ApiKey("ops", hash_key("OPS"), operator=True)
USED = ["c", 'data: {"choices":[],"usage":{"prompt_tokens":60,"completion_tokens":30,"total_tokens":90}}\n\n']
NAMES = ("limit-requests", "remaining-requests", "reset-requests", "limit-tokens", "remaining-tokens", "reset-tokens")


class LaterMachine(RealMachine):
    """A real machine on which minutes pass when a test says so."""

    ahead_s = 0.0

    def now_s(self) -> float:
        return super().now_s() + self.ahead_s


@attrs.define
class Site:
    here: Here
    machine: LaterMachine
    u1: Engine
    u2: Engine

    async def ask(self, body: bytes = CHAT, extra: str = "", key: str = "K", path: str = "/v1/chat/completions") -> Answer:
        return await self.here.ask(post(body, extra, key=key, path=path))

    def allow(self, *keys: ApiKey) -> None:
        self.here.router.set_policy(Policy(keys=keys))


@asynccontextmanager
async def site(*keys: ApiKey) -> AsyncIterator[Site]:
    machine = LaterMachine()
    with engine_of() as u1, engine_of() as u2:
        async with running(Policy(keys=keys), machine) as here:
            here.router.set_endpoints(EndpointList((endpoint(u1), endpoint(u2, "u2", priority=1))), stamp(1))
            yield Site(here, machine, u1, u2)


def limits_of(got: Answer) -> tuple[str | None, ...]:
    return tuple(got.get(f"x-ratelimit-{name}") for name in NAMES)


async def test_requests_beyond_the_limit_are_429_until_the_minute_has_passed() -> None:
    async with site(attrs.evolve(KEY, requests_per_minute=2)) as one:
        for left in ("1", "0"):
            got = await one.ask()
            assert (got.status, limits_of(got)[:2], limits_of(got)[3:]) == (200, ("2", left), (None, None, None))
            assert (limits_of(got)[2] or "").endswith("s")
        refused = await one.ask()
        assert (refused.status, refused.error["code"], refused.error["type"]) == (429, "rate_limit_exceeded", "rate_limit_error")
        assert "2 requests a minute" in refused.error["message"]
        assert 1 <= int(refused.get("retry-after") or 0) <= 60
        assert limits_of(refused)[:2] == ("2", "0")
        assert len(one.u1.requests) == 2
        assert b"status=429" in one.here.lines[-1]
        one.machine.ahead_s += 60.0
        assert (await one.ask()).status == 200


@pytest.mark.case("B168")
async def test_what_is_refused_for_another_reason_uses_up_no_quota() -> None:
    key = attrs.evolve(KEY, requests_per_minute=2, max_parallel=1, models=("m1",))
    async with site(key) as one, trio.open_nursery() as nursery:
        for body, extra, status in ((b"{", "", 400), (CHAT.replace(b"m1", b"nope"), "", 404), (CHAT, "x-llmgw-endpoint: u1\r\n", 403)):
            got = await one.ask(body, extra)
            assert (got.status, limits_of(got)[1]) == (status, "2")
        go = threading.Event()
        one.u1.once = [[["hold", go], OK]]
        nursery.start_soon(one.ask)
        await until(lambda: one.u1.requests, "the first is with the engine")
        assert (await one.ask()).error["code"] == "parallel_limit"
        go.set()
        await until(lambda: one.here.router.parallel.running("team-a") == 0, "the first is over")
        got = await one.ask()
        assert (got.status, limits_of(got)[1]) == (200, "0")


async def test_tokens_are_charged_as_the_engine_says_of_an_answer_and_of_a_stream() -> None:
    async with site(attrs.evolve(KEY, tokens_per_minute=200)) as one:
        one.u1.once = [
            [answer(200, '{"model":"m1","usage":{"prompt_tokens":40,"completion_tokens":50}}')],
            [SH, E("a"), FIN, USED, DONE, END],
        ]
        first = await one.ask()
        assert (first.status, limits_of(first)[:3], limits_of(first)[3]) == (200, (None, None, None), "200")
        models = await one.here.ask(get("/v1/models"))
        assert limits_of(models)[4] == "110"
        stream = await one.ask(CHAT_S)
        assert (stream.status, limits_of(stream)[4]) == (200, str(110 - len(CHAT_S) // 4))
        await until(lambda: one.here.router.rates.use("team-a").tokens.used(one.machine.now_s()) == 180, "both are counted")
        asked = CHAT.replace(b"}]", b'}],"max_tokens":100')
        refused = await one.ask(asked)
        assert (refused.status, refused.error["code"]) == (429, "rate_limit_exceeded")
        assert "of which 180 are used" in refused.error["message"]
        assert limits_of(refused)[4] == "20"
        one.machine.ahead_s += 61.0
        assert (await one.ask(asked)).status == 200


async def test_an_answer_without_usage_costs_its_estimate_and_one_that_failed_nothing() -> None:
    async with site(attrs.evolve(KEY, tokens_per_minute=1000)) as one:
        used = one.here.router.rates.use("team-a").tokens
        one.u1.script = one.u2.script = [answer(500, '{"error":"broken"}')]
        assert (await one.ask()).status == 500
        await until(lambda: used.used(one.machine.now_s()) == 0, "nothing is charged")
        one.u1.script = one.u2.script = [SH, E("a"), FIN, DONE, END]
        assert (await one.ask(CHAT_S)).status == 200
        await until(lambda: len(one.here.lines) == 2, "it is over")
        assert used.used(one.machine.now_s()) == len(CHAT_S) // 4


async def test_messages_of_anthropics_family_have_their_own_shape_and_their_own_counts() -> None:
    start = 'event: message_start\ndata: {"type":"message_start","message":{"usage":{"input_tokens":20,"cache_read_input_tokens":30}}}\n\n'
    delta = 'event: message_delta\ndata: {"type":"message_delta","delta":{},"usage":{"output_tokens":50}}\n\n'
    stop = 'event: message_stop\ndata: {"type":"message_stop"}\n\n'
    async with site(attrs.evolve(KEY, tokens_per_minute=100)) as one:
        one.u1.script = [SH, ["c", start], ["c", delta], ["c", stop], END]
        assert (await one.ask(CHAT_S, path="/v1/messages")).status == 200
        used = one.here.router.rates.use("team-a").tokens
        await until(lambda: used.used(one.machine.now_s()) == 100, "all of it is counted")
        refused = await one.ask(CHAT_S, path="/v1/messages")
        assert (refused.status, refused.error["type"], refused.error["code"]) == (429, "rate_limit_error", "rate_limit_exceeded")
        assert refused.json()["type"] == "error"


async def test_a_limit_that_is_changed_counts_what_was_used_before() -> None:
    key = attrs.evolve(KEY, requests_per_minute=10)
    async with site(key) as one:
        for _ in range(3):
            assert (await one.ask()).status == 200
        one.allow(attrs.evolve(key, requests_per_minute=3))
        assert limits_of(refused := await one.ask())[:2] == ("3", "0")
        assert refused.status == 429
        one.allow(attrs.evolve(key, requests_per_minute=4))
        assert limits_of(await one.ask())[:2] == ("4", "0")
        one.allow(KEY)
        assert limits_of(got := await one.ask()) == (None,) * 6
        assert got.status == 200


async def test_b166_a_revoked_key_is_refused_at_once_on_an_open_connection_and_its_stream_is_finished() -> None:
    go = threading.Event()
    async with site(KEY) as one:
        one.u1.once = [[SH, E("a"), ["hold", go], E("b"), FIN, DONE, END]]

        def stream() -> tuple[Answer, bytes, Answer]:
            with Client(one.here.address) as streaming, Client(one.here.address) as kept:
                kept.send(post(CHAT))
                kept.answer()
                streaming.send(post(CHAT_S))
                streaming.until(event("a").encode())
                trio.from_thread.run_sync(one.allow)
                kept.send(post(CHAT))
                refused = kept.answer()
                go.set()
                rest = streaming.until(b"0\r\n\r\n")
                streaming.send(post(CHAT))
                return refused, rest, streaming.answer()

        one.u1.once.insert(0, [OK])
        refused, rest, after = await trio.to_thread.run_sync(stream, abandon_on_cancel=True)
        assert (refused.status, refused.error["code"]) == (401, "invalid_api_key")
        assert b"[DONE]" in rest
        assert after.status == 401


async def test_an_operators_key_is_told_who_answered_and_others_are_not() -> None:
    async with site(KEY, OPERATOR) as one:
        got = await one.ask(key="OPS")
        assert got.get("x-llmgw-endpoint") == "u1"
        router, engine = (got.get("server-timing") or "").split(", ")
        assert router.startswith("router;dur=")
        assert engine.startswith("engine;dur=")
        models = await one.here.ask(get("/v1/models", key="OPS"))
        assert (models.get("x-llmgw-endpoint"), (models.get("server-timing") or "").partition("=")[0]) == (None, "router;dur")
        one.u1.once = [[answer(200, "{}", "x-llmgw-endpoint: theirs", "x-ratelimit-remaining-requests: 7", "openai-version: 1")]]
        other = await one.ask()
        assert (other.get("x-llmgw-endpoint"), other.get("server-timing")) == (None, None)
        assert (other.get("x-ratelimit-remaining-requests"), other.get("openai-version")) == (None, "1")


async def test_an_operator_may_ask_one_endpoint_and_nobody_else_answers_for_it() -> None:
    async with site(KEY, OPERATOR) as one:
        for name, engine in (("u2", one.u2), ("u1", one.u1)):
            got = await one.ask(extra=f"X-LLMGW-Endpoint: {name}\r\n", key="OPS")
            assert (got.status, got.get("x-llmgw-endpoint"), len(engine.requests)) == (200, name, 1)
        assert "x-llmgw" not in one.u2.requests[0]["head"].lower()
        one.u2.script = [answer(500, '{"error":"broken"}')]
        failed = await one.ask(extra="x-llmgw-endpoint: u2\r\n", key="OPS")
        assert (failed.status, failed.get("x-llmgw-endpoint"), len(one.u1.requests)) == (500, "u2", 1)
        twice = await one.ask(extra="x-llmgw-endpoint: u2\r\nx-llmgw-endpoint: u1\r\n", key="OPS")
        assert (twice.status, twice.error["code"]) == (400, "unknown_endpoint")
        empty = await one.ask(extra="x-llmgw-endpoint:\r\n", key="OPS")
        assert (empty.status, empty.error["code"]) == (400, "unknown_endpoint")
        unknown = await one.ask(extra="x-llmgw-endpoint: u9\r\n", key="OPS")
        assert (unknown.status, unknown.error["code"], unknown.error["param"]) == (400, "unknown_endpoint", "x-llmgw-endpoint")
        assert "u1, u2" in unknown.error["message"]


@pytest.mark.parametrize("name", ["u1", "u9", "\xe9"])
async def test_a_key_that_is_no_operators_may_not_choose_an_endpoint_and_learns_nothing_of_them(name: str) -> None:
    async with site(KEY) as one:
        data = post(CHAT).replace(b"Host: g\r\n", b"Host: g\r\nx-llmgw-endpoint: %b\r\n" % name.encode("latin-1"))
        refused = await one.here.ask(data)
        assert (refused.status, refused.error["code"]) == (403, "endpoint_not_allowed")
        assert "u1" not in refused.body.decode()
        assert one.u1.requests == one.u2.requests == []


async def test_a_browser_may_read_what_a_key_is_told() -> None:
    async with site(attrs.evolve(KEY, requests_per_minute=5)) as one:
        one.here.router.set_policy(attrs.evolve(one.here.router.policy, cors_origins=("http://app.test",)))
        got = await one.ask(extra="Origin: http://app.test\r\n")
        exposed = (got.get("access-control-expose-headers") or "").split(", ")
        assert {"x-ratelimit-remaining-requests", "x-ratelimit-reset-tokens", "x-llmgw-endpoint", "server-timing"} <= set(exposed)
