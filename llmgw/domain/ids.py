"""Names for things: new types over `str`, and the pure functions that make and read them.

Randomness is always passed in as hex text; nothing here draws it.
"""

from __future__ import annotations

import re
from typing import Final, NewType

ClusterId = NewType("ClusterId", str)
OwnerId = NewType("OwnerId", str)  # a control plane's name for itself, drawn at process start
NodeId = NewType("NodeId", str)  # generated once in the agent's data directory; never the host name
DeviceId = NewType("DeviceId", str)  # a GPU's uuid, or CPU_DEVICE
ReplicaId = NewType("ReplicaId", str)
EndpointId = NewType("EndpointId", str)
CommandId = NewType("CommandId", str)

CPU_DEVICE: Final = DeviceId("cpu")
OWNER_RANDOM_BYTES: Final = 8  # 16 hex digits (control.md 2)
_SLUG_MAX: Final = 40  # keeps a replica id usable as a file name and a log field
_NOT_SLUG: Final = re.compile(r"[^a-z0-9]+")


def owner_id(holder: str, random_hex: str) -> OwnerId:
    """`<holder>-<random>`: a restarted process must not match its own stale lease, so the random part is fresh."""
    return OwnerId(f"{holder or 'ctl'}-{random_hex}")


def holder_name(owner: OwnerId) -> str:
    """The machine's part of an owner id, for people."""
    return owner.rpartition("-")[0] or owner


def replica_id(model: str, random_hex: str) -> ReplicaId:
    """A replica's id: readable, safe as a file name, unique by its random part (callers pass 8 hex digits)."""
    slug = _NOT_SLUG.sub("-", model.lower()).strip("-")[:_SLUG_MAX] or "model"
    return ReplicaId(f"{slug}-{random_hex}")
