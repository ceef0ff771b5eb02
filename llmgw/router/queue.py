"""Who waits for a place at a model's endpoints, and who is next: one queue per (model, key), deficit round robin over the keys.

Pure: it wakes nobody and reads no clock. Owns: ticket, cost, turn order, service time. A key that sends many requests waits
behind itself: inside a key the first to come is the first to go, between keys each gets as much work done as the others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container
from typing import Final

QUANTUM: Final = 1  # cost that a key may spend per round: the smallest cost there is, so that small requests alternate one by one
COST_MAX: Final = 8  # chosen: beyond a quarter of a megabyte a body is mostly pictures, which cost an engine no more per byte
# Chosen: 32 KB of text are about 8,000 tokens, and reading them takes an engine about as long as writing a short answer.
COST_BYTES: Final = 32_768
# Weight of the newest in the mean: ten answers or so count, which is soon enough after a change and steady between.
NEWEST: Final = 0.1
RETRY_DEFAULT_S: Final = 1.0  # before any answer was measured
RETRY_MAX_S: Final = 600.0  # chosen: nobody should be sent away for longer by an estimate


def cost_of(body_bytes: int) -> int:
    """What a request takes out of its key's share, 1 to COST_MAX: the prompt's length is all that is known before it is served."""
    return min(1 + body_bytes // COST_BYTES, COST_MAX)


def retry_after_s(waiting: int, places: int, mean_s: float | None) -> float:
    """Seconds after which a client that is refused now may find a place: those who wait are served first, `places` at a time."""
    if mean_s is None:
        return RETRY_DEFAULT_S
    return min(max((waiting + 1) * mean_s / max(places, 1), RETRY_DEFAULT_S), RETRY_MAX_S)


class Ticket:
    """One request that waits. `wake` is called once it may go on, for whatever reason."""

    __slots__ = ("cost", "key", "model", "since_s", "wake")

    def __init__(self, model: str, key: str, cost: int, since_s: float, wake: Callable[[], None]) -> None:
        self.model = model
        self.key = key
        self.cost = cost
        self.since_s = since_s
        self.wake = wake


class _Share:
    """A key's waiting requests for one model, the first to come in front, and the cost it may spend."""

    __slots__ = ("credit", "tickets")

    def __init__(self) -> None:
        self.tickets: OrderedDict[Ticket, None] = OrderedDict()
        self.credit = 0


class _Line:
    """A model's keys in the order of their turns. `paid`: the first has got its quantum in this turn."""

    __slots__ = ("paid", "shares", "size")

    def __init__(self) -> None:
        self.shares: OrderedDict[str, _Share] = OrderedDict()
        self.size = 0
        self.paid = False


class FairQueue:
    """All that wait, by model and key. `size` is how many. Every step costs the same however many wait, but `add` when full."""

    def __init__(self) -> None:
        self._lines: OrderedDict[str, _Line] = OrderedDict()
        self.size = 0

    def waiting(self, model: str) -> int:
        line = self._lines.get(model)
        return 0 if line is None else line.size

    def __contains__(self, model: str) -> bool:
        return model in self._lines

    def models(self, among: Container[str] | None = None) -> list[str]:
        """Models somebody waits for, the one that was served longest ago first; `among`: only of these."""
        return [model for model in self._lines if among is None or model in among]

    def tickets(self, model: str) -> list[Ticket]:
        line = self._lines.get(model)
        return [] if line is None else [ticket for share in line.shares.values() for ticket in share.tickets]

    def add(self, ticket: Ticket, limit: int) -> Ticket | None:
        """Puts a request at the end of its key's queue, with at most `limit` waiting for its model.

        None when there was room. Else the one that has to go: of the key that has most waiting the one that came last, as long
        as that leaves it no fewer than the newcomer's key; otherwise the newcomer, which is then not put in. So one key's flood
        never shuts another key out.
        """
        line = self._lines.get(ticket.model)
        out: Ticket | None = None
        if line is None:
            if limit <= 0:
                return ticket
            line = self._lines[ticket.model] = _Line()
        elif line.size >= limit:
            own = line.shares.get(ticket.key)
            most = max(line.shares.values(), key=lambda share: len(share.tickets))
            if len(most.tickets) < (len(own.tickets) if own is not None else 0) + 2:
                return ticket
            out = next(reversed(most.tickets))
            self.remove(out)
        share = line.shares.get(ticket.key)
        if share is None:
            share = line.shares[ticket.key] = _Share()
        share.tickets[ticket] = None
        line.size += 1
        self.size += 1
        return out

    def next(self, model: str) -> Ticket:
        """Whose turn it is: the same one until it is removed. Somebody must wait for the model."""
        line = self._lines[model]
        while True:
            key, share = next(iter(line.shares.items()))
            head = next(iter(share.tickets))
            if share.credit >= head.cost:
                return head
            if line.paid:
                line.shares.move_to_end(key)
            else:
                share.credit += QUANTUM
            line.paid = not line.paid

    def remove(self, ticket: Ticket, *, served: bool = False) -> bool:
        """Takes a request out. `served`: it got its place, and its key pays for it. False when it was not in the queue."""
        line = self._lines.get(ticket.model)
        share = None if line is None else line.shares.get(ticket.key)
        if line is None or share is None or ticket not in share.tickets:
            return False
        del share.tickets[ticket]
        line.size -= 1
        self.size -= 1
        if served:
            share.credit -= ticket.cost
            self._lines.move_to_end(ticket.model)
        if not share.tickets:  # a key that waits for nothing saves nothing up
            if next(iter(line.shares)) == ticket.key:
                line.paid = False
            del line.shares[ticket.key]
        if not line.size:
            del self._lines[ticket.model]
        return True


class ServiceTimes:
    """How long a place is taken by a request, per model: an exponentially weighted mean of those that were answered."""

    def __init__(self) -> None:
        self._means: dict[str, float] = {}

    def add(self, model: str, seconds: float) -> None:
        before = self._means.get(model)
        self._means[model] = seconds if before is None else before + NEWEST * (seconds - before)

    def mean_s(self, model: str) -> float | None:
        """None before the first answer."""
        return self._means.get(model)

    def keep(self, models: Container[str]) -> None:
        """Forgets every other model."""
        self._means = {model: mean for model, mean in self._means.items() if model in models}
