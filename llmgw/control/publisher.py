"""Tells every sink who may receive traffic: at each change, and at least every interval, on every control plane.

The leader's list is an order. A standby's is an observation of the same replicas, stamped with the token that agents obey.

A list equal to what a sink has taken is not sent to it again under the same stamp, because replacing a list resynchronizes
its metric pollers; a new epoch always is.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import structlog
import trio

from llmgw.control.inventory import Inventory
from llmgw.domain.endpoint import EndpointList, ListStamp
from llmgw.domain.errors import LlmgwError, StaleEpoch
from llmgw.domain.ids import EndpointId
from llmgw.domain.lease import FencingToken
from llmgw.domain.ports import EndpointSink, Machine
from llmgw.protocol.waiting import wait_woken

log = structlog.get_logger("llmgw.publisher")


@attrs.define
class _SinkState:
    sink: EndpointSink
    waits: bool  # it serves from an earlier list, and must not get one of a leader that does not know yet what runs
    taken: tuple[str, FencingToken, bool] | None = None  # fingerprint, token and kind of the last list that it took


class Publisher:
    """`build` makes the list from what is known now; `stamp(generation)` is None while there is none to publish under.

    `met` is told the epoch and owner that a sink has met, where those are above ours. `knows()`: have all known nodes answered this leader?
    """

    def __init__(
        self,
        machine: Machine,
        build: Callable[[], EndpointList],
        stamp: Callable[[int], ListStamp | None],
        inventory: Inventory,
        interval_s: Callable[[], float],
        met: Callable[[int, str], None],
        knows: Callable[[], bool],
    ) -> None:
        self._machine = machine
        self._build = build
        self._stamp = stamp
        self._inventory = inventory
        self._interval_s = interval_s
        self._met = met
        self._knows = knows
        self._sinks: list[_SinkState] = []
        self._wake = trio.Event()
        self.generation = 0
        self.current = EndpointList()

    def add_sink(self, sink: EndpointSink, *, serves_already: bool = False) -> None:
        """`serves_already`: it goes on with what it was told by a leader before until this one knows what runs."""
        self._sinks.append(_SinkState(sink, waits=serves_already))
        self.poke()

    def remove_sink(self, sink: EndpointSink) -> None:
        self._sinks = [state for state in self._sinks if state.sink is not sink]

    def poke(self) -> None:
        """Something changed: look at once."""
        self._wake.set()

    def publish_now(self) -> None:
        """Builds the list and hands it to each sink that has not taken it. Does not wait."""
        if self._stamp(self.generation) is None:
            return
        endpoints = self._build()
        if endpoints.fingerprint != self.current.fingerprint or self.generation == 0:
            self.generation += 1
            self.current = endpoints
        stamp = self._stamp(self.generation)
        assert stamp is not None
        mark = (endpoints.fingerprint, stamp.token, stamp.from_standby)
        for state in self._sinks:
            if state.taken == mark or (state.waits and not stamp.from_standby and not self._knows()):
                continue
            # Whoever serves by what a standby has seen waits again when this control plane begins to lead.
            state.waits = stamp.from_standby
            try:
                state.sink.set_endpoints(endpoints, stamp)
            except StaleEpoch as err:
                log.warning("a router has met a higher epoch", epoch=err.epoch, owner=err.owner)
                self._met(err.epoch, err.owner)
            except LlmgwError as err:
                log.warning("a router did not take the endpoint list", error=str(err))
            else:
                state.taken = mark
        self._inventory.published(self.generation, frozenset(EndpointId(endpoint.id) for endpoint in endpoints.endpoints))

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Publishes until cancelled. Says started() after the first list went out."""
        self.publish_now()
        task_status.started()
        while True:
            await wait_woken(self._machine, self._wake, self._machine.now_s() + self._interval_s())
            self._wake = trio.Event()
            self.publish_now()
