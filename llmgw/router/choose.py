"""Which endpoint gets a request. Values in, one choice or the reason for none out; the reason is what the log prints.

Candidates are those not tried yet, not broken, not resting and not saturated. The lowest priority with room wins; inside it
two are drawn by weight and the less loaded of them is taken. Load is what we have given an endpoint, which is always known and
always new, and on top what its engine says of others' requests, while that is known. Saturation is by our own count alone: what
an engine says, or does not say, never takes it out.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Callable, Container, Sequence
from typing import Final, Protocol

import attrs

from llmgw.domain.ids import EndpointId
from llmgw.router.breaker import Breaker
from llmgw.router.engine_load import EngineLoad
from llmgw.router.table import Candidate

# Up to here every candidate is looked at; above, some are drawn (router-measurements.md (e): a full scan costs 18 us at 1000).
SCAN_MAX: Final = 50
DRAWS_MAX: Final = 8  # chosen: that many unusable ones in a row, and the rest is looked at one by one


class EndpointView(Protocol):
    """What choosing may know of an endpoint."""

    @property
    def in_flight(self) -> int: ...
    @property
    def promised(self) -> int:
        """Places that are kept for somebody who waited and is about to take them."""
        ...

    @property
    def engine_load(self) -> EngineLoad | None:
        """What its engine last told of its load; None where that is not known."""
        ...

    @property
    def breaker(self) -> Breaker: ...
    @property
    def resting_until_s(self) -> float: ...


class Why(enum.Enum):
    """Why an endpoint cannot be taken now."""

    BROKEN = "broken"
    RESTING = "resting"
    SATURATED = "saturated"
    TRIED = "tried"


class Choice:
    """A plain class, because each request makes one: an attrs class is never compiled, and costs 0.5 us."""

    __slots__ = ("candidate", "reason")

    def __init__(self, candidate: Candidate, reason: str) -> None:
        self.candidate = candidate
        self.reason = reason


REST_WAIT_S: Final = 5.0  # chosen: a rest is a second where the engine names none; for longer ones the client is told the truth at once


@attrs.frozen
class Shortage:
    """Nobody can be taken. `retry_after_s`: when the first of them may be back. `why`: what stands in the way of most."""

    why: Why
    retry_after_s: float
    reason: str

    @property
    def passes(self) -> bool:
        """Does it end by itself soon enough to be waited for? Who is at its limit answers somebody soon; a rest may be a long one."""
        return self.why is Why.SATURATED or (self.why is Why.RESTING and self.retry_after_s <= REST_WAIT_S)


SATURATED_RETRY_S: Final = 1.0  # chosen: a place is free when any answer ends
OTHERS_WAIT: Final = Shortage(Why.SATURATED, SATURATED_RETRY_S, Why.SATURATED.value)  # what is free is theirs


def choose(
    tiers: Sequence[Sequence[Candidate]],
    view: Callable[[EndpointId], EndpointView],
    now_s: float,
    rng: random.Random,
    *,
    policy: str,
    max_inflight: int,
    tried: Container[EndpointId] = (),
) -> Choice | Shortage:
    """`view` gives an endpoint's state; `max_inflight` is the limit for endpoints that set none (0: no limit)."""
    only = len(tiers) == 1 and len(tiers[0]) == 1
    for index, tier in enumerate(tiers):
        picked = _pick(tier, view, now_s, rng, policy, max_inflight, tried, only)
        if picked is not None:
            candidate, reason = picked
            return Choice(candidate, reason if index == 0 else f"{reason}_tier{index}")
    # Time-outs alone take nobody out for good: where all that is left is slow, the slow serve.
    for tier in tiers:
        slow = [c for c in tier if _why(c, view, now_s, max_inflight, tried, slow_too=True) is None]
        if slow:
            return Choice(slow[0] if len(slow) == 1 else rng.choice(slow), "slow_only")
    return _shortage(tiers, view, now_s, max_inflight, tried)


def _why(
    candidate: Candidate,
    view: Callable[[EndpointId], EndpointView],
    now_s: float,
    max_inflight: int,
    tried: Container[EndpointId],
    *,
    slow_too: bool = False,
    resting_too: bool = False,
) -> Why | None:
    """Why not this one? Slowness, or a rest it asked for, may be overlooked where there is nobody else."""
    endpoint = candidate.endpoint
    if endpoint.id in tried:
        return Why.TRIED
    state = view(endpoint.id)
    if not state.breaker.admits(now_s) and not (slow_too and state.breaker.slow):
        return Why.BROKEN
    if state.promised and state.breaker.open_until_s is not None:
        return Why.BROKEN  # its one trial is promised already
    if state.resting_until_s > now_s and not resting_too:
        return Why.RESTING
    limit = endpoint.max_inflight or max_inflight
    if limit and state.in_flight + state.promised >= limit:
        return Why.SATURATED
    return None


def _pick(
    tier: Sequence[Candidate],
    view: Callable[[EndpointId], EndpointView],
    now_s: float,
    rng: random.Random,
    policy: str,
    max_inflight: int,
    tried: Container[EndpointId],
    only: bool,
) -> tuple[Candidate, str] | None:
    if only:
        why = _why(tier[0], view, now_s, max_inflight, tried, slow_too=True, resting_too=True)
        return (tier[0], "only") if why is None else None
    usable: list[Candidate] = []
    if len(tier) > SCAN_MAX:
        for _ in range(DRAWS_MAX):
            drawn = tier[int(rng.random() * len(tier))]
            if drawn not in usable and _why(drawn, view, now_s, max_inflight, tried) is None:
                usable.append(drawn)
                if len(usable) == 2:
                    break
    if len(usable) < 2:
        usable = [c for c in tier if _why(c, view, now_s, max_inflight, tried) is None]
    if not usable:
        return None
    weighted = [c for c in usable if c.endpoint.weight > 0]
    if weighted:  # a weight of 0 means: only when there is nobody else
        usable = weighted
    if len(usable) == 1:
        return usable[0], "one_left"
    first = _draw(usable, rng)
    if policy == "weighted_random":
        return first, "weighted_random"
    rest = [c for c in usable if c is not first]
    second = rest[0] if len(rest) == 1 else _draw(rest, rng)
    return (first if _load(first, view, now_s) <= _load(second, view, now_s) else second), "least_load"


def _draw(candidates: list[Candidate], rng: random.Random) -> Candidate:
    total = sum(c.endpoint.weight for c in candidates)
    if total <= 0:
        return candidates[int(rng.random() * len(candidates))]
    mark = rng.random() * total
    for candidate in candidates:
        mark -= candidate.endpoint.weight
        if mark < 0:
            return candidate
    return candidates[-1]


def _load(candidate: Candidate, view: Callable[[EndpointId], EndpointView], now_s: float) -> float:
    state = view(candidate.endpoint.id)
    load = state.in_flight
    told = state.engine_load
    if told is not None and now_s < told.until_s:
        load += told.others
    return load / (candidate.endpoint.weight or 1.0)


def _shortage(
    tiers: Sequence[Sequence[Candidate]],
    view: Callable[[EndpointId], EndpointView],
    now_s: float,
    max_inflight: int,
    tried: Container[EndpointId],
) -> Shortage:
    waits: dict[Why, float] = {}
    for tier in tiers:
        for candidate in tier:
            why = _why(candidate, view, now_s, max_inflight, tried)
            state = view(candidate.endpoint.id)
            wait_s = SATURATED_RETRY_S
            if why is Why.BROKEN:
                wait_s = max((state.breaker.open_until_s or now_s) - now_s, SATURATED_RETRY_S)
            elif why is Why.RESTING:
                wait_s = state.resting_until_s - now_s
            if why is not None:
                waits[why] = min(waits.get(why, wait_s), wait_s)
    for why in (Why.SATURATED, Why.RESTING, Why.BROKEN):  # the one that ends first by itself is what the client is told
        if why in waits:
            return Shortage(why, min(waits.values()), why.value)
    return Shortage(Why.TRIED, SATURATED_RETRY_S, Why.TRIED.value)
