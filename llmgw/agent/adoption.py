"""What an agent writes down of each replica, and whether a process that runs now is the one that was written down.

Identity is (boot, pid, start time) and the start token in the process's own environment: a number alone may belong to
anybody by now. Pure; the supervisor reads and writes the files.
"""

from __future__ import annotations

import json
from typing import Any, Final

import attrs

from llmgw.agent.lifecycle import Life, Want, ended
from llmgw.agent.processes import Identity
from llmgw.domain.errors import Invalid
from llmgw.domain.replica import ReplicaOrder, ReplicaState, RestartPolicy
from llmgw.protocol.codec import structure, unstructure

FORMAT: Final = 1  # raised when an older agent could no longer read it


@attrs.frozen
class Record:
    """One replica as its state file holds it. Times are seconds since the boot named by `boot_id`.

    `main` is the process of the newest attempt, None when it has ended and its tree is gone. `key` is the replica's secret.
    """

    boot_id: str
    order: ReplicaOrder
    life: Life
    key: str = attrs.field(repr=False)
    token: str = ""
    main: Identity | None = None
    grace_s: float = 10.0
    format: int = FORMAT


def encode(record: Record) -> bytes:
    return json.dumps(unstructure(record)).encode()


def decode(data: bytes) -> Record:
    """Raises `Invalid` with every fault."""
    try:
        raw: Any = json.loads(data)
    except (ValueError, RecursionError) as err:
        raise Invalid("not JSON") from err
    if isinstance(raw, dict) and raw.get("format") != FORMAT:
        raise Invalid(f"state of format {raw.get('format')!r}; this agent reads {FORMAT}")
    record: Record = structure(raw, Record)
    return record


@attrs.frozen
class Adopted:
    """The process lives and is the one that was written down."""

    main: Identity


@attrs.frozen
class Ended:
    """It is gone, and why we say so. Its children may live."""

    why: str


def adopt(record: Record, boot_id: str, alive: Identity | None, token: str) -> Adopted | Ended:
    """Is what runs under the recorded number ours? `alive` and `token` are what /proc says of that number now."""
    if record.main is None:
        return Ended("no process was running")
    if record.boot_id != boot_id:
        return Ended("the machine was restarted")
    if alive is None:
        return Ended("its process ended while the agent was away")
    if alive != record.main:
        return Ended(f"process {record.main.pid} is another program's now")
    if token != record.token:
        return Ended(f"process {record.main.pid} does not hold the start token of this replica")
    return Adopted(alive)


def rebased(record: Record, boot_id: str, now_s: float) -> Life:
    """The life with times of this boot. After a restart of the machine every clock begins anew."""
    if record.boot_id == boot_id:
        return record.life
    return attrs.evolve(record.life, since_s=now_s, start_at_s=now_s)


def away(life: Life, policy: RestartPolicy, why: str, now_s: float) -> Life:
    """The engine ended while no agent watched: an attempt like any other, with an unknown exit code."""
    if life.state not in (ReplicaState.LOADING, ReplicaState.READY):
        return life
    return ended(life, policy, why, None, now_s)


def wants_to_run(life: Life) -> bool:
    """Must something be done for it: a process tended, started or ended?"""
    return life.state not in (ReplicaState.STOPPED, ReplicaState.FAILED) or (
        life.want is Want.STOP and life.state is not ReplicaState.STOPPED
    )
