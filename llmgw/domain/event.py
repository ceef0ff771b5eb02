"""One entry of the history of what the cluster did and why."""

from __future__ import annotations

import enum

import attrs


class Level(enum.Enum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@attrs.frozen
class Event:
    """`seq` rises by one per event of this cluster (0: not stored yet). `at` is wall time in seconds, for people.

    `kind` is a stable dotted word such as `replica.failed`; `object` names what it is about, such as `replica/m1-0a1b2c3d`.
    """

    kind: str
    object: str
    text: str
    at: float
    epoch: int = 0
    seq: int = 0
    level: Level = Level.INFO
