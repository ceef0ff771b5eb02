"""The lease's record: what a store keeps under a role's name, as a value and as bytes. Pure.

The record is never deleted: a release writes `released` and keeps the epoch, so that the epoch rises for ever.
"""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Mapping
from typing import Any, Final

import attrs

from llmgw.domain.errors import Fault, Invalid
from llmgw.domain.ids import ClusterId, OwnerId

ROLE: Final = "control-plane"  # the role that places work (control.md 2)
RANDOM_BYTES: Final = 16  # of a tenure and of a write id (control.md 2.1, rule 1)
RECORD_BYTES_MAX: Final = 64 * 1024  # a record is about 400 bytes; more is not one, and is not parsed
NUMBER_MAX: Final = 2**53 - 1  # what every JSON reader keeps exactly
TTL_S_MAX: Final = 300.0  # the range of lease.ttl_s: a longer one, edited by hand, would keep everybody out


class RecordState(enum.Enum):
    HELD = "held"
    RELEASED = "released"  # anybody may take it at once


@attrs.frozen
class LeaseRecord:
    """`epoch` rises at each acquisition and may jump; `seq` rises by one at each write. `(epoch, seq)` orders records."""

    cluster_id: ClusterId
    epoch: int
    owner: OwnerId
    tenure: str  # drawn once per acquisition: an owner that leads twice is two holders
    write_id: str  # drawn per attempt to write, so that a lost reply is recognised when the record is read back
    boot_id: str  # of the holder's machine
    seq: int
    ttl_s: float  # judges this record, whatever the reader's own is
    state: RecordState = RecordState.HELD
    base: str = ""  # the published store copy that the next leader restores from
    settings_version: int = 0
    addr: str = ""  # where the holder's admin port is reached
    build: str = ""
    schema: int = 0  # of the holder's store

    @property
    def order(self) -> tuple[int, int]:
        return self.epoch, self.seq

    @property
    def released(self) -> bool:
        return self.state is RecordState.RELEASED

    def deposes(self, held: LeaseRecord) -> bool:
        """Is this record proof that the holder of `held` no longer leads? A higher epoch, or its own under another name."""
        if self.epoch != held.epoch:
            return self.epoch > held.epoch
        return self.owner != held.owner or self.tenure != held.tenure


@attrs.frozen
class Attempt:
    """A write of the record that was sent, and whose outcome may not be known."""

    expected: LeaseRecord | None
    new: LeaseRecord
    sent_s: float


def encode(record: LeaseRecord) -> bytes:
    """The record's one form as bytes."""
    return json.dumps(_values(record), sort_keys=True, separators=(",", ":")).encode("ascii")


def decode(data: bytes) -> LeaseRecord:
    """Fields that this build does not know are skipped. Raises Invalid with every fault named."""
    if len(data) > RECORD_BYTES_MAX:
        raise Invalid(f"the lease's record is {len(data)} bytes long; at most {RECORD_BYTES_MAX} are read", code="lease_record")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as err:
        raise Invalid("the lease's record is not JSON", code="lease_record") from err
    if not isinstance(value, dict):
        raise Invalid("the lease's record is not a JSON object", code="lease_record")
    found: dict[str, Any] = {}
    faults = []
    for name, (read, default) in _FIELDS.items():
        if name not in value:
            if default is attrs.NOTHING:
                faults.append(Fault(name, "is missing"))
            continue
        try:
            found[name] = read(value[name])
        except ValueError as err:
            faults.append(Fault(name, str(err)))
    if faults:
        raise Invalid.of("the lease's record cannot be understood", tuple(faults))
    return LeaseRecord(**found)


def _values(record: LeaseRecord) -> Mapping[str, Any]:
    return {name: value.value if isinstance(value := getattr(record, name), enum.Enum) else value for name in _FIELDS}


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"must be a text, not {_shown(value)}")
    return value


def _name(value: object) -> str:
    if not _text(value):
        raise ValueError("must not be empty")
    return str(value)


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= NUMBER_MAX:
        raise ValueError(f"must be a whole number from 0, not {_shown(value)}")
    return value


def _ordinal(value: object) -> int:
    if _count(value) == 0:
        raise ValueError("must be at least 1")
    return _count(value)


def _ttl_s(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or not 0 < value <= TTL_S_MAX:
        raise ValueError(f"must be seconds above 0 and at most {TTL_S_MAX:g}, not {_shown(value)}")
    return float(value)


def _state(value: object) -> RecordState:
    if value not in [state.value for state in RecordState]:
        raise ValueError(f"must be held or released, not {_shown(value)}")
    return RecordState(value)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"


_READERS: Final = {
    "cluster_id": _name,
    "epoch": _ordinal,
    "owner": _name,
    "tenure": _name,
    "write_id": _name,
    "boot_id": _text,
    "seq": _ordinal,
    "ttl_s": _ttl_s,
    "state": _state,
    "base": _text,
    "settings_version": _count,
    "addr": _text,
    "build": _text,
    "schema": _count,
}
_FIELDS: Final = {field.name: (_READERS[field.name], field.default) for field in attrs.fields(LeaseRecord)}
