"""The router inside another process: what its ports promise to a control plane (router.md 2)."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import attrs
import pytest
import trio

from llmgw.domain.endpoint import Absence, AbsenceReason, Endpoint, EndpointList, ListStamp
from llmgw.domain.errors import Conflict, Invalid, StaleEpoch, Unavailable
from llmgw.domain.ids import ClusterId, EndpointId, OwnerId
from llmgw.domain.lease import FencingToken
from llmgw.domain.model import Catalog, ModelSpec, Profile
from llmgw.domain.policy import ApiKey, GuardPolicy, GuardRule, Policy, RouteSettings
from llmgw.domain.ports import Machine
from llmgw.router.listener import open_shared, serve
from llmgw.router.metrics import Following
from llmgw.router.proxy import Connection
from llmgw.router.router import Router
from llmgw.wiring.machine import RealMachine
from tests.router.fakes import CHAT, CHAT_S, DONE, END, FIN, OK, SH, WAIT_S, Answer, Client, E, Engine, get, interpreted_only, post

TOKEN = FencingToken(ClusterId("c"), 5, OwnerId("a-1"))


@attrs.define
class Here:
    router: Router
    address: tuple[str, int]
    lines: list[bytes]
    bugs: list[str]

    async def ask(self, data: bytes) -> Answer:
        def work() -> Answer:
            with Client(self.address) as client:
                client.send(data)
                return client.answer()

        return await trio.to_thread.run_sync(work, abandon_on_cancel=True)


@asynccontextmanager
async def running(policy: Policy | None = None, machine: Machine | None = None) -> AsyncIterator[Here]:
    lines: list[bytes] = []
    bugs: list[str] = []
    router = Router(machine or RealMachine(), policy or Policy(auth_required=False), lines.append, report=bugs.append)
    async with trio.open_nursery() as nursery:
        shown = await nursery.start(serve, router, "127.0.0.1:0")
        host, _, port = shown.rpartition(":")
        with trio.fail_after(60):
            yield Here(router, (host, int(port)), lines, bugs)
        nursery.cancel_scope.cancel()


@contextlib.contextmanager
def engine_of(script: object = None) -> Iterator[Engine]:
    engine = Engine()
    engine.script = script if script is not None else [OK]
    try:
        yield engine
    finally:
        engine.close()


def endpoint(engine: Engine, name: str = "u1", **more: object) -> Endpoint:
    return Endpoint(EndpointId(name), f"http://127.0.0.1:{engine.port}", ("m1",), **more)  # type: ignore[arg-type]


def stamp(generation: int, token: FencingToken = TOKEN) -> ListStamp:
    return ListStamp(token, generation)


async def until(condition: Callable[[], object], what: str) -> None:
    with trio.move_on_after(WAIT_S):
        while not condition():
            await trio.sleep(0.01)
        return
    raise AssertionError(f"never came: {what}")


async def test_a_withdrawn_endpoint_gets_nothing_new_and_its_stream_ends_undisturbed() -> None:
    go = threading.Event()
    with engine_of([SH, E("a"), ["hold", go], FIN, DONE, END]) as old, engine_of() as new:
        async with running() as here, trio.open_nursery() as nursery:
            here.router.set_endpoints(EndpointList((endpoint(old),)), stamp(1))
            found: list[Answer] = []

            async def stream() -> None:
                found.append(await here.ask(post(CHAT_S)))

            nursery.start_soon(stream)
            await until(lambda: old.requests, "the stream runs")
            here.router.set_endpoints(EndpointList((endpoint(new, "u2"),)), stamp(2))
            assert here.router.acknowledged() == 2
            for _ in range(5):
                assert (await here.ask(post(CHAT))).status == 200
            assert len(old.requests) == 1
            use = here.router.use()
            assert use[EndpointId("u1")].in_flight == 1
            assert use[EndpointId("u2")].in_flight == 0
            go.set()
            await until(lambda: found, "the stream ends")
            assert found[0].events[-1] == "data: [DONE]"
            await until(lambda: EndpointId("u1") not in here.router.use(), "nothing runs there")


async def test_an_endpoint_that_moves_is_the_same_as_one_withdrawn() -> None:
    go = threading.Event()
    with engine_of([["hold", go], OK]) as old, engine_of() as new:
        async with running() as here, trio.open_nursery() as nursery:
            here.router.set_endpoints(EndpointList((endpoint(old),)), stamp(1))
            nursery.start_soon(here.ask, post(CHAT))
            await until(lambda: old.requests, "it runs")
            here.router.set_endpoints(EndpointList((endpoint(new),)), stamp(2))
            assert (await here.ask(post(CHAT))).status == 200
            assert (len(old.requests), len(new.requests)) == (1, 1)
            assert here.router.use()[EndpointId("u1")].in_flight == 1
            go.set()
            await until(lambda: here.router.use()[EndpointId("u1")].in_flight == 0, "all have ended")


async def test_no_retry_goes_to_an_endpoint_withdrawn_meanwhile() -> None:
    with engine_of([["w", 100], ["close"]]) as failing, engine_of() as other:
        async with running() as here, trio.open_nursery() as nursery:
            both = EndpointList((endpoint(failing, priority=0), endpoint(other, "u2", priority=1)))
            here.router.set_endpoints(both, stamp(1))
            found: list[Answer] = []

            async def ask() -> None:
                found.append(await here.ask(post(CHAT)))

            nursery.start_soon(ask)
            await until(lambda: failing.requests, "it is tried")
            here.router.set_endpoints(EndpointList((endpoint(failing),)), stamp(2))
            await until(lambda: found, "the answer")
            assert found[0].status == 502
            assert other.requests == []


async def test_lists_of_another_cluster_or_a_lower_epoch_are_refused_and_change_nothing() -> None:
    with engine_of() as engine:
        async with running() as here:
            good = EndpointList((endpoint(engine),))
            here.router.set_endpoints(good, stamp(3))
            for token, error in (
                (attrs.evolve(TOKEN, epoch=4), StaleEpoch),
                (attrs.evolve(TOKEN, owner=OwnerId("b-2")), StaleEpoch),
                (attrs.evolve(TOKEN, cluster_id=ClusterId("other"), epoch=9), Conflict),
            ):
                with pytest.raises(error):
                    here.router.set_endpoints(EndpointList(), stamp(9, token))
            here.router.set_endpoints(EndpointList(), stamp(2))  # a late one of the same publisher
            assert here.router.acknowledged() == 3
            assert (await here.ask(post(CHAT))).status == 200
            here.router.set_endpoints(EndpointList(), stamp(1, attrs.evolve(TOKEN, epoch=6, owner=OwnerId("b-2"))))
            assert here.router.acknowledged() == 1
            assert (await here.ask(post(CHAT))).status == 404


async def test_new_numbers_beside_an_unchanged_list_keep_the_connections() -> None:
    with engine_of() as engine:
        async with running() as here:
            for generation in range(1, 4):
                here.router.set_endpoints(EndpointList((endpoint(engine),)), stamp(generation))
                assert (await here.ask(post(CHAT))).status == 200
            assert {seen["conn"] for seen in engine.requests} == {1}
            here.router.set_endpoints(EndpointList((endpoint(engine, weight=2.0),)), stamp(4))
            assert (await here.ask(post(CHAT))).status == 200
            assert {seen["conn"] for seen in engine.requests} == {1}


async def test_absent_models_are_503_with_the_reason_and_listed_with_it() -> None:
    async with running() as here:
        held = Absence(("m1", "fast"), AbsenceReason.HELD, "facility hall-2 is held: power works")
        here.router.set_endpoints(EndpointList((), (held,)), stamp(1))
        for name in (b"m1", b"fast"):
            got = await here.ask(post(CHAT.replace(b"m1", name)))
            assert (got.status, got.error["code"]) == (503, "held")
            assert "power works" in got.error["message"]
            assert got.get("retry-after") is not None
        rows = (await here.ask(get("/v1/models"))).json()["data"]
        assert [(row["id"], row["reason"]) for row in rows] == [("fast", "held"), ("m1", "held")]
        assert (await here.ask(get("/ready"))).status == 503


async def test_models_of_the_catalog_are_known_before_they_have_an_endpoint() -> None:
    async with running() as here:
        here.router.set_catalog(Catalog((ModelSpec("m1", (Profile("p", "command", command=("x",)),)),)))
        got = await here.ask(post(CHAT))
        assert (got.status, got.error["code"]) == (503, "loading")


async def test_a_policy_counts_for_the_next_request() -> None:
    with engine_of() as engine:
        async with running() as here:
            here.router.set_endpoints(EndpointList((endpoint(engine),)), stamp(1))
            assert (await here.ask(post(CHAT, key=""))).status == 200
            key = ApiKey("k", hashlib.sha256(b"K").hexdigest())
            here.router.set_policy(Policy(keys=(key,)))
            assert (await here.ask(post(CHAT, key=""))).status == 401
            assert (await here.ask(post(CHAT))).status == 200
            here.router.set_policy(Policy(route=RouteSettings(max_body_bytes=1024), keys=(key,)))
            assert (await here.ask(post(CHAT + b" " * 2000))).status == 413
            here.router.set_policy(Policy(keys=(attrs.evolve(key, expires_wall_s=1.0),)))
            assert (await here.ask(post(CHAT))).status == 401


async def test_a_policy_that_changes_during_a_stream_is_the_next_requests_and_stays() -> None:
    # Case B161: a setting changed, and a request in flight brought the old one back.
    go = threading.Event()
    blocking = GuardPolicy(max_output_tokens=5, rule=(GuardRule("r", words=("hi",)),))
    with engine_of([SH, E("a"), ["hold", go], E("b"), FIN, DONE, END]) as engine:
        async with running() as here:
            here.router.set_endpoints(EndpointList((endpoint(engine),)), stamp(1))

            def stream() -> tuple[bytes, Answer, bytes]:
                with Client(here.address) as client:
                    client.send(post(CHAT_S))
                    begin = client.until(b"\n\n")
                    trio.from_thread.run_sync(here.router.set_policy, Policy(auth_required=False, guard=blocking))
                    with Client(here.address) as other:
                        other.send(post(CHAT))
                        refused = other.answer()
                    go.set()
                    return begin, refused, client.until(b"0\r\n\r\n")

            begin, refused, rest = await trio.to_thread.run_sync(stream, abandon_on_cancel=True)
            assert b"200 OK" in begin
            assert b"[DONE]" in rest
            assert (refused.status, refused.error["code"]) == (400, "guard_blocked")
            assert (await here.ask(post(CHAT))).status == 400  # and the end of the stream brought nothing back
            assert (await here.ask(post(CHAT.replace(b'"hi"', b'"ho"').replace(b"}]", b'}],"max_tokens":6')))).error[
                "param"
            ] == "max_tokens"
            here.router.set_policy(Policy(auth_required=False))
            assert (await here.ask(post(CHAT))).status == 200
            assert len(engine.requests) == 2
            assert here.bugs == []


async def test_what_a_guard_refuses_takes_no_slot_no_endpoint_and_no_model_out_of_its_sleep() -> None:
    woken: list[str] = []
    async with running(Policy(auth_required=False, guard=GuardPolicy(rule=(GuardRule("r", words=("hi",)),)))) as here:
        here.router.wake = woken.append
        here.router.set_catalog(Catalog((ModelSpec("m1", (Profile("p", "command", command=("/e",)),)),)))
        assert (await here.ask(post(CHAT))).status == 400
        assert (await here.ask(post(CHAT.replace(b"hi", b"ho")))).status == 503
        assert woken == ["m1"]
        assert dict(here.router.use()) == {}


async def test_engines_get_their_own_key_and_never_the_clients() -> None:
    with engine_of() as engine:
        async with running() as here:
            here.router.set_endpoints(EndpointList((endpoint(engine, key="engine-secret"),)), stamp(1))
            await here.ask(post(CHAT, key="client-secret"))
            head = engine.requests[0]["head"]
            assert "authorization: Bearer engine-secret" in head
            assert "client-secret" not in head


async def test_what_an_endpoint_was_seen_to_do_is_told() -> None:
    with engine_of([["s", "HTTP/1.1 500 X\r\nContent-Length: 2\r\n\r\n{}"]]) as engine:
        async with running() as here:
            here.router.set_endpoints(EndpointList((endpoint(engine),)), stamp(1))
            assert dict(here.router.use()) == {}
            assert (await here.ask(post(CHAT))).status == 500
            use = here.router.use()[EndpointId("u1")]
            assert (use.in_flight, use.answers, use.failures, use.refused) == (0, 1, 1, False)
            assert use.last_used_s < 30
            engine.close()
            assert (await here.ask(post(CHAT))).status == 503
            assert here.router.use()[EndpointId("u1")].refused


async def test_silence_of_a_running_request_is_told() -> None:
    with engine_of([["w", 20_000]]) as engine:
        async with running() as here, trio.open_nursery() as nursery:
            here.router.set_endpoints(EndpointList((endpoint(engine),)), stamp(1))
            nursery.start_soon(here.ask, post(CHAT))
            await until(lambda: EndpointId("u1") in here.router.use() and here.router.use()[EndpointId("u1")].silent_s > 0.3, "silence")
            assert here.router.use()[EndpointId("u1")].in_flight == 1
            nursery.cancel_scope.cancel()


async def test_attempts_without_a_byte_are_told_until_one_comes() -> None:
    with engine_of([["w", 20_000]]) as engine:
        async with running(Policy(RouteSettings(first_byte_timeout_s=0.1), auth_required=False)) as here:
            here.router.set_endpoints(EndpointList((endpoint(engine),)), stamp(1))
            for _ in range(2):
                assert (await here.ask(post(CHAT))).status == 504
            use = here.router.use()[EndpointId("u1")]
            assert (use.unanswered, use.answers, use.heard_s) == (2, 0, None)
            engine.script = [OK]
            assert (await here.ask(post(CHAT))).status == 200
            use = here.router.use()[EndpointId("u1")]
            assert use.unanswered == 0
            assert use.heard_s is not None


async def test_a_connect_that_never_stands_is_an_attempt_without_a_byte() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as deaf, contextlib.ExitStack() as held:
        for _ in range(4):  # fills the queue of connections that nobody takes, as with a frozen engine; further ones hang
            filler = held.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(deaf.getsockname())
        async with running(Policy(RouteSettings(connect_timeout_s=0.1), auth_required=False)) as here:
            url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
            here.router.set_endpoints(EndpointList((Endpoint(EndpointId("u1"), url, ("m1",)),)), stamp(1))
            assert (await here.ask(post(CHAT))).error["code"] == "unreachable"
            assert here.router.use()[EndpointId("u1")].unanswered == 1


async def test_a_stream_that_begins_with_an_error_counts_as_a_failed_answer() -> None:
    with engine_of([SH, ["c", 'data: {"error":{"message":"boom","code":500}}\n\n'], DONE, END]) as engine:
        async with running() as here:
            here.router.set_endpoints(EndpointList((endpoint(engine),)), stamp(1))
            assert (await here.ask(post(CHAT_S))).status == 500
            use = here.router.use()[EndpointId("u1")]
            assert (use.answers, use.failures, use.unanswered) == (1, 1, 0)


async def test_one_request_that_waits_is_no_silence_while_bytes_of_another_come() -> None:
    with engine_of([["w", 20_000]]) as engine:
        async with running() as here, trio.open_nursery() as nursery:
            here.router.set_endpoints(EndpointList((endpoint(engine),)), stamp(1))
            nursery.start_soon(here.ask, post(CHAT))
            await until(lambda: EndpointId("u1") in here.router.use() and here.router.use()[EndpointId("u1")].silent_s > 0.3, "silence")
            engine.script = [OK]
            assert (await here.ask(post(CHAT))).status == 200
            use = here.router.use()[EndpointId("u1")]
            assert use.in_flight == 1
            assert use.silent_s < 0.3
            nursery.cancel_scope.cancel()


@pytest.mark.case("T30")
@interpreted_only
async def test_a_fault_of_our_own_is_a_500_and_is_told_to_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as here:
        text = " ".join(("secret", "words"))

        def broken(*_: object) -> None:
            raise RuntimeError(text)

        monkeypatch.setattr(Connection, "_decide", broken)
        got = await here.ask(post(CHAT))
        assert (got.status, got.error["code"]) == (500, "internal_error")
        assert "RuntimeError" not in got.body.decode()
        assert len(here.bugs) == 1
        assert "RuntimeError" in here.bugs[0]
        assert "secret words" not in here.bugs[0]
        monkeypatch.undo()
        assert (await here.ask(get("/health"))).status == 200


@pytest.mark.case("B014")
@interpreted_only
async def test_a_fault_of_our_own_in_mid_stream_never_looks_like_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_of([SH, E("a"), ["w", 100], E("b"), FIN, DONE, END]) as engine:
        async with running() as here:
            here.router.set_endpoints(EndpointList((endpoint(engine),)), stamp(1))
            from llmgw.router.relay import _Events

            real = _Events._passed

            def broken(self: _Events, events: list[bytes]) -> bytes:
                if any(b'"b"' in event for event in events):
                    raise RuntimeError
                return real(self, events)

            monkeypatch.setattr(_Events, "_passed", broken)
            got = await here.ask(post(CHAT_S))
            assert "internal_error" in got.events[-1]
            assert not got.whole
            assert here.router.use()[EndpointId("u1")].in_flight == 0


async def test_addresses_that_cannot_be_listened_on_are_one_clear_error() -> None:
    router = Router(RealMachine(), Policy(), lambda line: None)
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(Conflict, match="taken"):
        await serve(router, f"127.0.0.1:{taken.getsockname()[1]}")
    for address, error in (
        ("nonsense", Invalid),
        ("127.0.0.1:99999", Invalid),
        ("192.0.2.1:80", Unavailable),
        ("unix:/no/such/folder/x", Invalid),
    ):
        with pytest.raises(error):
            await serve(router, address)


@pytest.mark.parametrize("kind", ["file", "folder", "link to a file", "link to nothing"])
@pytest.mark.parametrize("workers", [1, 2])
async def test_what_stands_where_a_unix_socket_should_is_told_and_kept(tmp_path: Path, kind: str, workers: int) -> None:
    path, file = tmp_path / "x.sock", tmp_path / "file"
    file.write_text("precious")
    if kind == "file":
        file.rename(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(file if kind == "link to a file" else tmp_path / "nothing")
    before = os.lstat(path)
    with pytest.raises(Invalid, match=f"unix:{path}: what is there is no socket"):
        if workers == 1:
            await serve(Router(RealMachine(), Policy(), lambda line: None), f"unix:{path}")
        else:
            open_shared(f"unix:{path}", workers)
    assert os.lstat(path) == before


async def test_a_file_that_was_put_in_the_place_of_its_unix_socket_outlives_a_router(tmp_path: Path) -> None:
    path = tmp_path / "x.sock"
    async with trio.open_nursery() as nursery:
        await nursery.start(serve, Router(RealMachine(), Policy(), lambda line: None), f"unix:{path}")
        path.unlink()
        path.write_text("precious")
        nursery.cancel_scope.cancel()
    assert path.read_text() == "precious"


async def test_metrics_ask_for_a_token_off_loopback() -> None:
    async with running() as here:
        assert (await here.ask(get("/metrics", key=""))).status == 200
        here.router.loopback = False
        assert (await here.ask(get("/metrics", key=""))).status == 403
        here.router._metrics_token = "t\xf6ken"
        assert (await here.ask(get("/metrics", key=""))).status == 401
        assert (await here.ask(get("/metrics", key="t\xe9"))).status == 401
        with_token = get("/metrics", key="").replace(b"Host: g\r\n", "Host: g\r\nAuthorization: Bearer t\xf6ken\r\n".encode())
        assert (await here.ask(with_token)).status == 200


async def test_label_values_never_come_from_clients() -> None:
    async with running() as here:
        for number in range(5):
            await here.ask(post(CHAT.replace(b"m1", b"invented-%d" % number)))
        text = (await here.ask(get("/metrics"))).body.decode()
        assert "invented" not in text
        assert 'llmgw_requests_total{model="",status="404"} 5.0' in text


@pytest.mark.parametrize("base", ["", "/v1", "/proxy/", "/proxy/v1/"])
async def test_an_engines_address_may_have_a_path(base: str) -> None:
    with engine_of() as engine:
        async with running() as here:
            where = attrs.evolve(endpoint(engine), url=f"http://localhost:{engine.port}{base}")
            here.router.set_endpoints(EndpointList((where,)), stamp(1))
            assert (await here.ask(post(CHAT))).status == 200
            expected = "/proxy/v1/chat/completions" if "proxy" in base else "/v1/chat/completions"
            assert engine.requests[0]["path"] == expected
            assert f"host: localhost:{engine.port}" in engine.requests[0]["head"]


# --- following control planes


async def test_a_router_that_waits_for_its_first_list_says_so_and_judges_neither_keys_nor_models() -> None:
    with engine_of() as engine:
        async with running(Policy()) as here:
            here.router.waiting = True
            for request in (post(CHAT), get("/v1/models"), get("/v1/models/m1")):
                answer = await here.ask(request)
                assert (answer.status, answer.error["code"]) == (503, "no_list")
                assert answer.get("retry-after") == "2"
            ready = await here.ask(get("/ready"))
            assert (ready.status, ready.json()["reasons"]) == (503, ["no control plane has been heard yet"])
            assert (await here.ask(get("/health"))).status == 200
            here.router.set_endpoints(EndpointList((endpoint(engine),)), stamp(1))
            assert (await here.ask(post(CHAT))).status == 401
            here.router.set_policy(Policy(auth_required=False))
            assert (await here.ask(post(CHAT))).status == 200


async def test_a_seed_is_served_acknowledges_nothing_and_goes_with_the_first_list() -> None:
    with engine_of() as first, engine_of() as second:
        async with running() as here:
            here.router.waiting = True
            here.router.seed(EndpointList((endpoint(first, "seed"),)))
            assert (await here.ask(post(CHAT))).status == 200
            assert here.router.acknowledged() == 0
            here.router.set_endpoints(EndpointList((endpoint(second, "pushed"),)), stamp(7))
            assert (await here.ask(post(CHAT))).status == 200
            assert here.router.acknowledged() == 7
            assert (len(first.requests), len(second.requests)) == (1, 1)


async def test_a_call_of_a_model_that_has_no_endpoint_wakes_it_and_one_of_a_model_that_is_none_wakes_nothing() -> None:
    async with running() as here:
        woken: list[str] = []
        here.router.wake = woken.append
        here.router.set_endpoints(EndpointList((), (Absence(("m1", "alias"), AbsenceReason.NO_CAPACITY),)), stamp(1))
        assert (await here.ask(post(CHAT))).status == 503
        assert (await here.ask(post(CHAT.replace(b"m1", b"alias")))).status == 503
        assert (await here.ask(post(CHAT.replace(b"m1", b"invented")))).status == 404
        assert woken == ["m1", "m1"]


async def test_metrics_tell_which_control_planes_are_followed_and_nothing_of_it_where_none_is() -> None:
    async with running() as here:
        alone = (await here.ask(get("/metrics"))).body
        assert not any(name in alone for name in (b"router_session", b"router_leader", b"router_epoch", b"list_age", b"by_standby"))
        here.router.following = lambda: Following({"http://a:1": True, "http://b:1": False}, "http://a:1", 7, 0.5, 0.25, False)
        text = (await here.ask(get("/metrics"))).body.decode()
        for line in (
            'llmgw_router_session{control_plane="http://a:1"} 1.0',
            'llmgw_router_session{control_plane="http://b:1"} 0.0',
            'llmgw_router_leader{control_plane="http://a:1"} 1.0',
            "llmgw_router_epoch 7.0",
            "llmgw_router_leader_silent_seconds 0.5",
            "llmgw_router_list_age_seconds 0.25",
            "llmgw_router_by_standby 0.0",
        ):
            assert f"{line}\n" in text
