"""Records for tests."""

from __future__ import annotations

import itertools
from typing import Any

import attrs

from llmgw.domain.ids import ClusterId, OwnerId
from llmgw.lease.record import LeaseRecord

_numbers = itertools.count(1)


def record(epoch: int = 1, seq: int = 1, owner: str = "a-1", **fields: Any) -> LeaseRecord:
    """Each with a write id of its own."""
    values = {"tenure": f"t-{owner}-{epoch}", "write_id": f"w{next(_numbers)}", "boot_id": "boot", "ttl_s": 15.0} | fields
    return LeaseRecord(ClusterId("c"), epoch, OwnerId(owner), seq=seq, **values)


def later(before: LeaseRecord, **fields: Any) -> LeaseRecord:
    return attrs.evolve(before, seq=before.seq + 1, write_id=f"w{next(_numbers)}", **fields)
