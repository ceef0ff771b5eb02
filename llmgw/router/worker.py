"""A worker's end of the pipe to its parent: what it is given goes to its router, what its router sees goes back.

It never takes a connection before the parent has said so, and ends with its parent: the end of the pipe ends it.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import attrs
import structlog
import trio

from llmgw.domain.endpoint import Endpoint, EndpointList, EndpointUse, ListStamp
from llmgw.domain.errors import Broken, Unavailable
from llmgw.domain.model import Catalog
from llmgw.domain.policy import Policy
from llmgw.domain.ports import Machine
from llmgw.protocol.codec import structure
from llmgw.router.cells import Cell, Cells
from llmgw.router.router import Router
from llmgw.router.slots import NO_SLOT
from llmgw.router.usage_book import UsageBook
from llmgw.router.worker_messages import (
    Acting,
    AllFigures,
    AskAllFigures,
    Begin,
    Family,
    Figures,
    FromWorker,
    Report,
    Serve,
    Stop,
    TakeCatalog,
    TakeEndpoints,
    TakePolicy,
    TellFigures,
    Wake,
    encode,
    to_worker,
)
from llmgw.router.worker_pipe import Pipe

log = structlog.get_logger("llmgw.router.worker")

REPORT_S: Final = 1.0
FIGURES_SHARE: Final = 300.0  # counts are told unasked at most so many times their own cost apart: a third of a percent of a worker's time
ALL_FIGURES_LIMIT_S: Final = 5.0  # until the parent has answered; it waits a second for the slowest worker


class WorkerEnd:
    """Feeds `router` with what comes by the pipe. `run` it, take connections once `may_serve` is set, and end at `stop`."""

    def __init__(self, machine: Machine, router: Router, pipe: Pipe, cells: Cells, number: int) -> None:
        self.may_serve = trio.Event()
        self.stop = trio.Event()
        self.stop_within_s = 0.0
        self._machine = machine
        self._router = router
        self._pipe = pipe
        self._cells = cells
        self._worker = number
        self._slots: dict[str, int] = {}  # of the list at hand, by endpoint
        self._outbox: deque[FromWorker] = deque()
        self._news = trio.Event()
        self._sent = trio.Event()
        self._asks: dict[int, _Ask] = {}
        self._ask = 0
        self._woken: set[str] = set()  # models asked for since the last report: clients ask by the thousand
        self._told_requests = 0
        self._book = router.book = UsageBook("")  # it cuts no batch: its rows are the parent's once they are told
        self._figures_due_s = 0.0
        router.cell_of = self._cell_of
        router.all_figures = self._all_figures
        router.wake = self._wake

    async def run(self) -> None:
        """Until cancelled. Raises Unavailable when the parent is gone."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._send)
            nursery.start_soon(self._report)
            await self._receive()

    async def wait_begun(self) -> bool:
        """Waits for the parent's word: True to serve, False where it stops everything before."""
        async with trio.open_nursery() as nursery:

            async def wait(event: trio.Event) -> None:
                await event.wait()
                nursery.cancel_scope.cancel()

            nursery.start_soon(wait, self.may_serve)
            nursery.start_soon(wait, self.stop)
        return not self.stop.is_set()

    async def last_words(self) -> None:
        """What was seen up to now, and what was counted; returns when it is sent."""
        self._say(Report(self._use(), self._router.figures(), self._book.take_rows()))
        while self._outbox:
            await self._sent.wait()

    # --- what comes

    async def _receive(self) -> None:
        while True:
            match to_worker(await self._pipe.receive()):
                case TakePolicy(number, policy, slots):
                    self._take_policy(structure(policy, Policy), slots)
                    self._say(Acting(number))
                case TakeCatalog(number, catalog):
                    self._router.set_catalog(structure(catalog, Catalog))
                    self._say(Acting(number))
                case TakeEndpoints(number, endpoints, stamp, slots):
                    self._take_endpoints(endpoints, stamp, slots)
                    self._say(Acting(number))
                case Serve():
                    self.may_serve.set()
                case Stop(within_s):
                    self.stop_within_s = within_s
                    self.stop.set()
                case TellFigures(ask):
                    self._say(Figures(ask, self._figures()))
                case AllFigures(ask, text):
                    if (waits := self._asks.get(ask)) is not None:
                        waits.text = text
                        waits.answered.set()
                case Begin():
                    raise Broken("a worker begins once")

    def _take_policy(self, policy: Policy, slots: dict[str, int]) -> None:
        self._router.set_policy(policy)
        self._router.parallel.share({name: self._cells.cell(slot, self._worker) for name, slot in slots.items()})

    def _take_endpoints(self, endpoints: object, stamp: object, slots: list[int]) -> None:
        if endpoints is None:
            self._router.waiting = True
            return
        listed = structure(endpoints, EndpointList)
        assert isinstance(listed, EndpointList)
        self._slots = {endpoint.id: slot for endpoint, slot in zip(listed.endpoints, slots, strict=True)}
        if stamp is None:
            self._router.seed(listed)
        else:
            self._router.set_endpoints(listed, structure(stamp, ListStamp))

    def _cell_of(self, endpoint: Endpoint) -> Cell | None:
        slot = self._slots[endpoint.id]
        return None if slot == NO_SLOT else self._cells.cell(slot, self._worker)

    # --- what goes

    def _say(self, message: FromWorker) -> None:
        self._outbox.append(message)
        self._news.set()

    async def _send(self) -> None:
        while True:
            await self._news.wait()
            self._news = trio.Event()
            while self._outbox:
                await self._pipe.send(encode(self._outbox[0]))
                self._outbox.popleft()
            self._sent.set()
            self._sent = trio.Event()

    async def _report(self) -> None:
        while True:
            await self._machine.sleep_until(self._machine.now_s() + REPORT_S)
            self._woken.clear()
            if not self._outbox:  # a parent that takes nothing is told all at once when it does
                self._say(Report(self._use(), self._figures_when_due(), self._book.take_rows()))

    def _use(self) -> dict[str, EndpointUse]:
        return dict(self._router.use().items())

    def _figures_when_due(self) -> list[Family] | None:
        """A worker that is killed takes along what it has not told, so it tells its counts unasked too: as often as they are cheap."""
        requests = sum(self._router.metrics.requests.values())
        if self._machine.now_s() < self._figures_due_s or requests == self._told_requests:
            return None
        return self._figures()

    def _figures(self) -> list[Family]:
        began_s = self._machine.now_s()
        families = self._router.figures()
        self._told_requests = sum(self._router.metrics.requests.values())
        self._figures_due_s = self._machine.now_s() + (self._machine.now_s() - began_s) * FIGURES_SHARE
        return families

    def _wake(self, model: str) -> None:
        if model not in self._woken:
            self._woken.add(model)
            self._say(Wake(model))

    async def _all_figures(self) -> bytes:
        """Over all workers, from the parent. Raises Unavailable."""
        self._ask += 1
        ask = self._ask
        waits = self._asks[ask] = _Ask()
        try:
            self._say(AskAllFigures(ask))
            with trio.move_on_after(ALL_FIGURES_LIMIT_S):
                await waits.answered.wait()
            if not waits.answered.is_set():
                raise Unavailable("the workers' counts could not be added up in time", retry_after_s=1.0)
            return waits.text
        finally:
            del self._asks[ask]


@attrs.define(eq=False)
class _Ask:
    answered: trio.Event = attrs.Factory(trio.Event)
    text: bytes = b""
