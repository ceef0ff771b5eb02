"""The rules behind several workers: slots, sums, pieces of the log, how long a dead one waits."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from llmgw.domain.endpoint import EndpointUse
from llmgw.domain.errors import Broken, Overloaded
from llmgw.domain.ids import EndpointId
from llmgw.domain.policy import ApiKey
from llmgw.router.cells import Cells
from llmgw.router.limits import Parallel
from llmgw.router.metrics import EndpointFigures, Metrics, counted
from llmgw.router.metrics_sum import COUNTED, GAUGES, for_endpoints, outliving, plain, summed, text_of
from llmgw.router.slots import NO_SLOT, Slots
from llmgw.router.worker_messages import Acting, Family, Report, Stop, encode, from_worker, to_worker
from llmgw.router.workers import RESTART_S, restart_delay_s
from llmgw.wiring.access_log_writer import PIECE_BYTES_MAX, whole_lines

NAMES = st.sampled_from("abcdef")


@given(st.lists(st.tuples(st.frozensets(NAMES), st.frozensets(NAMES)), max_size=30), st.integers(1, 4))
def test_no_two_names_share_a_slot_and_who_still_counts_keeps_its_own(
    steps: list[tuple[frozenset[str], frozenset[str]]], size: int
) -> None:
    slots = Slots(size)
    for wanted, busy in steps:
        before = dict(slots.taken)
        busy_slots = {slot for name, slot in before.items() if name in busy}
        slots.let_go(wanted, lambda slot, busy_slots=busy_slots: slot not in busy_slots)  # type: ignore[misc]
        given_out = {name: slots.of(name) for name in sorted(wanted)}
        taken = dict(slots.taken)
        assert len(set(taken.values())) == len(taken) <= size
        assert all(0 <= slot < size for slot in taken.values())
        assert all(taken[name] == slot for name, slot in before.items() if name in busy or name in wanted)
        assert all(given_out[name] == taken.get(name, NO_SLOT) for name in wanted)
        assert NO_SLOT not in given_out.values() or len(taken) == size


def test_cells_are_summed_over_workers_and_a_dead_ones_are_cleared() -> None:
    mine = Cells.create(3)
    theirs = Cells(mine.descriptor, 3)  # the same memory, as another process has it
    for number in (1, 1, -1, 1):
        mine.cell(7, 0).add(number)
    theirs.cell(7, 2).add(5)
    theirs.cell(8, 2).add(1)
    assert (mine.total(7), theirs.cell(7, 1).total(), mine.total(8)) == (7, 7, 1)
    mine.clear(2, [7, 8])
    assert (theirs.total(7), theirs.total(8)) == (2, 0)


def test_a_key_over_several_workers_never_has_more_than_its_limit_and_leaks_nothing() -> None:
    cells = Cells.create(2)
    key = ApiKey("k", "0" * 64, max_parallel=2)
    one, two = Parallel(), Parallel()
    one.share({"k": cells.cell(0, 0)})
    two.share({"k": cells.cell(0, 1)})
    places = (one.take(key), two.take(key))
    for worker in (one, two):
        with pytest.raises(Overloaded):
            worker.take(key)
    assert cells.total(0) == 2
    one.share({})  # an edit of the policy: what runs ends in the cell that it began in
    one.give_back(places[0])
    two.give_back(places[1])
    assert cells.total(0) == 0
    assert (one.running("k"), two.running("k")) == (0, 0)


def counts(requests: int, endpoint: str, in_flight: int, health: int) -> list[Family]:
    metrics = Metrics()
    for number in range(requests):
        metrics.finished("m", 200 if number % 3 else 503, 0.25 * number, 0.5)
    return plain(counted(metrics, {EndpointId(endpoint): EndpointFigures(in_flight, health, requests, 0, False)}, in_flight, requests))


def sample(families: list[Family], name: str, **labels: str) -> float:
    found = [value for family in families for known, given, value in family.samples if known == name and dict(given) == labels]
    assert len(found) == 1, found
    return found[0]


def test_counts_add_up_and_states_are_the_worst_of_all() -> None:
    both = summed([counts(3, "e1", 1, 0), counts(4, "e1", 2, 2)])
    assert sample(both, "llmgw_requests_total", model="m", status="503") == 3
    assert sample(both, "llmgw_request_seconds_count", model="m") == 7
    assert sample(both, "llmgw_request_seconds_bucket", model="m", le="+Inf") == 7
    assert sample(both, "llmgw_inflight", endpoint="e1") == 3
    assert sample(both, "llmgw_breaker_state", endpoint="e1") == 2
    assert sample(both, "llmgw_endpoints_generation") == 3
    read = {family.name: family for family in text_string_to_metric_families(text_of(both).decode())}
    assert read["llmgw_request_seconds"].type == "histogram"
    assert {family.name for family in both} == set(read)


def test_it_is_said_of_every_gauge_of_a_worker_how_it_adds_up() -> None:
    assert {family.name for family in counts(1, "e", 0, 0) if family.kind not in COUNTED} == set(GAUGES)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5))
def test_no_counter_goes_down_when_a_worker_dies(requests: list[int]) -> None:
    alive = [counts(number, "e", 1, 0) for number in requests]
    past: list[Family] = []
    before = outliving(summed(alive))
    while alive:
        past = summed([past, outliving(alive.pop())])
        assert {family.name: Counter(family.samples) for family in outliving(summed([*alive, past]))} == {
            family.name: Counter(family.samples) for family in before
        }
    assert all(family.kind in COUNTED for family in past)


def test_what_is_kept_of_the_dead_holds_no_endpoint_that_is_on_no_list() -> None:
    kept = for_endpoints(summed([counts(1, "old", 0, 0), counts(1, "new", 0, 0)]), {"new"})
    assert sample(kept, "llmgw_endpoint_requests_total", endpoint="new") == 1
    assert 'endpoint="old"' not in text_of(kept).decode()
    assert sample(kept, "llmgw_request_seconds_count", model="m") == 2


USES = st.builds(
    EndpointUse,
    in_flight=st.integers(0, 3),
    last_used_s=st.floats(0, 100),
    silent_s=st.floats(0, 100),
    answers=st.integers(0, 10),
    refused=st.booleans(),
    unanswered=st.integers(0, 5),
    heard_s=st.none() | st.floats(0, 100),
)


@given(USES, USES, USES)
def test_uses_merge_alike_in_any_order(one: EndpointUse, two: EndpointUse, three: EndpointUse) -> None:
    assert one.beside(two) == two.beside(one)
    assert one.beside(two).beside(three) == one.beside(two.beside(three))


@given(st.lists(st.binary(min_size=0, max_size=60).map(lambda line: line.replace(b"\n", b" ") + b"\n")), st.integers(1, 100))
def test_pieces_of_the_log_are_whole_lines(lines: list[bytes], size_max: int) -> None:
    pieces = list(whole_lines(b"".join(lines), size_max))
    assert b"".join(pieces) == b"".join(lines)
    assert all(piece.endswith(b"\n") for piece in pieces)
    assert all(len(piece) <= size_max or piece.count(b"\n") == 1 for piece in pieces)
    assert PIECE_BYTES_MAX >= 4096


def test_the_first_death_costs_no_time_and_many_in_a_row_more_and_more() -> None:
    delays = [restart_delay_s(deaths) for deaths in range(10)]
    assert delays[:2] == [0.0, 0.0]
    assert delays == sorted(delays)
    assert delays[-1] == RESTART_S[-1]


def test_words_are_read_as_they_were_said_and_others_are_named() -> None:
    report = Report({"e": EndpointUse(1, heard_s=2.0)}, [Family("f", "t", "gauge", [("f", (("a", "b"),), 1.0)])])
    assert from_worker(encode(report)) == report
    assert to_worker(encode(Stop(1.5))) == Stop(1.5)
    with pytest.raises(Broken, match="cannot read"):
        to_worker(encode(Acting(1)))
    with pytest.raises(Broken, match="cannot read"):
        from_worker(b"\xc1")
