"""Gives free places to those who wait. Looks when something may have changed, calls whoever is next, and never waits itself.

At most one request per model is on its way to a place at a time, and that place is promised to it: counted as taken, so that
no newcomer of another model slips in before its task runs. It calls the next by taking the place (`proxy` looks again then).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Container
from typing import Protocol

from llmgw.domain.ids import EndpointId
from llmgw.router.choose import Choice, Shortage
from llmgw.router.queue import FairQueue, ServiceTimes, Ticket


class Promising(Protocol):
    """What is changed of an endpoint: places that are promised and not taken yet."""

    promised: int


class Called(enum.Enum):
    """Why a request that waited is woken."""

    TURN = "turn"  # there is a place, promised to it
    LOOK = "look"  # there is nothing left to wait for: it finds out why by looking again
    CROWDED_OUT = "crowded_out"  # the queue is full, and its key has most waiting
    STOPPING = "stopping"  # the router drains


class Turns:
    """The queue and who was called from it.

    `look` says what a model's endpoints offer now: a choice, the reason for none, or None when the model has no endpoint.
    """

    def __init__(self, look: Callable[[str], Choice | Shortage | None], state: Callable[[EndpointId], Promising]) -> None:
        self.queue = FairQueue()
        self.times = ServiceTimes()
        self._look = look
        self._state = state
        self._called: dict[Ticket, Called] = {}
        self._turns: dict[str, tuple[Ticket, Promising]] = {}  # by model

    def join(self, ticket: Ticket, limit: int) -> bool:
        """False when the queue is full. Every ticket that is in must be given to `leave`, in a `finally`."""
        out = self.queue.add(ticket, limit)
        if out is ticket:
            return False
        if out is not None:
            self._call(out, Called.CROWDED_OUT)
        return True

    def called(self, ticket: Ticket) -> Called | None:
        return self._called.get(ticket)

    def redeem(self, ticket: Ticket) -> None:
        """The promise is given back: in the same breath its holder chooses, and then says `took`, or waits on."""
        del self._called[ticket]
        _, state = self._turns.pop(ticket.model)
        state.promised -= 1

    def took(self, ticket: Ticket) -> None:
        """It has found its place."""
        self.queue.remove(ticket, served=True)

    def leave(self, ticket: Ticket) -> None:
        """It waits no longer, however that came. Whatever was promised to it goes to the next."""
        waited = self.queue.remove(ticket)
        if self._called.get(ticket) is Called.TURN:
            self.redeem(ticket)
        self._called.pop(ticket, None)
        if waited:
            self.give()

    def give(self, models: Container[str] | None = None) -> None:
        """Something changed: a place is free, an endpoint came or went, time passed. `models`: only these are concerned."""
        for model in self.queue.models(models):
            if model in self._turns:
                continue  # its next is on the way, and looks again once it is there
            found = self._look(model)
            if isinstance(found, Choice):
                state = self._state(found.candidate.endpoint.id)
                state.promised += 1
                ticket = self.queue.next(model)
                self._turns[model] = (ticket, state)
                self._call(ticket, Called.TURN)
            elif found is None or not found.passes:
                self.dismiss(model)

    def stop(self) -> None:
        """The router drains: nobody waits any more."""
        for model in self.queue.models():
            self._dismiss(model, Called.STOPPING)

    def dismiss(self, model: str) -> None:
        """There is nothing left to wait for: all that wait for the model look for themselves."""
        self._dismiss(model, Called.LOOK)

    def _dismiss(self, model: str, why: Called) -> None:
        for ticket in self.queue.tickets(model):
            if ticket not in self._called:
                self.queue.remove(ticket)
                self._call(ticket, why)

    def _call(self, ticket: Ticket, why: Called) -> None:
        self._called[ticket] = why
        ticket.wake()
