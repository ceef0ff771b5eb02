"""Who is next: the queue, the turns and the estimates as values."""

from __future__ import annotations

from collections import Counter

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.domain.endpoint import Endpoint
from llmgw.domain.ids import EndpointId
from llmgw.router.choose import Choice, Shortage, Why
from llmgw.router.queue import COST_BYTES, COST_MAX, QUANTUM, RETRY_MAX_S, FairQueue, ServiceTimes, Ticket, cost_of, retry_after_s
from llmgw.router.table import Candidate
from llmgw.router.turns import Called, Turns


def _ticket(key: str, cost: int = 1, model: str = "m") -> Ticket:
    return Ticket(model, key, cost, 0.0, lambda: None)


def _drain(queue: FairQueue, model: str = "m") -> list[Ticket]:
    found = []
    while queue.waiting(model):
        ticket = queue.next(model)
        assert queue.remove(ticket, served=True)
        found.append(ticket)
    return found


def test_keys_take_turns_and_each_keeps_its_own_order() -> None:
    queue = FairQueue()
    flood = [_ticket("a") for _ in range(4)]
    late = [_ticket("b") for _ in range(2)]
    for ticket in flood + late:
        assert queue.add(ticket, 10) is None
    assert _drain(queue) == [flood[0], late[0], flood[1], late[1], flood[2], flood[3]]
    assert queue.size == 0
    assert "m" not in queue


def test_long_prompts_take_as_many_turns_as_they_cost() -> None:
    queue = FairQueue()
    long = [_ticket("long", 4) for _ in range(2)]
    short = [_ticket("short") for _ in range(10)]
    for ticket in [*long, *short]:
        queue.add(ticket, 100)
    order = _drain(queue)
    assert [order.index(ticket) for ticket in long] == [3, 8]  # each after four rounds of the short ones


def test_costs_are_bounded_at_both_ends() -> None:
    assert (cost_of(0), cost_of(COST_BYTES - 1), cost_of(COST_BYTES), cost_of(10**9)) == (1, 1, 2, COST_MAX)


class Step:
    """What a run of the queue is made of: somebody comes, somebody leaves, or a place becomes free."""

    ADD, LEAVE, SERVE = range(3)


STEPS = st.lists(
    st.tuples(st.sampled_from([Step.ADD, Step.ADD, Step.ADD, Step.LEAVE, Step.SERVE]), st.integers(0, 3), st.integers(1, COST_MAX)),
    max_size=120,
)


@given(STEPS, st.integers(0, 12))
def test_the_bound_is_never_exceeded_and_whoever_leaves_leaves_nothing(steps: list[tuple[int, int, int]], limit: int) -> None:
    queue = FairQueue()
    inside: list[Ticket] = []
    for kind, number, cost in steps:
        if kind == Step.ADD:
            ticket = _ticket(f"k{number}", cost)
            out = queue.add(ticket, limit)
            if out is not ticket:
                inside.append(ticket)
            if out is not None and out is not ticket:
                counts = Counter(t.key for t in inside)
                assert counts[out.key] - 1 >= counts[ticket.key]  # it gave way to a key that has no more than it, even now
                assert [t for t in inside if t.key == out.key][-1] is out  # the newest of its key
                inside.remove(out)
        elif kind == Step.LEAVE and inside:
            ticket = inside.pop(number % len(inside))
            assert queue.remove(ticket)
            assert not queue.remove(ticket)
        elif kind == Step.SERVE and inside:
            ticket = queue.next("m")
            assert queue.next("m") is ticket  # asking changes nothing
            assert ticket is next(t for t in inside if t.key == ticket.key)  # first come, first served, inside a key
            queue.remove(ticket, served=True)
            inside.remove(ticket)
        assert queue.size == queue.waiting("m") == len(inside) <= limit
        assert set(queue.tickets("m")) == set(inside)
        assert ("m" in queue) == bool(inside)


@given(st.lists(st.lists(st.integers(1, COST_MAX), min_size=1, max_size=20), min_size=2, max_size=5))
def test_keys_that_wait_all_the_time_get_equally_much(costs: list[list[int]]) -> None:
    queue = FairQueue()
    for row in zip(*[[_ticket(f"k{number}", cost) for cost in own] for number, own in enumerate(costs)], strict=False):
        for ticket in row:
            queue.add(ticket, 10_000)
    served: Counter[str] = Counter()
    everybody = {f"k{number}" for number in range(len(costs))}
    while {ticket.key for ticket in queue.tickets("m")} == everybody:
        ticket = queue.next("m")
        queue.remove(ticket, served=True)
        served[ticket.key] += ticket.cost
        assert max(served.values()) - min(served[key] for key in everybody) <= QUANTUM + COST_MAX


@given(st.integers(1, 10), st.integers(1, COST_MAX), st.integers(1, 4))
def test_nobody_starves_however_others_flood(before: int, cost: int, floods: int) -> None:
    queue = FairQueue()
    for _ in range(before):
        queue.add(_ticket("patient", cost), 10_000)
    last = _ticket("patient", cost)
    queue.add(last, 10_000)
    spent = 0
    while last in queue.tickets("m"):
        for number in range(floods):
            queue.add(_ticket(f"flood{number}"), 10_000)  # as many as are served, and more
        ticket = queue.next("m")
        queue.remove(ticket, served=True)
        spent += ticket.cost
    own = (before + 1) * cost
    assert spent <= own + floods * (own + QUANTUM + COST_MAX)


def test_a_flood_of_one_key_shuts_no_other_out() -> None:
    queue = FairQueue()
    flood = [_ticket("flood") for _ in range(3)]
    for ticket in flood:
        assert queue.add(ticket, 3) is None
    more = _ticket("flood")
    assert queue.add(more, 3) is more
    other = _ticket("other")
    assert queue.add(other, 3) is flood[2]
    second = _ticket("other")
    assert queue.add(second, 3) is second  # two and one, or one and two: nobody gains
    assert _drain(queue) == [flood[0], other, flood[1]]


def test_models_take_turns_too() -> None:
    queue = FairQueue()
    for model in ("m1", "m1", "m2"):
        queue.add(_ticket("k", model=model), 10)
    assert queue.models() == ["m1", "m2"]
    queue.remove(queue.next("m1"), served=True)
    assert queue.models() == ["m2", "m1"]
    assert queue.models(("m1", "m3")) == ["m1"]


def test_a_wait_is_estimated_from_what_answers_take() -> None:
    times = ServiceTimes()
    assert times.mean_s("m") is None
    assert retry_after_s(5, 2, times.mean_s("m")) == 1.0
    times.add("m", 4.0)
    assert times.mean_s("m") == 4.0
    assert retry_after_s(5, 2, times.mean_s("m")) == 12.0  # five before it, two at a time
    for _ in range(200):
        times.add("m", 1.0)
    assert times.mean_s("m") == pytest.approx(1.0, abs=0.01)
    assert retry_after_s(10**6, 1, 100.0) == RETRY_MAX_S
    assert retry_after_s(0, 0, 0.001) == 1.0
    times.keep({"other"})
    assert times.mean_s("m") is None


@given(st.integers(0, 10**6), st.integers(0, 10**4), st.none() | st.floats(0, 1e6))
def test_an_estimate_is_always_one_that_a_client_can_use(waiting: int, places: int, mean_s: float | None) -> None:
    assert 1.0 <= retry_after_s(waiting, places, mean_s) <= RETRY_MAX_S


@attrs.define
class Place:
    """An endpoint with so many places."""

    places: int
    taken: int = 0
    promised: int = 0


CANDIDATE = Candidate(Endpoint(EndpointId("e"), "http://e:1", ("m1", "m2")), "m")
FULL = Shortage(Why.SATURATED, 1.0, "saturated")
RESTS = Shortage(Why.RESTING, 1.0, "resting")
LONG_REST = Shortage(Why.RESTING, 600.0, "resting")
BROKEN = Shortage(Why.BROKEN, 1.0, "broken")


class Stand:
    """Turns around one endpoint that serves two models, and what they were told."""

    def __init__(self, places: int) -> None:
        self.place = Place(places)
        self.found: dict[str, Shortage | None] = {}  # by model, in place of what the endpoint offers
        self.woken: list[Ticket] = []
        self.turns = Turns(self.look, lambda _: self.place)

    def look(self, model: str) -> Choice | Shortage | None:
        if model in self.found:
            return self.found[model]
        return Choice(CANDIDATE, "only") if self.place.taken + self.place.promised < self.place.places else FULL

    def join(self, key: str, model: str = "m1", limit: int = 10) -> Ticket:
        ticket = Ticket(model, key, 1, 0.0, lambda: self.woken.append(ticket))
        assert self.turns.join(ticket, limit)
        return ticket

    def take(self, ticket: Ticket) -> None:
        """What a request does when it has its turn."""
        assert self.turns.called(ticket) is Called.TURN
        self.turns.redeem(ticket)
        assert isinstance(self.look(ticket.model), Choice)
        self.turns.took(ticket)
        self.place.taken += 1
        self.turns.leave(ticket)
        self.turns.give()


def test_a_free_place_wakes_exactly_the_next() -> None:
    stand = Stand(places=0)
    first, second = stand.join("a"), stand.join("a")
    stand.turns.give()
    assert stand.woken == []
    stand.place.places = 1
    stand.turns.give()
    stand.turns.give()
    assert stand.woken == [first]
    stand.take(first)
    assert stand.woken == [first]
    stand.place.taken = 0
    stand.turns.give()
    assert stand.woken == [first, second]


def test_a_promised_place_is_nobody_elses() -> None:
    stand = Stand(places=0)
    first, other = stand.join("a", "m1"), stand.join("a", "m2")
    stand.place.places = 1
    stand.turns.give()
    assert stand.woken == [first]
    assert stand.look("m2") is FULL
    stand.take(first)
    stand.place.taken = 0
    stand.turns.give(("m2",))
    assert stand.woken == [first, other]


def test_two_free_places_serve_two() -> None:
    stand = Stand(places=0)
    both = [stand.join("a"), stand.join("a")]
    stand.place.places = 2
    stand.turns.give()
    stand.take(both[0])
    assert stand.woken == both


def test_whoever_leaves_with_a_promise_passes_it_on() -> None:
    stand = Stand(places=0)
    first, second = stand.join("a"), stand.join("b")
    stand.place.places = 1
    stand.turns.give()
    stand.turns.leave(first)
    assert stand.woken == [first, second]
    assert stand.place.promised == 1
    stand.turns.leave(second)
    stand.turns.leave(second)
    assert stand.place.promised == 0
    assert stand.turns.queue.size == 0
    assert stand.turns.called(first) is stand.turns.called(second) is None


def test_a_place_that_is_gone_again_costs_nobody_their_turn() -> None:
    stand = Stand(places=0)
    first, second = stand.join("a"), stand.join("a")
    stand.place.places = 1
    stand.turns.give()
    stand.turns.redeem(first)
    stand.place.places = 0  # it waits on, still in front
    stand.place.places = 1
    stand.turns.give()
    assert stand.woken == [first, first]
    assert stand.turns.called(second) is None


@pytest.mark.parametrize("nothing", [BROKEN, LONG_REST, None])
def test_all_look_for_themselves_when_there_is_nothing_to_wait_for(nothing: Shortage | None) -> None:
    stand = Stand(places=0)
    waiting = [stand.join("a"), stand.join("b")]
    stand.found["m1"] = RESTS
    stand.turns.give()
    assert stand.woken == []  # a short rest ends soon
    stand.found["m1"] = nothing
    stand.turns.give()
    assert stand.woken == waiting
    assert [stand.turns.called(ticket) for ticket in waiting] == [Called.LOOK, Called.LOOK]
    assert stand.turns.queue.size == 0  # nobody new stands behind them


def test_whoever_is_crowded_out_is_told_and_a_stop_tells_the_rest() -> None:
    stand = Stand(places=0)
    flood = [stand.join("a", limit=2), stand.join("a", limit=2)]
    other = stand.join("b", limit=2)
    assert stand.turns.called(flood[1]) is Called.CROWDED_OUT
    stand.turns.stop()
    assert [stand.turns.called(ticket) for ticket in (flood[0], other)] == [Called.STOPPING, Called.STOPPING]
    assert stand.woken == [flood[1], flood[0], other]


@given(st.lists(st.tuples(st.sampled_from(["join", "free", "go", "gone", "stop", "full"]), st.integers(0, 5)), max_size=80))
def test_whatever_happens_no_promise_is_lost_and_no_place_is_given_twice(steps: list[tuple[str, int]]) -> None:
    stand = Stand(places=2)
    inside: list[Ticket] = []
    for what, number in steps:
        chosen = inside[number % len(inside)] if inside else None
        if what == "join":
            model = f"m{1 + number % 2}"
            ticket = Ticket(model, f"k{number % 3}", 1 + number % COST_MAX, 0.0, lambda: None)
            if stand.turns.join(ticket, 4):
                inside.append(ticket)
            stand.turns.give()
        elif what == "free":
            stand.place.taken = max(stand.place.taken - 1, 0)
            stand.turns.give()
        elif what == "gone" and chosen is not None:
            stand.turns.leave(chosen)
            inside.remove(chosen)
        elif what == "stop":
            stand.turns.stop()
        elif what == "full":
            stand.found = {} if stand.found else {"m1": BROKEN, "m2": FULL}
            stand.turns.give()
        elif what == "go":
            for ticket in [one for one in inside if stand.turns.called(one) is not None]:
                called = stand.turns.called(ticket)
                if called is Called.TURN:
                    stand.turns.redeem(ticket)
                    if isinstance(stand.look(ticket.model), Choice):
                        stand.turns.took(ticket)
                        stand.place.taken += 1
                    else:
                        continue
                stand.turns.leave(ticket)
                inside.remove(ticket)
                stand.turns.give()
        turned = [ticket for ticket in inside if stand.turns.called(ticket) is Called.TURN]
        assert stand.place.promised == len(turned)
        assert stand.place.taken + stand.place.promised <= 2
        assert all(stand.turns.called(ticket) is not None for ticket in inside if ticket not in stand.turns.queue.tickets(ticket.model))
    for ticket in inside:
        stand.turns.leave(ticket)
    assert (stand.place.promised, stand.turns.queue.size) == (0, 0)
