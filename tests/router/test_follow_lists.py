"""Which list counts: what a leader that has just begun may leave out, and what a standby may and may not change."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.domain.endpoint import Absence, AbsenceReason, Endpoint, EndpointList
from llmgw.domain.ids import EndpointId
from llmgw.domain.model import Catalog, ModelSpec, Profile
from llmgw.router.lists import Observation, may_take, observed_list, unsettled_list

MODELS = ("a", "b", "c")
CATALOG = Catalog(
    (
        ModelSpec("a", (Profile("p", "command", command=("/e",), weight=2.5, priority=1),), aliases=("fast",), pool="gold"),
        ModelSpec("b", (Profile("p", "vllm", checkpoint="/b"),)),
    )
)  # "c" is no model of it
IDS = tuple(f"{model}-{number}" for model in MODELS for number in range(3))


@st.composite
def endpoints(draw: st.DrawFn, known: str) -> Endpoint:
    """An endpoint as some control plane may list it: two of them may be at odds about everything but whose replica it is."""
    model = known[0]
    return Endpoint(
        EndpointId(known),
        f"http://10.0.0.{draw(st.integers(1, 3))}:8000",
        (model,),
        aliases=draw(st.sampled_from(({}, {"fast": model}))),
        engine="command" if model == "a" else "vllm",
        pool=draw(st.sampled_from(("default", "gold"))),
        weight=draw(st.sampled_from((1.0, 2.0))),
        priority=draw(st.integers(0, 1)),
        key=draw(st.sampled_from(("k1", "k2"))),
    )


@st.composite
def lists(draw: st.DrawFn) -> EndpointList:
    ids = sorted(draw(st.sets(st.sampled_from(IDS))))
    rows = tuple(draw(endpoints(known)) for known in ids)
    served = {row.models[0] for row in rows}
    return EndpointList(rows, tuple(Absence((model,), AbsenceReason.LOADING) for model in MODELS if model not in served))


@st.composite
def observations(draw: st.DrawFn) -> Observation:
    seen = draw(lists())
    listed = {row.id for row in seen.endpoints} | draw(st.sets(st.sampled_from(IDS)))
    return Observation(seen, frozenset(EndpointId(known) for known in listed))


withdrawals = st.frozensets(st.sampled_from([EndpointId(known) for known in IDS]))


def ids(of: EndpointList) -> set[str]:
    return {endpoint.id for endpoint in of.endpoints}


@given(lists(), withdrawals, observations())
def test_what_a_leader_decided_stays_whatever_a_standby_says(led: EndpointList, gone: frozenset[EndpointId], seen: Observation) -> None:
    before = {endpoint.id: endpoint for endpoint in led.endpoints}
    for endpoint in observed_list(led, gone, CATALOG, seen).endpoints:
        if endpoint.id in before:
            assert attrs.evolve(endpoint, url="", key="") == attrs.evolve(before[endpoint.id], url="", key="")


@given(lists(), withdrawals, observations())
def test_an_endpoint_leaves_by_hearsay_only_where_the_standby_had_seen_it(
    led: EndpointList, gone: frozenset[EndpointId], seen: Observation
) -> None:
    for known in ids(led) - ids(observed_list(led, gone, CATALOG, seen)):
        assert known in seen.listed
        assert known not in ids(seen.endpoints)


@given(lists(), withdrawals, observations())
def test_what_a_leader_withdrew_does_not_come_back_and_no_model_is_new(
    led: EndpointList, gone: frozenset[EndpointId], seen: Observation
) -> None:
    led = attrs.evolve(led, endpoints=tuple(row for row in led.endpoints if row.id not in gone))
    known = {model for row in led.endpoints for model in row.models} | {spec.name for spec in CATALOG.models}
    result = observed_list(led, gone, CATALOG, seen)
    assert not ids(result) & gone
    assert {model for row in result.endpoints for model in row.models} <= known
    for row in result.endpoints:
        if row.id not in ids(led):
            assert (row.url, row.key) in {(other.url, other.key) for other in seen.endpoints.endpoints if other.id == row.id}
            rights = [other for other in led.endpoints if other.models == row.models]
            spec = CATALOG.get(row.models[0])
            weights = {other.weight for other in rights} or ({spec.profiles[0].weight} if spec is not None else set())
            assert row.weight in weights  # as a leader has it, never as the standby does


@given(lists(), withdrawals, observations())
def test_a_standbys_view_is_worked_out_the_same_each_time_and_every_known_model_has_an_endpoint_or_a_reason(
    led: EndpointList, gone: frozenset[EndpointId], seen: Observation
) -> None:
    result = observed_list(led, gone, CATALOG, seen)
    assert result == observed_list(led, gone, CATALOG, seen)
    known = {model for row in led.endpoints for model in row.models} | {absence.names[0] for absence in led.absences}
    served = {model for row in result.endpoints for model in row.models}
    absent = [absence.names[0] for absence in result.absences]
    assert known <= served | set(absent)
    assert not served & set(absent)
    assert len(absent) == len(set(absent))


@given(lists(), withdrawals)
def test_a_standby_that_sees_nothing_yet_or_the_same_changes_nothing(led: EndpointList, gone: frozenset[EndpointId]) -> None:
    assert observed_list(led, gone, CATALOG, Observation(EndpointList(), frozenset())) == led
    same = Observation(led, frozenset(EndpointId(known) for known in ids(led)))
    assert observed_list(led, gone, CATALOG, same) == led


def test_an_endpoint_that_is_gone_has_moved_or_is_ready_is_taken() -> None:
    stays = Endpoint(EndpointId("a-0"), "http://10.0.0.1:1", ("a",), weight=3.0, engine="command")
    led = EndpointList((stays, attrs.evolve(stays, id=EndpointId("a-1")), Endpoint(EndpointId("b-0"), "http://10.0.0.2:1", ("b",))))
    moved = attrs.evolve(stays, url="http://10.0.0.9:1", weight=9.0)
    ready = Endpoint(EndpointId("a-2"), "http://10.0.0.3:1", ("a",), engine="command", key="secret", weight=9.0)
    seen = Observation(EndpointList((moved, ready)), frozenset(map(EndpointId, ("a-0", "a-1", "a-2", "b-0"))))
    result = observed_list(led, frozenset(), CATALOG, seen)
    assert [(row.id, row.url, row.weight) for row in result.endpoints] == [
        ("a-0", "http://10.0.0.9:1", 3.0),
        ("a-2", "http://10.0.0.3:1", 3.0),
    ]
    assert result.endpoints[1].key == "secret"
    assert [(absence.names, absence.reason) for absence in result.absences] == [(("b",), AbsenceReason.UNREACHABLE)]


def test_the_first_replica_of_a_model_is_taken_as_the_catalog_has_it() -> None:
    ready = Endpoint(EndpointId("a-0"), "http://10.0.0.3:1", ("a",), engine="command", key="k", weight=9.0, priority=7, aliases={"x": "a"})
    seen = Observation(EndpointList((ready,)), frozenset({EndpointId("a-0")}))
    led = EndpointList((), (Absence(("a", "fast"), AbsenceReason.LOADING),))
    (row,) = observed_list(led, frozenset(), CATALOG, seen).endpoints
    assert (row.weight, row.priority, row.pool, dict(row.aliases), row.key) == (2.5, 1, "gold", {"fast": "a"}, "k")


@pytest.mark.parametrize(("silent_s", "taken"), [(0.0, False), (14.9, False), (15.0, True), (1000.0, True)])
def test_a_standby_counts_after_a_whole_ttl_of_silence_only(silent_s: float, taken: bool) -> None:
    assert may_take(silent_s, 15.0) is taken


@given(lists(), lists(), withdrawals)
def test_a_leader_that_does_not_know_its_nodes_yet_takes_away_only_what_it_knows(
    before: EndpointList, pushed: EndpointList, gone: frozenset[EndpointId]
) -> None:
    gone = gone - ids(pushed)
    result = unsettled_list(before, pushed, gone, CATALOG)
    assert all(row in result.endpoints for row in pushed.endpoints)
    assert not ids(result) & gone
    for row in before.endpoints:
        if row.id not in gone and row.id not in ids(pushed):
            assert (row in result.endpoints) is (CATALOG.get(row.models[0]) is not None)
    served = {model for row in result.endpoints for model in row.models}
    assert not served & {absence.names[0] for absence in result.absences}
    assert len(ids(result)) == len(result.endpoints)
