"""No acknowledged change is lost, and none is carried out twice; and the comparison that says so notices where a rule is missing.

The rules are taken out of the product's own modules by `altered`, in real processes, and the schedule is forced: a leader that stops
itself just before a change's transaction, or is killed between its answer and its commit.
"""

from __future__ import annotations

import contextlib
import http.client
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from llmgw.lease.outage import FIRST
from tests.chaos.planes import FULL, Pair, Plane, figure, since
from tests.chaos.writer import Writer, lost_or_doubled
from tests.programs import call, wait_for

pytestmark = pytest.mark.slow

TTL_S = 5.0 if FULL else 3.0
SHORT = f"[lease]\nttl_s = {TTL_S}\nrenew_s = {TTL_S / 4}\npoll_s = {1.0 if FULL else 0.25}"
LONG = "[lease]\nttl_s = 30\nrenew_s = 1\npoll_s = 0.25"
CHANGES = 20


@pytest.fixture
def altered_pair(tmp_path: Path) -> Iterator[Callable[..., Pair]]:
    """Makes the test's pair of two that are altered so, and starts it. FILE of a change is one for each, `switch` of it."""
    made: list[Pair] = []

    def make(lease: str, *changes: str) -> Pair:
        pair = Pair(tmp_path / "pair", lease)
        made.append(pair)
        for plane in pair.planes:
            plane.altered = [change.replace("FILE", str(switch(plane))) for change in changes]
        pair.start()
        return pair

    yield make
    for pair in made:
        pair.close()


def switch(plane: Plane) -> Path:
    """The file that turns on what is altered of it."""
    return plane.folder / f"{plane.name}.switch"


class Order(threading.Thread):
    """An order that blindly sets how many replicas a model has: to as many as it has.

    `answer` is (status, body) at its end, and status 0 when none came.
    """

    def __init__(self, plane: Plane, model: str) -> None:
        super().__init__()
        self.plane, self.model = plane, model
        self.answer: tuple[int, Any] = (0, None)
        self.start()

    def run(self) -> None:
        headers = {"authorization": f"Bearer {self.plane.token}"}
        with contextlib.suppress(OSError, http.client.HTTPException):
            self.answer = call(f"127.0.0.1:{self.plane.port}", "POST", f"/api/v1/models/{self.model}/scale", {"count": 0}, headers, 120)


def frozen_in_mid_write(pair: Pair) -> tuple[Writer, float, tuple[int, Any]]:
    """The leader is frozen between its right to write and its transaction; another leads and changes the same model; it wakes up.

    Returns (the writer, seconds until the other was CONFIRMED, what the order was answered in which the leader was frozen).
    """
    leader, _ = pair.wait_agreed()
    (other,) = [plane for plane in pair.planes if plane is not leader]
    writer = Writer("w", [leader], 1)
    for _ in range(CHANGES):
        writer.change()
    model, before = max(writer.rows.items())
    process = psutil.Process(leader.program.process.pid)
    switch(leader).touch()
    order = Order(leader, model)
    try:
        wait_for(lambda: process.status() == psutil.STATUS_STOPPED, "the leader is frozen")
        begun_s = time.monotonic()
        wait_for(other.confirmed, "the other one leads")
        took_s = since(begun_s)
        writer.planes = [other]
        while writer.rows.get(model) == before and not writer.wrong:
            writer.change()
    finally:
        process.send_signal(signal.SIGCONT)
    order.join(120)
    wait_for(lambda: (leader.leader() or {}).get("is_me") is False, "the one that was frozen stands by")
    writer.planes = pair.planes
    for _ in range(CHANGES):
        writer.change()
    return writer, took_s, order.answer


@pytest.mark.parametrize("without", [(), ("no-epoch-check",)], ids=["as-shipped", "no-epoch-check"])
def test_a_leader_that_was_frozen_in_mid_write_undoes_nothing_that_was_acknowledged_meanwhile(
    altered_pair: Callable[..., Pair], request: pytest.FixtureRequest, without: Sequence[str]
) -> None:
    pair = altered_pair(SHORT, "freezes-before-a-change=FILE", *without)
    writer, took_s, (status, answer) = frozen_in_mid_write(pair)
    found = lost_or_doubled(pair.store, [writer])
    if without:
        assert status == 200, answer
        assert found, "an acknowledged change was undone, and the comparison did not notice"
        figure(request, "the same, and no write compares its epoch: acknowledged changes lost or doubled", len(found))
    else:
        assert (status, answer["error"]["code"]) == (409, "stale_epoch")
        assert writer.wrong == []
        assert found == []
        figure(request, f"leader frozen in mid-write (SIGSTOP, ttl {TTL_S:g} s): other CONFIRMED after", f"{took_s:.2f} s")
        figure(request, "leader frozen in mid-write: acknowledged changes lost or doubled", f"0 of {len(writer.changes)}")


@pytest.mark.parametrize("early", [False, True], ids=["as-shipped", "answers-before-the-commit"])
def test_a_leader_that_is_killed_takes_no_answered_change_with_it(
    altered_pair: Callable[..., Pair], request: pytest.FixtureRequest, early: bool
) -> None:
    pair = altered_pair(LONG, "answers-before-the-commit=FILE")
    leader, _ = pair.wait_agreed()
    (other,) = [plane for plane in pair.planes if plane is not leader]
    writer = Writer("w", [leader], 1)
    for _ in range(CHANGES):
        writer.change()
    if early:
        switch(leader).touch()
    for _ in range(CHANGES):
        writer.change()
    assert writer.wrong == []
    leader.program.kill()
    wait_for(other.confirmed, "the other one leads")
    writer.planes = [other]
    for _ in range(CHANGES):
        writer.change()
    found = lost_or_doubled(pair.store, [writer])
    if early:
        assert found, "answered changes died with the leader, and the comparison did not notice"
        figure(request, "leader killed, and a write is answered before its commit: acknowledged changes lost or doubled", len(found))
    else:
        assert writer.wrong == []
        assert found == []


# What the other one says; of storage that fails it names the part that it met first.
FREEZES = {"freezes-in-a-renewal": FIRST.values(), "freezes-in-a-write": ["not ready to lead"]}


@pytest.mark.parametrize("freezes", FREEZES if FULL else list(FREEZES)[:1])
def test_a_leader_frozen_in_the_middle_of_a_transaction_keeps_its_file_until_it_wakes_or_is_killed(
    altered_pair: Callable[..., Pair], freezes: str
) -> None:
    """A frozen process keeps its lock on the file as well: nobody can write beside it, and nobody leads. Nothing is lost."""
    pair = altered_pair(SHORT, f"{freezes}=FILE")
    leader, _ = pair.wait_agreed()
    (other,) = [plane for plane in pair.planes if plane is not leader]
    process = psutil.Process(leader.program.process.pid)
    writer = Writer("w", [other], 1)
    for _ in range(CHANGES):
        writer.change()
    switch(leader).touch()
    order = Order(leader, max(writer.rows)) if freezes == "freezes-in-a-write" else None
    wait_for(lambda: process.status() == psutil.STATUS_STOPPED, "the leader is frozen")
    begun_s = time.monotonic()
    wait_for(lambda: any(other.log_of(line) for line in FREEZES[freezes]), "the other one says so")
    wait_for(lambda: since(begun_s) > 2 * TTL_S, "its lease would be over")
    assert not other.log_of("event=leading")
    process.kill()
    if order is not None:
        order.join(60)
        assert order.answer == (0, None)
    wait_for(other.confirmed, "the other one leads")
    for _ in range(CHANGES):
        writer.change()
    assert writer.wrong == []
    assert lost_or_doubled(pair.store, [writer]) == []
