"""Acknowledged changes, remembered outside of llmgw, and how they are compared with what the store holds, row by row."""

from __future__ import annotations

import http.client
import itertools
import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import apsw

from tests.chaos.planes import Plane
from tests.programs import call

KEPT = 6  # models of one writer at a time


class Writer:
    """Changes models through either control plane and remembers what was acknowledged. Owns the models whose names begin with `name`.

    Each change has an Idempotency-Key and is sent again, to whichever of `planes`, until it is answered: with one token, because a
    key is its token's own. `rows` is what must be in the store then, (revision, mark) by model; `changes` every acknowledged
    change as (model, revision); `wrong` an answer that only a lost or a doubled change explains.
    """

    def __init__(self, name: str, planes: Sequence[Plane], seed: int) -> None:
        self.name, self.planes, self.rng, self.token = name, planes, random.Random(seed), planes[0].token
        self.rows: dict[str, tuple[int, str]] = {}
        self.changes: list[tuple[str, int]] = []
        self.again = 0
        self.wrong: list[Any] = []
        self._numbers = itertools.count()

    def change(self) -> None:
        """One more. Does nothing once anything went wrong."""
        if self.wrong:
            return
        mark = f"{self.name}-{next(self._numbers)}"
        known = sorted(self.rows)
        if known and self.rng.random() < 0.1:
            model = self.rng.choice(known)
            if self._send("DELETE", model, mark, None, {"if-match": f'"{self.rows[model][0]}"'}):
                del self.rows[model]
            return
        model = self.rng.choice(known) if len(known) >= KEPT else mark
        expected = {"if-match": f'"{self.rows[model][0]}"'} if model in self.rows else {"if-none-match": "*"}
        table = {
            "replicas": {"min": 0, "max": 1, "count": 0},
            "profile": [{"name": "p", "engine": "command", "command": ["/bin/true", mark]}],
        }
        if answer := self._send("PUT", model, mark, table, expected):
            self.rows[model] = (answer["revision"], mark)
            self.changes.append((model, answer["revision"]))

    def _send(self, method: str, model: str, key: str, table: Any, headers: dict[str, str]) -> Any:
        headers = {**headers, "authorization": f"Bearer {self.token}", "idempotency-key": key}
        while True:
            plane = self.rng.choice(self.planes)
            try:
                status, answer = call(f"127.0.0.1:{plane.port}", method, f"/api/v1/models/{model}", table, headers)
            except (OSError, http.client.HTTPException) as err:  # it died before, or in the middle of, its answer
                status, answer = 0, str(err)
            if status in (200, 201):
                return answer
            if status not in (0, 503):
                self.wrong.append((status, answer, method, model, key, headers))
                return None
            self.again += 1
            time.sleep(0.02)


class Writing(threading.Thread):
    """A writer that goes on until it is told to end."""

    def __init__(self, writer: Writer) -> None:
        super().__init__()
        self._writer = writer
        self._end = threading.Event()
        self.start()

    def run(self) -> None:
        while not self._end.is_set() and not self._writer.wrong:
            self._writer.change()

    def finish(self) -> None:
        self._end.set()
        self.join(120)
        assert not self.is_alive()


def lost_or_doubled(store: Path, writers: Sequence[Writer]) -> list[str]:
    """Where what was acknowledged and what the store in that folder holds differ, a line for each. Compares rows, and the audit."""
    connection = apsw.Connection(str(store / "llmgw.db"), flags=apsw.SQLITE_OPEN_READWRITE)
    try:
        connection.set_busy_timeout(10_000)
        rows = {name: (revision, spec) for name, revision, spec in connection.execute("SELECT name, revision, spec FROM models")}
        audit = list(connection.execute("SELECT object, new_revision FROM audit WHERE what = 'put'"))
    finally:
        connection.close()
    found = []
    for writer in writers:
        stored = {name: row for name, row in rows.items() if name.startswith(f"{writer.name}-")}
        for model in sorted({*stored, *writer.rows}):
            if model not in stored:
                found.append(f"{model} was acknowledged as {writer.rows[model]} and is not there")
            elif model not in writer.rows:
                found.append(f"{model} was removed and is there, as {stored[model]}")
            elif stored[model][0] != writer.rows[model][0] or f'"{writer.rows[model][1]}"' not in stored[model][1]:
                found.append(f"{model} was acknowledged as {writer.rows[model]} and is {stored[model]}")
        for model, revision in writer.changes:
            if (times := audit.count((f"model/{model}", revision))) != 1:
                found.append(f"the change of {model} to revision {revision} was carried out {times} times")
    return found
