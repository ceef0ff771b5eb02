"""Why a replica is where it is: what the planner found of each node when it chose. It travels in the order.

So whoever leads later, and the agent's own state file, know it as long as the replica exists; nothing works it out again.
"""

from __future__ import annotations

import enum

import attrs


class Filter(enum.Enum):
    """Why a node was not taken for a replica."""

    STATE = "state"
    CORDON = "cordon"
    HOLD = "hold"
    SELECTOR = "selector"
    ENGINE = "engine"
    DEVICES = "devices"
    MEMORY = "memory"
    DISK = "disk"
    CLOSED = "closed"
    PORT = "port"
    SCORE = "score"  # it fits, and another fits better
    OTHER = "other"  # one that a newer build knows

    @classmethod
    def _missing_(cls, value: object) -> Filter:
        """An order of the next build must not be refused for a word in its reasons."""
        return cls.OTHER


@attrs.frozen
class Rejection:
    """One node that was looked at and not taken; `text` keeps the numbers.

    `cause` is the text without what differs from node to node for the same cause, "" where that is all of it.
    """

    node: str
    filter: Filter
    text: str
    cause: str = ""


@attrs.frozen
class Placement:
    """Why this node: one sentence with the parts of the score, and nodes that were passed over, the next best first.

    Empty in an order of a build that did not write it down.
    """

    text: str = ""
    passed: tuple[Rejection, ...] = ()
