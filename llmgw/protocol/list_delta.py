"""What makes one list of endpoints of another, so that a change of one row costs one row on the wire. Pure.

A delta names the content hash of both lists. It is taken over exactly the list that it was made from, and counts only when what
comes out hashes to what its sender had: a delta that does not fit is refused, never half applied.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from typing import Final, TypeVar

import attrs

from llmgw.domain.endpoint import Absence, Endpoint, EndpointList
from llmgw.domain.errors import Conflict
from llmgw.domain.ids import EndpointId

Row = TypeVar("Row")
Key = TypeVar("Key", bound=str)


@attrs.frozen
class ListDelta:
    """`base` and `result` are the fingerprints of the list before and after.

    `changed` are endpoints that are new or not what they were, `absent` are absences alike; `removed` and `present` name what is
    on the list no more, an absence by the first of its names.
    """

    base: str
    result: str
    changed: tuple[Endpoint, ...] = ()
    removed: tuple[EndpointId, ...] = ()
    absent: tuple[Absence, ...] = ()
    present: tuple[str, ...] = ()


def delta(before: EndpointList, after: EndpointList) -> ListDelta | None:
    """What makes `after` of `before`; None where no delta can say it, because rows are not in order or two have one name.

    In order are endpoints by id and absences by their first name, as a control plane lists them.
    """
    if not (_is_in_order(before) and _is_in_order(after)):
        return None
    changed, removed = _differences(before.endpoints, after.endpoints, _id)
    absent, present = _differences(before.absences, after.absences, _model)
    return ListDelta(before.fingerprint, after.fingerprint, changed, removed, absent, present)


def apply(before: EndpointList, change: ListDelta) -> EndpointList:
    """The list after, in order. Raises Conflict where `before` is not the list that the delta was made from, or what comes out of
    it is not what its sender had.
    """
    if not _is_that(before, change.base):
        raise Conflict("a delta over another list than the one that is here", code="list_base")
    endpoints = _merged(before.endpoints, change.changed, change.removed, _id)
    absences = _merged(before.absences, change.absent, change.present, _model)
    after = EndpointList(endpoints, absences)
    if not _is_that(after, change.result):
        raise Conflict("a delta that does not make the list that it names", code="list_result")
    return after


def _is_that(known: EndpointList, fingerprint: str) -> bool:
    return known.fingerprint == fingerprint


_id: Final[Callable[[Endpoint], EndpointId]] = operator.attrgetter("id")


def _model(absence: Absence) -> str:
    return absence.names[0] if absence.names else ""


def _is_in_order(endpoints: EndpointList) -> bool:
    return _rises([_id(one) for one in endpoints.endpoints]) and _rises([_model(one) for one in endpoints.absences])


def _rises(names: Sequence[str]) -> bool:
    return all(map(operator.lt, names, names[1:]))


def _differences(before: Sequence[Row], after: Sequence[Row], key: Callable[[Row], Key]) -> tuple[tuple[Row, ...], tuple[Key, ...]]:
    """(rows that are new or other, names of those that are gone). Rows that both lists share are not compared: most of them."""
    left = {key(row): row for row in before}
    changed = []
    for row in after:
        known = left.pop(key(row), None)
        if known is not row and known != row:
            changed.append(row)
    return tuple(changed), tuple(left)


def _merged(before: Sequence[Row], changed: Collection[Row], gone: Collection[str], key: Callable[[Row], str]) -> tuple[Row, ...]:
    rows = {key(row): row for row in before}
    for name in gone:
        rows.pop(name, None)
    rows.update((key(row), row) for row in changed)
    return tuple(sorted(rows.values(), key=key))
