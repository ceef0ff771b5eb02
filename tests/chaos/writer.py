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


class Sender:
    """Sends each order with an Idempotency-Key, to whichever of `planes`, again and again until it is answered: with one token,
    because a key is its token's own. `wrong` is an answer that only a lost or a doubled change explains; `took_s` how long each
    acknowledged order took that was answered at once.
    """

    def __init__(self, name: str, planes: Sequence[Plane], seed: int) -> None:
        self.name, self.planes, self.rng, self.token = name, planes, random.Random(seed), planes[0].token
        self.again = 0
        self.wrong: list[Any] = []
        self.took_s: list[float] = []
        self._numbers = itertools.count()

    def change(self) -> None:
        """One more. Does nothing once anything went wrong."""
        raise NotImplementedError

    @property
    def acknowledged(self) -> int:
        """How many changes were."""
        raise NotImplementedError

    def _send(self, method: str, path: str, key: str, body: Any, headers: dict[str, str]) -> Any:
        headers = {**headers, "authorization": f"Bearer {self.token}", "idempotency-key": key}
        tries = 0
        while True:
            plane = self.rng.choice(self.planes)
            begun_s = time.monotonic()
            try:
                status, answer = call(f"127.0.0.1:{plane.port}", method, f"/api/v1{path}", body, headers)
            except (OSError, http.client.HTTPException) as err:  # it died before, or in the middle of, its answer
                status, answer = 0, str(err)
            if status in (200, 201):
                if not tries:
                    self.took_s.append(time.monotonic() - begun_s)
                return answer
            if status not in (0, 503):
                self.wrong.append((status, answer, method, path, key, headers))
                return None
            tries += 1
            self.again += 1
            time.sleep(0.02)


class Writer(Sender):
    """Changes models. Owns those whose names begin with `name`.

    `rows` is what must be in the store then, (revision, mark) by model; `changes` every acknowledged change as (model, revision).
    """

    def __init__(self, name: str, planes: Sequence[Plane], seed: int) -> None:
        super().__init__(name, planes, seed)
        self.rows: dict[str, tuple[int, str]] = {}
        self.changes: list[tuple[str, int]] = []

    @property
    def acknowledged(self) -> int:
        return len(self.changes)

    def change(self) -> None:
        if self.wrong:
            return
        mark = f"{self.name}-{next(self._numbers)}"
        known = sorted(self.rows)
        if known and self.rng.random() < 0.1:
            model = self.rng.choice(known)
            if self._send("DELETE", f"/models/{model}", mark, None, {"if-match": f'"{self.rows[model][0]}"'}):
                del self.rows[model]
            return
        model = self.rng.choice(known) if len(known) >= KEPT else mark
        expected = {"if-match": f'"{self.rows[model][0]}"'} if model in self.rows else {"if-none-match": "*"}
        table = {
            "replicas": {"min": 0, "max": 1, "count": 0},
            "profile": [{"name": "p", "engine": "command", "command": ["/bin/true", mark]}],
        }
        if answer := self._send("PUT", f"/models/{model}", mark, table, expected):
            self.rows[model] = (answer["revision"], mark)
            self.changes.append((model, answer["revision"]))


class SettingsWriter(Sender):
    """Writes version after version of the cluster's settings, each with a value that no other has. Nobody else writes any.

    `versions` is every acknowledged one, with its value.
    """

    KEY = "guard.max_messages"  # in force at once; no request of a test has as many

    def __init__(self, name: str, planes: Sequence[Plane], seed: int) -> None:
        super().__init__(name, planes, seed)
        self.began_with = int(planes[0].admin("GET", "/settings")["version"])
        self.versions: list[tuple[int, int]] = []

    @property
    def acknowledged(self) -> int:
        return len(self.versions)

    def change(self) -> None:
        if self.wrong:
            return
        value = 1000 + next(self._numbers)
        before = self.versions[-1][0] if self.versions else self.began_with
        body = {"set": {self.KEY: value}, "reason": f"{self.name}-{value}"}
        if answer := self._send("PATCH", "/settings", f"{self.name}-{value}", body, {"if-match": f'"{before}"'}):
            self.versions.append((int(answer["version"]), value))


class Writing(threading.Thread):
    """A writer that goes on until it is told to end, with `pause_s` between two changes."""

    def __init__(self, writer: Sender, pause_s: float = 0.0) -> None:
        super().__init__()
        self._writer = writer
        self._pause_s = pause_s
        self._end = threading.Event()
        self.start()

    def run(self) -> None:
        while not self._end.is_set() and not self._writer.wrong:
            self._writer.change()
            self._end.wait(self._pause_s)

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


def versions_lost_or_doubled(store: Path, writer: SettingsWriter) -> list[str]:
    """The same of the versions of the settings, which must be one line without a gap, each after the one that it was made from."""
    connection = apsw.Connection(str(store / "llmgw.db"), flags=apsw.SQLITE_OPEN_READWRITE)
    try:
        connection.set_busy_timeout(10_000)
        stored = list(connection.execute("SELECT version, parent, document, reason FROM cluster_settings ORDER BY version"))
    finally:
        connection.close()
    found = [f"version {version} was made from {parent}" for version, parent, _, _ in stored if parent != version - 1]
    numbers = [version for version, _, _, _ in stored]
    if numbers != list(range(1, len(numbers) + 1)):
        found.append(f"the versions are no line: {numbers}")
    said = {version: (document, reason) for version, _, document, reason in stored}
    reasons = [reason for _, _, _, reason in stored]
    for version, value in writer.versions:
        document, reason = said.get(version, ("", ""))
        if reason != f"{writer.name}-{value}" or f"max_messages = {value}" not in document:
            found.append(f"version {version} was acknowledged with {value} and is {reason!r}")
        if (times := reasons.count(f"{writer.name}-{value}")) != 1:
            found.append(f"the version with {value} was written {times} times")
    return found
