"""Every message between an agent and a control plane.

The agent dials out and opens with `AgentHello`; the control plane answers `ServerHello`. A leader then sends
`LeaderHello`: the agent stores the epoch on disk, *then* answers with a full `Inventory` that names it. From that answer
on the leader knows the node. Ages are seconds on the sender's clock, never times. Readers skip fields they do not know.
"""

from __future__ import annotations

import enum
from typing import Final

import attrs

from llmgw.domain.event import Level
from llmgw.domain.ids import ClusterId, CommandId, OwnerId, ReplicaId
from llmgw.domain.lease import FencingToken
from llmgw.domain.node import NodeFacts
from llmgw.domain.replica import ReplicaOrder, ReplicaReport
from llmgw.protocol.router_messages import FromRouter, ToRouter

PROTOCOL: Final = 1  # raised when a neighbour of the release before could no longer understand us


# --- agent -> control plane


@attrs.frozen
class AgentHello:
    """First message of a session. `cluster_id` is the pin ("" before first contact); `(epoch, owner)` the highest met (0, "").

    `wall_s` is the node's time of day, so that one whose clock is wrong is shown as such; nothing is judged by it. 0: not said.
    `instance` is drawn at each start of the agent's process, so that two that live under one node id are told apart from one that
    dials anew. "": not said, by an older build.
    """

    facts: NodeFacts
    cluster_id: ClusterId
    epoch: int
    owner: OwnerId
    protocol: int = PROTOCOL
    wall_s: float = 0.0
    instance: str = ""


@attrs.frozen
class Inventory:
    """Everything that runs on the node. `epoch`/`owner` name the highest token met; an answer to `LeaderHello` names that one."""

    facts: NodeFacts
    replicas: tuple[ReplicaReport, ...]
    epoch: int
    owner: OwnerId
    generation: int = 0  # the highest generation of a command reached


@attrs.frozen
class Heartbeat:
    """Sent every heartbeat interval: measured memory, and the reports that changed since the last one."""

    facts: NodeFacts
    changed: tuple[ReplicaReport, ...] = ()


@attrs.frozen
class ReplicaChanged:
    """Sent at once when a replica's state, reason or rotation changes."""

    report: ReplicaReport


@attrs.frozen
class ReplicaForgotten:
    """The agent has dropped its record of an ended replica."""

    replica: ReplicaId


class Outcome(enum.Enum):
    DONE = "done"  # carried out, or begun where it takes long: reports tell the rest
    REFUSED = "refused"  # `code` and `text` say why; it is believed
    STALE = "stale"  # `epoch` and `owner` are the highest met
    FOREIGN = "foreign"  # another cluster's


@attrs.frozen
class CommandResult:
    """The answer to a command; the stored one when the command id is known already."""

    command_id: CommandId
    outcome: Outcome
    code: str = ""
    text: str = ""
    epoch: int = 0
    owner: OwnerId = OwnerId("")


@attrs.frozen
class AgentEvent:
    """Something worth the cluster's history. `age_s` is how long ago it happened."""

    kind: str
    object: str
    text: str
    level: Level = Level.INFO
    age_s: float = 0.0


@attrs.frozen
class LogChunk:
    """Answer to `LogRequest`. `offset` is where `text` begins in the file, `next_offset` where to go on, `attempts` those kept."""

    request_id: str
    attempt: int
    offset: int
    next_offset: int
    text: str
    attempts: tuple[int, ...] = ()
    error: str = ""


# --- control plane -> agent


@attrs.frozen
class ServerHello:
    """First answer in a session. `reached_at` is the address that the sender is told of by, "" where it has none."""

    cluster_id: ClusterId
    owner: OwnerId
    build: str
    heartbeat_s: float = 10.0
    protocol: int = PROTOCOL
    reached_at: str = ""


@attrs.frozen
class LeaderHello:
    """The barrier: store this token, then send a full inventory that names it."""

    token: FencingToken


@attrs.frozen
class StartReplica:
    order: ReplicaOrder


@attrs.frozen
class StopReplica:
    """TERM, `grace_s`, KILL of the whole tree, memory confirmed free, only then stopped."""

    replica: ReplicaId
    why: str
    grace_s: float = 10.0


@attrs.frozen
class RestartReplica:
    """Stop and start in place with a fresh count of attempts; also what brings a failed replica back."""

    replica: ReplicaId
    why: str


@attrs.frozen
class ForgetReplica:
    """Drop the record and the logs of a replica that has ended."""

    replica: ReplicaId


Order = StartReplica | StopReplica | RestartReplica | ForgetReplica


@attrs.frozen
class Command:
    """An order under a fencing token. A known `command_id` is answered with the stored result."""

    token: FencingToken
    command_id: CommandId
    generation: int
    order: Order


@attrs.frozen
class EngineSeen:
    """What the routers together see of a replica's engine, as `domain.endpoint.EndpointUse` has it.

    The agent judges by it engines without counters, and those that answer it no more.
    """

    token: FencingToken
    replica: ReplicaId
    in_flight: int
    silent_s: float
    answers: int
    failures: int
    unanswered: int = 0
    heard_s: float | None = None


@attrs.frozen
class ControlPlanes:
    """Control planes' addresses, for whoever obeys the sender to keep on disk and dial too. `whole`: there are no others."""

    urls: tuple[str, ...]
    whole: bool = False


@attrs.frozen
class LogRequest:
    """Read a part of a replica's log. `attempt` 0: the newest. `offset` below 0 counts from the end."""

    request_id: str
    replica: ReplicaId
    attempt: int = 0
    offset: int = -65536
    limit: int = 65536


@attrs.frozen
class Goodbye:
    """Why the sender ends the session. `final`: dialling again will not help until a person changed something."""

    code: str
    text: str
    final: bool = False


FromAgent = AgentHello | Inventory | Heartbeat | ReplicaChanged | ReplicaForgotten | CommandResult | AgentEvent | LogChunk | Goodbye
ToAgent = ServerHello | LeaderHello | Command | EngineSeen | ControlPlanes | LogRequest | Goodbye
Message = FromAgent | ToAgent | FromRouter | ToRouter  # everything that a channel carries; routers' are in `router_messages`
