"""What the planner reads: what is asked for, and what was last reported, as immutable values.

Sorted by their makers, so that equal worlds are equal values.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from llmgw.domain.holds import Hold
from llmgw.domain.ids import NodeId, ReplicaId
from llmgw.domain.model import Catalog
from llmgw.domain.node import NodeFacts, NodeState
from llmgw.domain.replica import ReplicaReport, ReplicaState, RestartPolicy


@attrs.frozen
class MemoryNeed:
    """What one replica of a profile needs in all, and where the number comes from, for people."""

    mib: int
    origin: str


@attrs.frozen
class PlanSettings:
    """The part of the cluster's settings that the planner reads."""

    grace_s: float = 60.0
    starts_max: int = 8
    restart: RestartPolicy = RestartPolicy()
    spread: str = "facility"
    pack: bool = True
    drain_deadline_s: float = 30.0  # how long requests in flight hold up a stop: as long as a router's own drain_s
    engine_commands: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict)
    load_limits_s: Mapping[str, float] = attrs.field(factory=dict)
    progress_limits_s: Mapping[str, float] = attrs.field(factory=dict)


@attrs.frozen
class Desired:
    """What is asked for. `choices` maps a model to the profile an operator chose; `needs` a profile's digest to its memory.

    `paused`: by whom and why nothing may be placed, moved or scaled now; None when nothing is paused.
    """

    catalog: Catalog
    choices: Mapping[str, str] = attrs.field(factory=dict)
    needs: Mapping[str, MemoryNeed] = attrs.field(factory=dict)
    holds: tuple[Hold, ...] = ()  # the active ones
    settings: PlanSettings = PlanSettings()
    paused: str | None = None


@attrs.frozen
class ObservedNode:
    """A node as the leader sees it. Points in time are on this machine's clock, so that a silent node is the same value.

    UNKNOWN: it has not answered this leader's barrier; what may run there does not count as missing until `grace_s` have
    passed since `awaited_since_s`. `connected` False: nothing can be told to its agent at this moment.
    """

    facts: NodeFacts
    state: NodeState
    connected: bool = True
    heard_s: float = 0.0  # when it last spoke
    awaited_since_s: float = 0.0
    clock_ahead_s: float = 0.0  # of its time of day, when its session was opened; below 0: behind
    cordoned: bool = False
    draining: bool = False
    drain_left_s: float | None = None  # None: no deadline was given
    taken_ports: frozenset[int] = frozenset()  # refused lately as taken by somebody else

    @property
    def id(self) -> NodeId:
        return self.facts.id

    @property
    def name(self) -> str:
        return self.facts.name


@attrs.frozen
class ObservedReplica:
    """A replica as last reported, or as ordered and not yet reported (PENDING). `state` is LOST while its node is.

    `since_s` is when it entered the reported state, on this machine's clock: it stands still, so that an unchanged replica is
    the same value at every look. `report.age_s` is of when the report came.
    """

    node: NodeId
    report: ReplicaReport
    state: ReplicaState
    since_s: float = 0.0
    ordered_to_drain: bool = False  # an operator asked for this one to go

    @property
    def id(self) -> ReplicaId:
        return self.report.order.id

    @property
    def model(self) -> str:
        return self.report.order.model


@attrs.frozen
class Closing:
    """A replica on its way out: withdrawn, drained, then stopped.

    `withdrawn` is True once every connected router has acknowledged that it lists the replica no more (or been silent for 5 s),
    `used` while one counts a request in flight there. `left_s` may be negative.
    """

    replica: ReplicaId
    why: str
    withdrawn: bool
    used: bool
    left_s: float
    stop_sent: bool = False

    @property
    def let_go(self) -> bool:
        return self.withdrawn and not self.used


@attrs.frozen
class Refusal:
    """An agent said no to a start lately; (node, profile digest) is closed until it is forgotten."""

    node: NodeId
    model: str
    digest: str
    text: str


@attrs.frozen
class Observed:
    """Everything at `now_s`."""

    nodes: tuple[ObservedNode, ...] = ()
    replicas: tuple[ObservedReplica, ...] = ()
    closings: tuple[Closing, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    now_s: float = 0.0
