"""One running copy of a model: the order that starts it, the states it moves through, and what its agent reports."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import attrs

from llmgw.domain.ids import DeviceId, ReplicaId
from llmgw.domain.model import ModelKind, Profile
from llmgw.domain.placed import Placement


class ReplicaState(enum.Enum):
    PENDING = "pending"  # asked for, not yet placed or not yet heard of
    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"
    LOST = "lost"  # its node is silent


_S = ReplicaState
# The only moves (control.md 6). starting -> starting is a restart in place; failed -> starting only by a new command.
# A stop may come in any state that is not over, so starting, loading and failed may drain too.
MOVES: Final[Mapping[ReplicaState, frozenset[ReplicaState]]] = MappingProxyType(
    {
        _S.PENDING: frozenset({_S.STARTING, _S.STOPPED, _S.LOST}),
        _S.STARTING: frozenset({_S.STARTING, _S.LOADING, _S.DRAINING, _S.FAILED, _S.LOST}),
        _S.LOADING: frozenset({_S.STARTING, _S.READY, _S.DRAINING, _S.FAILED, _S.LOST}),
        _S.READY: frozenset({_S.STARTING, _S.DRAINING, _S.FAILED, _S.LOST}),
        _S.DRAINING: frozenset({_S.STOPPED, _S.LOST}),
        _S.STOPPED: frozenset({_S.LOST}),
        _S.FAILED: frozenset({_S.STARTING, _S.DRAINING, _S.STOPPED, _S.LOST}),
        _S.LOST: frozenset({_S.READY, _S.STOPPED}),
    }
)


def may_move(before: ReplicaState, after: ReplicaState) -> bool:
    """Is this one of the legal moves? An agent's inventory may also bring a lost replica back in the state it is in."""
    return after in MOVES[before]


@attrs.frozen
class RestartPolicy:
    """How an agent restarts a crashed engine in place: seconds before each attempt (the last repeats), and the attempts in all.

    The first start counts as an attempt; being ready for `reset_after_s` sets the count back.
    """

    backoff_s: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
    attempts: int = 6
    reset_after_s: float = 600.0

    def delay_s(self, attempt: int) -> float:
        """Seconds to wait before attempt number `attempt` (the first is 1 and does not wait)."""
        if attempt <= 1 or not self.backoff_s:
            return 0.0
        return self.backoff_s[min(attempt - 2, len(self.backoff_s) - 1)]


@attrs.frozen
class ReplicaOrder:
    """Everything an agent needs to start a replica. It names everything: whoever carries it out picks nothing.

    `names` are all the names a client may use, the model's own first. `generation` is the catalog's when the order was
    made. `memory_mib` is what placement promised on each device. Limits are seconds. `placement` says why it is to stand here.
    """

    id: ReplicaId
    model: str
    names: tuple[str, ...]
    kind: ModelKind
    profile: Profile
    devices: tuple[DeviceId, ...]
    port: int
    memory_mib: int
    generation: int = 0
    restart: RestartPolicy = RestartPolicy()
    engine_command: tuple[str, ...] = ()  # where the engine is ([engines.<name>] command); empty: the engine's own default
    load_limit_s: float = 1800.0
    progress_limit_s: float = 60.0
    stop_grace_s: float = 10.0
    placement: Placement = Placement()


@attrs.frozen
class ReplicaReport:
    """What an agent says of one of its replicas.

    `age_s` is how long it has been in this state. `url` has no trailing slash and is empty before the engine has a port.
    `key` is the engine's own secret, which routers present. `running` is what the engine itself counts as in flight (None:
    it does not tell). `exit_code` None with state FAILED: unknown (adopted). `log_tail` holds the last lines after a failure. `tries`
    counts attempts in a row, of `order.restart.attempts`; `failure` is how the one before ended, with its last line of output, and
    empty for the first and once it is ready.
    """

    order: ReplicaOrder
    state: ReplicaState
    reason: str = ""
    age_s: float = 0.0
    attempt: int = 1
    pid: int = 0
    url: str = ""
    key: str = attrs.field(default="", repr=False)
    running: int | None = None
    memory_mib: int = 0  # measured, of the whole process tree
    exit_code: int | None = None
    log_tail: tuple[str, ...] = ()
    in_rotation: bool = True  # False while ready but stalled or failing: routers must not choose it
    tries: int = 1
    failure: str = ""

    @property
    def trouble(self) -> str:
        """For people: which attempt this is and how the one before ended; empty where none has failed."""
        return f"attempt {self.tries} of {self.order.restart.attempts}, the one before: {self.failure}" if self.failure else ""
