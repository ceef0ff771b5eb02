"""Pooled connections: one that is used again is open and silent. On real sockets, without a router."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import attrs
import pytest

from llmgw.domain.endpoint import Endpoint
from llmgw.domain.ids import EndpointId
from llmgw.router.http1 import READ_BYTES
from llmgw.router.reactor import GONE, READ, Reactor
from llmgw.router.sweeper import Waiter
from llmgw.router.upstreams import EndpointState, Upstream


@attrs.frozen
class Pool:
    state: EndpointState
    upstream: Upstream
    engine: socket.socket  # its end of the connection

    def put_back(self) -> None:
        self.upstream.waiter = None
        self.state.keep(self.upstream, 0.0)


@pytest.fixture
def pool() -> Iterator[Pool]:
    reactor = Reactor(lambda: 0.0)
    reactor.open()
    state = EndpointState(Endpoint(EndpointId("e"), "http://127.0.0.1:1", ("m",)), reactor, 0.0)
    ours, engine = socket.socketpair()
    ours.setblocking(False)
    upstream = Upstream(ours, state, Waiter())
    reactor.add(upstream.descriptor, upstream)
    with engine:
        yield Pool(state, upstream, engine)
    upstream.close()
    reactor.close()


def test_a_connection_whose_answer_was_read_whole_is_used_again(pool: Pool) -> None:
    pool.engine.send(b"x" * 100)
    assert pool.upstream.receive() == b"x" * 100
    pool.put_back()
    assert pool.state.take() is pool.upstream
    assert pool.state.take() is None


def test_one_that_ends_with_its_answer_is_not_used_again_although_no_event_has_told_yet(pool: Pool) -> None:
    pool.engine.send(b"x")
    pool.engine.shutdown(socket.SHUT_WR)
    assert pool.upstream.receive() == b"x"
    pool.put_back()
    assert pool.state.take() is None
    assert pool.upstream.descriptor < 0


@pytest.mark.parametrize("surplus", [b"", b"leak"])
def test_one_whose_answer_fills_the_last_read_is_used_again_only_where_nothing_follows(pool: Pool, surplus: bytes) -> None:
    pool.engine.send(b"x" * READ_BYTES + surplus)
    assert pool.upstream.receive() == b"x" * READ_BYTES
    pool.put_back()
    assert (pool.state.take() is None) == bool(surplus)


@pytest.mark.parametrize("how", ["bytes", "end"])
def test_what_happens_on_a_pooled_one_takes_it_out(pool: Pool, how: str) -> None:
    pool.put_back()
    if how == "bytes":
        pool.engine.send(b"leak")
        pool.upstream.ready(READ)
    else:
        pool.engine.shutdown(socket.SHUT_WR)
        pool.upstream.ready(READ | GONE)
    assert pool.state.take() is None
    assert pool.upstream.descriptor < 0


def test_an_event_that_was_dealt_with_already_leaves_a_pooled_one_in(pool: Pool) -> None:
    pool.put_back()
    pool.upstream.ready(READ)
    assert pool.state.take() is pool.upstream
