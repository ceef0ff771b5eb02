"""What may happen to a leader of a replicated store, to its Litestream and to the object store, drawn at random from a seed."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import psutil

from tests.chaos.bucket import Bucket, children
from tests.chaos.planes import Plane, since
from tests.chaos.writer import Sender
from tests.programs import call, wait_for

TAKEN_OVER_S_MAX: Final = 120.0
FROZEN_S: Final = (0.2, 2.0)  # of what is frozen for a moment
DOWN_S: Final = (0.1, 4.0)  # of an object store that is gone while a leader is lost
HELD_S: Final = 0.3  # Litestream alone is frozen, or awake
AGAIN: Final = 4  # changes of each writer that must be acknowledged after a fault before the next one


class Faults:
    """`planes` are two control planes on `bucket`, one of which leads. `writers` go on meanwhile. `took_s` is how long each takeover
    took that began with a fault of that name."""

    def __init__(self, planes: Sequence[Plane], bucket: Bucket, writers: Sequence[Sender], seed: int) -> None:
        self.planes, self.bucket, self.writers, self.rng = planes, bucket, writers, random.Random(seed)
        self.took_s: dict[str, list[float]] = {}
        self.done: list[str] = []
        self._deck: list[Callable[[Plane], None]] = []
        self._after = planes[0]  # who is to lead
        self._begun_s = self._took_s = 0.0

    # --- takeovers

    def failover(self) -> None:
        """One, by a way that was not taken since all the others were; perhaps with something else just before it."""
        if not self._deck:
            self._deck = [getattr(self, name) for name in FAILOVERS]
            self.rng.shuffle(self._deck)
        self.take_over(self._deck.pop())

    def take_over(self, act: Callable[[Plane], None]) -> None:
        name = act.__name__
        before = self.leader()
        epoch = (before.leader() or {}).get("epoch", 0)
        self.done.append(f"{name} of {before.name} in epoch {epoch}")
        self._after = self.other(before)
        self._begun_s = time.monotonic()
        act(before)
        self.took_s.setdefault(name, []).append(self._took_s)
        assert (self._after.leader() or {}).get("epoch", epoch + 1) > epoch
        self.wait_written()

    def _wait_taken_over(self) -> None:
        wait_for(self._after.confirmed, f"{self._after.name} is confirmed, after {self.done[-1]}", TAKEN_OVER_S_MAX)
        self._took_s = since(self._begun_s)

    def _start(self, plane: Plane) -> None:
        plane.start()
        plane.wait_serving()

    def kill(self, leader: Plane) -> None:
        """SIGKILL; its Litestream goes with it. Nobody says so: the lease is waited out."""
        leader.program.kill()
        self._wait_taken_over()
        self._start(leader)

    def kill_as_a_unit(self, leader: Plane) -> None:
        """SIGKILL, and what systemd then runs of the unit."""
        leader.program.kill()
        release_lease(leader)
        self._wait_taken_over()
        self._start(leader)

    def hand_over(self, leader: Plane) -> None:
        wait_for(lambda: self._hands_over(leader), "it hands over")
        self._wait_taken_over()

    def _hands_over(self, leader: Plane) -> bool:
        """Not before it has heard of a successor that is well."""
        self._begun_s = time.monotonic()
        headers = {"authorization": f"Bearer {leader.token}"}
        status, answer = call(f"127.0.0.1:{leader.port}", "POST", "/api/v1/leader/hand-over", {}, headers)
        assert status == 202 or answer["error"]["code"] == "lone_control_plane", answer
        return status == 202

    def end(self, leader: Plane) -> None:
        """SIGTERM."""
        leader.program.end()
        self._wait_taken_over()
        self._start(leader)

    def freeze(self, leader: Plane) -> None:
        """SIGSTOP of the process alone, until another leads."""
        with frozen(leader.program.process.pid):
            self._wait_taken_over()
        self._wait_standing_by(leader)

    def freeze_machine(self, leader: Plane) -> None:
        """Its Litestream first, in the middle of a write, and awake first as well: it uploads before its leader is told anything."""
        (child,) = child_of(leader)
        with contextlib.ExitStack() as process:
            with frozen(child.pid):
                pass_time(HELD_S)  # nothing becomes durable now: before long a write waits for that
                process.enter_context(frozen(leader.program.process.pid))
                self._begun_s = time.monotonic()
                self._wait_taken_over()
            pass_time(HELD_S)
        self._wait_standing_by(leader)

    def kill_child_and_then_it(self, leader: Plane) -> None:
        for child in child_of(leader):
            child.kill()
        pass_time(self.rng.uniform(0.0, 0.3))
        self._begun_s = time.monotonic()
        self.kill(leader)

    def kill_while_the_store_is_frozen(self, leader: Plane) -> None:
        self.bucket.server.freeze()
        try:
            pass_time(self.rng.uniform(0.0, 0.3))
            leader.program.kill()
            pass_time(self.rng.uniform(*DOWN_S))
        finally:
            self.bucket.server.thaw()
        self._wait_taken_over()
        self._start(leader)

    def kill_while_the_store_is_dead(self, leader: Plane) -> None:
        self.bucket.server.kill()
        try:
            pass_time(self.rng.uniform(0.0, 0.3))
            leader.program.kill()
            pass_time(self.rng.uniform(*DOWN_S))
        finally:
            self.bucket.server.start()
        self._wait_taken_over()
        self._start(leader)

    # --- what is no reason to change roles

    def blip(self) -> None:
        """Something that the leader survives; whoever leads afterwards, writes go on."""
        name = self.rng.choice(BLIPS)
        self.done.append(name)
        getattr(self, name)()
        self.wait_written()

    def kill_child(self) -> None:
        for child in child_of(self.leader()):
            child.kill()

    def freeze_child(self) -> None:
        for child in child_of(self.leader()):
            with frozen(child.pid):
                pass_time(self.rng.uniform(*FROZEN_S))

    def freeze_store(self) -> None:
        self.bucket.server.freeze()
        try:
            pass_time(self.rng.uniform(*FROZEN_S))
        finally:
            self.bucket.server.thaw()

    def kill_store(self) -> None:
        self.bucket.server.kill()
        pass_time(self.rng.uniform(*DOWN_S))
        self.bucket.server.start()

    # --- states

    def leader(self) -> Plane:
        def found() -> Plane | None:
            leading = [plane for plane in self.planes if plane.confirmed()]
            return leading[0] if len(leading) == 1 else None

        return wait_for(found, f"exactly one leads, after {self.done[-1:]}", TAKEN_OVER_S_MAX)

    def other(self, plane: Plane) -> Plane:
        (other,) = [one for one in self.planes if one is not plane]
        return other

    def wait_written(self) -> None:
        """Each writer has had changes acknowledged since, or one of them has met what must not be."""
        upto = [(writer, writer.acknowledged + AGAIN) for writer in self.writers]
        wait_for(
            lambda: all(writer.acknowledged >= count for writer, count in upto) or any(writer.wrong for writer in self.writers),
            f"writes are acknowledged again, after {self.done[-1]}",
            TAKEN_OVER_S_MAX,
        )

    def _wait_standing_by(self, plane: Plane) -> None:
        wait_for(lambda: (plane.leader() or {}).get("is_me") is False, f"{plane.name} stands by")


def release_lease(dead: Plane) -> None:
    """What the unit of a process that has died runs."""
    args = [sys.executable, "-m", "llmgw", "lease", "release", "--if-owner-file", str(dead.data_dir / "owner.json")]
    done = subprocess.run(args, env={**os.environ, **dead.environ}, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def child_of(plane: Plane) -> list[psutil.Process]:
    """Its Litestream, once it runs."""
    return wait_for(lambda: children(plane), f"Litestream of {plane.name} runs")


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    """SIGSTOP, and SIGCONT at the end."""
    process = psutil.Process(pid)
    process.suspend()
    try:
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()


def pass_time(for_s: float) -> None:
    """Where there is no state to wait for."""
    begun_s = time.monotonic()
    wait_for(lambda: since(begun_s) >= for_s, "time passes")


FAILOVERS: Final = (
    "kill",
    "kill_as_a_unit",
    "hand_over",
    "end",
    "freeze",
    "freeze_machine",
    "kill_child_and_then_it",
    "kill_while_the_store_is_frozen",
    "kill_while_the_store_is_dead",
)
BLIPS: Final = ("kill_child", "freeze_child", "freeze_store", "kill_store")
