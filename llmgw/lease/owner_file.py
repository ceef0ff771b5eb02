"""Who held the lease last on this machine: lets `llmgw lease release` release what a dead process held, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import attrs

from llmgw.domain.errors import Invalid
from llmgw.domain.ports import Disk
from llmgw.lease.record import LeaseRecord

OWNER_FILE: Final = "owner.json"


@attrs.frozen
class OwnerFile:
    """Who held the lease last here. `store` is where its record is: the path of a lease file, or an `ObjectPlace.address`."""

    owner: str
    epoch: int
    tenure: str
    role: str
    store: str

    def names(self, record: LeaseRecord) -> bool:
        return (record.owner, record.epoch, record.tenure) == (self.owner, self.epoch, self.tenure)


def write_owner(disk: Disk, path: Path, record: LeaseRecord, role: str, store: str) -> None:
    """Raises OSError."""
    values = OwnerFile(record.owner, record.epoch, record.tenure, role, store)
    disk.write(path, json.dumps(attrs.asdict(values), sort_keys=True).encode("ascii"))


def parse_owner(data: bytes, path: Path) -> OwnerFile:
    """Raises Invalid for anything that is not an owner file."""
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as err:
        raise Invalid(f"{path} is not an owner file: it is not JSON", code="owner_file") from err
    if not isinstance(values, dict):
        raise Invalid(f"{path} is not an owner file: a JSON object is expected", code="owner_file")
    found: dict[str, Any] = {}
    for field in attrs.fields(OwnerFile):
        value = values.get(field.name)
        kind = int if field.name == "epoch" else str
        if type(value) is not kind:
            raise Invalid(f"{path} is not an owner file: {field.name} must be a {'number' if kind is int else 'text'}", code="owner_file")
        found[field.name] = value
    return OwnerFile(**found)
