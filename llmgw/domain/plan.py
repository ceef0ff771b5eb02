"""What the planner decides and why. Values only; `control.planning` makes them, `control.reconciler` carries them out."""

from __future__ import annotations

import enum

import attrs

from llmgw.domain.ids import NodeId, ReplicaId
from llmgw.domain.placed import Rejection
from llmgw.domain.replica import ReplicaOrder


@attrs.frozen
class Start:
    """Start this replica on this node. Expansive: an unconfirmed leader may do it only to restore what is asked for."""

    node: NodeId
    order: ReplicaOrder
    why: str
    # True where it replaces what was lost or raises to what the durable document already asks for.
    restores: bool = True


@attrs.frozen
class Withdraw:
    """Take this replica out of the endpoint list; its stop follows once routers have let go, or at the deadline."""

    node: NodeId
    replica: ReplicaId
    why: str
    deadline_s: float  # seconds from now


@attrs.frozen
class Stop:
    """Stop this replica now: it is out of every list and drained, or its deadline has passed, or it never was ready."""

    node: NodeId
    replica: ReplicaId
    why: str
    grace_s: float = 10.0  # between TERM and KILL


@attrs.frozen
class Forget:
    """Let the agent drop the record of a replica that has ended and is no longer wanted."""

    node: NodeId
    replica: ReplicaId
    why: str


Action = Start | Withdraw | Stop | Forget


class Wait(enum.Enum):
    """What a model waits for that comes by itself."""

    INVENTORY = "inventory"  # nodes known from earlier have not answered this leader yet
    TURN = "turn"  # as many replicas are starting as may at once


@attrs.frozen
class Reason:
    """Why a replica is where it is, or why a model lacks one. `object` is `replica/ID` or `model/NAME`.

    `wait` is set where nothing is in the way but time.
    """

    object: str
    text: str
    rejections: tuple[Rejection, ...] = ()
    wait: Wait | None = None


@attrs.frozen
class Plan:
    """All that is to be done now, in order, with the reason for each choice, and when to look again at the latest."""

    actions: tuple[Action, ...]
    reasons: tuple[Reason, ...]
    look_again_after_s: float
