"""Versions of the cluster settings: one of them, what each control plane makes of it, and how far a roll-out has come.

Values only. A version is never changed and never removed; which of them is wanted is the newest that is not held.
"""

from __future__ import annotations

import enum

import attrs


@attrs.frozen
class SettingsVersion:
    """One version as it is stored. `document` is TOML in the one form that `settings.document` writes, `sha256` that text's.

    `parent` is the version that was edited, 0 for the first.
    """

    version: int
    parent: int
    document: str
    sha256: str
    author: str = ""
    reason: str = ""
    created_wall_s: float = 0.0


@attrs.frozen
class PlaneSettings:
    """What one control plane says of itself.

    `live`: the version whose live keys are in force; `applied`: the one that is in force as a whole; both 0 where none is known.
    `pending`: a version that loads there and waits for that process to restart, 0 for none. `restart_for_file`: its own file has
    changed, loads, and wants a restart as well. `refused`: the newest version that does not load there or was put aside, with
    `why`. `up_s`: for how long the process has served. `started`: the version that it started with, 0 where it does not say; what
    was taken live since took no start.
    """

    live: int = 0
    applied: int = 0
    pending: int = 0
    restart_for_file: bool = False
    refused: int = 0
    why: str = ""
    up_s: float = 0.0
    started: int = 0


@attrs.frozen
class Applied:
    """What the leader last heard of one control plane, kept beside the versions. `address` is where it is reached, `name` for people."""

    address: str
    name: str
    settings: PlaneSettings
    at_wall_s: float


class RolloutPhase(enum.Enum):
    """Where a roll-out stands: nowhere, at a standby, between two leaders, at the one that led before, or stopped."""

    IDLE = "idle"
    STANDBY = "standby"
    HANDING_OVER = "handing_over"
    PROVING = "proving"
    LEADER = "leader"
    FROZEN = "frozen"


@attrs.frozen
class Held:
    """A version that nobody may run, and why."""

    version: int
    why: str


@attrs.frozen
class RolloutRow:
    """The one row of the store that a roll-out is kept in, so that whoever leads goes on with it.

    `version` is rolled out to `members` (addresses); `token` is the address of the one that may be down now, "" for none.
    `led` is who led when it began: it restarts last. `held` is sorted by version. `reason` is for people. `done`: who came back
    with the version since it began. `for_file`: the token is for a changed file, and for no version. `proven`: the newest
    version that a control plane has led with for long enough, 0 for none; `successor`: who leads now to prove `proving`, "" for
    nobody. `given`: the epoch in which the token was given. `released`: the one in which a leader last let go of the lease for it,
    `tries`: how often one has.
    """

    phase: RolloutPhase = RolloutPhase.IDLE
    version: int = 0
    members: tuple[str, ...] = ()
    token: str = ""
    led: str = ""
    held: tuple[Held, ...] = ()
    reason: str = ""
    done: tuple[str, ...] = ()
    for_file: bool = False
    proven: int = 0
    successor: str = ""
    proving: int = 0
    given: int = 0
    released: int = 0
    tries: int = 0

    def is_held(self, version: int) -> bool:
        return any(held.version == version for held in self.held)


@attrs.frozen
class Pause:
    """`ctl pause`: roll-outs, moves and scaling stand still until somebody resumes."""

    reason: str
    author: str
    since_wall_s: float
