"""One change among 5,000 endpoints, from the control plane's observation to what eight routers are sent, and what each makes of it."""

from __future__ import annotations

import itertools
import time
from typing import Final

import attrs
import trio
from structlog.testing import capture_logs

from benchmarks.measure import Row, cpu_ms, median
from benchmarks.planner import REPLICAS, cluster
from llmgw.control.endpoint_list import Made, build_list
from llmgw.control.feed import RouterFeeds
from llmgw.control.inventory import Inventory
from llmgw.control.publisher import Publisher
from llmgw.domain.endpoint import DIGEST_FORM, ListStamp
from llmgw.domain.ids import ClusterId, OwnerId
from llmgw.domain.lease import FencingToken
from llmgw.protocol import list_delta
from llmgw.protocol.codec import Shared, decode, encode
from llmgw.protocol.messages import Message
from llmgw.protocol.router_messages import PushDelta, PushEndpoints, RouterHello
from llmgw.sim.machine import SimMachine

SINKS: Final = 8
ROUNDS: Final = 15
MODES: Final = (True, False)  # by deltas; whole, as to routers of a build that does not know them


class Leader:
    cluster_id = ClusterId("c")
    owner = OwnerId("o")
    epoch = 1
    is_leader = True
    token = FencingToken(cluster_id, epoch, owner)

    def met(self, epoch: int, owner: str) -> None:
        raise AssertionError("nobody else leads")


class Wire:
    """A router's channel as the control plane has it: what is sent is made into bytes, and goes no further."""

    peer = "router"

    def __init__(self, hello: RouterHello) -> None:
        self._hello: RouterHello | None = hello
        self.lists: list[bytes] = []
        self.taken = trio.Event()

    async def send(self, message: Message | Shared) -> None:
        await trio.lowlevel.checkpoint()
        data = encode(message)
        if isinstance(message, Shared):
            self.lists.append(data)
            self.taken.set()

    async def receive(self) -> Message:
        hello, self._hello = self._hello, None
        if hello is None:
            await trio.sleep_forever()
        assert hello is not None
        return hello

    async def close(self, code: int = 1000, reason: str = "") -> None:
        await trio.lowlevel.checkpoint()


@attrs.frozen
class Measured:
    """`cpu_ms` of one change, from what is observed to the bytes for every router, and the messages of one of them."""

    cpu_ms: float
    lists: list[bytes]


async def publish(deltas: bool) -> Measured:
    """One replica goes out of rotation and comes back, round after round."""
    desired, observed = cluster()
    first = observed.replicas[0]
    gone = attrs.evolve(first, report=attrs.evolve(first.report, in_rotation=False))
    worlds = itertools.cycle((observed, attrs.evolve(observed, replicas=(gone, *observed.replicas[1:]))))
    made: Made = {}
    machine, leader = SimMachine(1), Leader()
    feeds = RouterFeeds(machine, leader, known_replicas=lambda: None, ttl_s=lambda: 15.0, poke=lambda: None, wake=lambda model: None)
    publisher = Publisher(
        machine,
        lambda: build_list(desired.catalog, {}, next(worlds), {}, made=made),
        lambda generation: ListStamp(leader.token, generation),
        Inventory(lambda: 0.0, lambda: None),
        interval_s=lambda: 1.0,
        met=leader.met,
        knows=lambda: True,
    )
    publisher.add_sink(feeds)
    wires = [Wire(RouterHello(f"r{n}", f"i{n}", "0", digest_form=DIGEST_FORM if deltas else 0)) for n in range(SINKS)]
    taken: list[float] = []
    async with trio.open_nursery() as nursery:
        for wire in wires:
            nursery.start_soon(feeds.run, wire)
        for _ in range(ROUNDS + 1):
            before_s = time.process_time()
            publisher.publish_now()
            for wire in wires:
                await wire.taken.wait()
                wire.taken = trio.Event()
            taken.append((time.process_time() - before_s) * 1000)
        nursery.cancel_scope.cancel()
    assert all(len(wire.lists) == ROUNDS + 1 for wire in wires)
    return Measured(median(taken[1:]), wires[0].lists)


def rows() -> list[Row]:
    with capture_logs():  # of sessions that open and close
        by_delta, whole = (trio.run(publish, deltas) for deltas in MODES)
    first, change, more = (decode(data) for data in (by_delta.lists[0], by_delta.lists[1], whole.lists[1]))
    assert isinstance(first, PushEndpoints)
    assert isinstance(change, PushDelta)
    assert isinstance(more, PushEndpoints)
    assert list_delta.apply(first.endpoints, change.delta) == more.endpoints  # and no digest is still to be made
    held = first.endpoints

    def take_delta() -> None:
        message = decode(by_delta.lists[1])
        assert isinstance(message, PushDelta)
        list_delta.apply(held, message.delta)

    by_delta_ms, whole_ms = cpu_ms(take_delta, ROUNDS), cpu_ms(lambda: decode(whole.lists[1]), ROUNDS)
    return [
        Row(
            f"publish of {REPLICAS:,} endpoints with one change, to {SINKS} routers, from what is observed to the bytes for each of them",
            f"{by_delta.cpu_ms:.1f} ms CPU",
            "≤ 50 ms CPU, delta not list",
            by_delta.cpu_ms <= 50,
        ),
        Row("the same to routers that take whole lists only", f"{whole.cpu_ms:.0f} ms CPU"),
        Row("what each router is sent: the change / a whole list", f"{len(by_delta.lists[1]):,} / {len(whole.lists[1]):,} bytes"),
        Row(
            "what each router does until it has the list (the table made of it is not in it): by a change / by a whole list",
            f"{by_delta_ms:.1f} / {whole_ms:.0f} ms CPU",
        ),
    ]
