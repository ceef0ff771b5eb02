"""Deltas of endpoint lists: what they make, and that what does not fit is refused."""

from __future__ import annotations

import random

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.domain.endpoint import DIGEST_FORM, Absence, AbsenceReason, Endpoint, EndpointList, ListStamp
from llmgw.domain.errors import Conflict
from llmgw.domain.ids import ClusterId, EndpointId, OwnerId
from llmgw.domain.lease import FencingToken
from llmgw.protocol.codec import decode, encode
from llmgw.protocol.list_delta import ListDelta, apply, delta
from llmgw.protocol.router_messages import PushDelta, PushEndpoints

STAMP = ListStamp(FencingToken(ClusterId("c"), 1, OwnerId("o")), 1)
NAMES = st.sampled_from(("a", "b", "c", "d", "é"))  # few, so that two lists have rows in common
ENDPOINTS = st.builds(
    Endpoint,
    id=NAMES.map(EndpointId),
    url=st.sampled_from(("http://x", "http://y")),
    models=st.lists(NAMES, max_size=2).map(tuple),
    aliases=st.dictionaries(NAMES, NAMES, max_size=1),
    weight=st.sampled_from((0.0, 1, 1.0, 2.5)),
    key=NAMES,
)
ABSENCES = st.builds(Absence, names=st.lists(NAMES, max_size=2).map(tuple), reason=st.sampled_from(AbsenceReason), text=NAMES)
ANY_LISTS = st.builds(
    EndpointList, endpoints=st.lists(ENDPOINTS, max_size=4).map(tuple), absences=st.lists(ABSENCES, max_size=4).map(tuple)
)


def in_order(endpoints: list[Endpoint], absences: list[Absence]) -> EndpointList:
    """As a control plane lists them."""
    by_id = {endpoint.id: endpoint for endpoint in endpoints}
    by_model = {absence.names[:1]: absence for absence in absences}
    return EndpointList(tuple(by_id[known] for known in sorted(by_id)), tuple(by_model[model] for model in sorted(by_model)))


LISTS = st.builds(in_order, st.lists(ENDPOINTS, max_size=6), st.lists(ABSENCES, max_size=6))


def made(before: EndpointList, after: EndpointList) -> ListDelta:
    found = delta(before, after)
    assert found is not None
    return found


@given(LISTS, LISTS)
def test_a_delta_over_the_list_before_makes_the_list_after_here_and_at_the_other_end_of_a_channel(
    before: EndpointList, after: EndpointList
) -> None:
    change = made(before, after)
    assert apply(before, change) == after
    there = [decode(encode(message)) for message in (PushEndpoints(STAMP, before), PushDelta(STAMP, change))]
    assert isinstance(there[0], PushEndpoints)
    assert isinstance(there[1], PushDelta)
    assert apply(there[0].endpoints, there[1].delta) == after


@given(ANY_LISTS, ANY_LISTS)
def test_of_any_two_lists_a_delta_makes_exactly_the_second_or_there_is_none(before: EndpointList, after: EndpointList) -> None:
    change = delta(before, after)
    assert change is None or apply(before, change) == after


@given(ANY_LISTS)
def test_there_is_no_delta_for_rows_out_of_order_or_with_one_name(known: EndpointList) -> None:
    ids = [endpoint.id for endpoint in known.endpoints]
    models = [absence.names[:1] for absence in known.absences]
    orderly = ids == sorted(set(ids)) and models == sorted(set(models))
    assert (delta(known, EndpointList()) is not None) == (delta(EndpointList(), known) is not None) == orderly


@given(LISTS, LISTS, ANY_LISTS)
def test_over_any_other_list_a_delta_is_refused(before: EndpointList, after: EndpointList, other: EndpointList) -> None:
    change = made(before, after)
    if other.fingerprint == before.fingerprint:
        assert apply(other, change).fingerprint == after.fingerprint
    else:
        with pytest.raises(Conflict) as refused:
            apply(other, change)
        assert refused.value.code == "list_base"


@given(LISTS, LISTS, st.data())
def test_a_delta_of_which_a_row_is_missing_or_another_is_refused(before: EndpointList, after: EndpointList, data: st.DataObject) -> None:
    change = made(before, after)
    field = data.draw(st.sampled_from(("changed", "removed", "absent", "present", "more")))
    if field == "more":
        bad = attrs.evolve(change, changed=(*change.changed, Endpoint(EndpointId("z"), "http://z", ("m",))))
    else:
        rows = getattr(change, field)
        if not rows:
            return
        bad = attrs.evolve(change, **{field: rows[1:]})
    with pytest.raises(Conflict) as refused:
        apply(before, bad)
    assert refused.value.code == "list_result"


@given(LISTS)
def test_a_list_and_itself_differ_by_nothing(known: EndpointList) -> None:
    assert made(known, known) == ListDelta(known.fingerprint, known.fingerprint)


def test_one_change_among_thousands_is_one_row() -> None:
    endpoints = tuple(Endpoint(EndpointId(f"e{number:05}"), f"http://{number}", ("m",)) for number in range(5000))
    moved = attrs.evolve(endpoints[2500], url="http://elsewhere")
    before, after = EndpointList(endpoints), EndpointList((*endpoints[:2500], moved, *endpoints[2501:]))
    assert made(before, after) == ListDelta(before.fingerprint, after.fingerprint, changed=(moved,))


# --- the content hash


@given(ANY_LISTS, st.randoms(use_true_random=False))
def test_the_fingerprint_of_a_list_is_the_same_in_whatever_order(known: EndpointList, rng: random.Random) -> None:
    endpoints, absences = list(known.endpoints), list(known.absences)
    rng.shuffle(endpoints)
    rng.shuffle(absences)
    assert EndpointList(tuple(endpoints), tuple(absences)).fingerprint == known.fingerprint


@given(LISTS, LISTS)
def test_lists_that_a_router_would_act_on_differently_have_different_fingerprints(one: EndpointList, other: EndpointList) -> None:
    def acted_on(known: EndpointList) -> tuple[object, ...]:
        rows = tuple(attrs.evolve(endpoint, models=tuple(sorted(endpoint.models))) for endpoint in known.endpoints)
        return rows, known.absences

    assert (one.fingerprint == other.fingerprint) == (acted_on(one) == acted_on(other))


def test_digests_are_those_of_their_form() -> None:
    """Control planes and routers of several builds compare them: whatever changes what is pinned here raises DIGEST_FORM."""
    endpoint = Endpoint(EndpointId("m-1"), "http://10.0.0.1:8000", ("m",), {"alias": "m"}, {"m": "/x"}, ("u",), "vllm", "p", 2, 1, "k", 3)
    absence = Absence(("n", "o"), AbsenceReason.HELD, "é")
    pinned = (DIGEST_FORM, EndpointList((endpoint,), (absence,)).fingerprint)
    assert pinned == (1, "bda4491db1f8226b557f1ed70a5bcf4bd2c2cc8eaf42561b954ccaeeea096b83")
    assert [field.name for field in attrs.fields(Endpoint)] == [
        "id", "url", "models", "aliases", "names", "unlisted", "engine", "pool", "weight", "priority", "key", "max_inflight"
    ]  # fmt: skip
    assert [field.name for field in attrs.fields(Absence)] == ["names", "reason", "text"]
