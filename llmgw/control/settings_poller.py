"""Watches the store's document and this machine's file, each second, and puts in force what loads here.

A change is parsed and checked, loaded in a process of its own where it takes a restart, and only then applied: live keys at
once, by swapping one reference; the rest when `control.restart` says that it is this process's turn. What does not load here
is not applied here, and said so. Decides nothing about other control planes.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

import structlog
import trio

from llmgw.control import rollout, settings_boot
from llmgw.control.settings_in_force import PROTECT, Protect, Read, SettingsInForce
from llmgw.domain.errors import Invalid, LlmgwError, NotFound, Unavailable
from llmgw.domain.files import reason, words
from llmgw.domain.ports import Machine
from llmgw.domain.settings_version import Pause, RolloutRow, SettingsVersion
from llmgw.protocol.waiting import wait_woken
from llmgw.settings.layers import ignored, layers
from llmgw.settings.load import HALF_WRITTEN, Loaded
from llmgw.store import settings as rows
from llmgw.store.connection import Store

POLL_S: Final = 1.0  # control.md 4: each control plane looks every second
EARLY_S: Final = 0.1  # a timer may be so much early
AGAIN_S: Final = 30.0  # a version that did not load is tried again so often: a token's or a certificate's file may be mended
TRIED_MAX: Final = 8  # documents whose dry load is remembered; more than one only while a held one is left for an older
PAGE: Final = 50  # versions that are read at once in search of one to start with
DryLoad = Callable[[bytes, str], Awaitable[str]]
log = structlog.get_logger("llmgw.settings")


class FileWatch:
    """Tells when a file has changed. It counts when it hashes the same twice and is not empty: a half-written one is never read."""

    def __init__(self, machine: Machine, path: Path, in_force: bytes | None = None, sha256: str = "", protect: Protect = PROTECT) -> None:
        """`in_force`: the text that was read already, or its `sha256`; neither: what is there now."""
        self._machine = machine
        self._protect = protect
        self.path = path
        self.missing = ""  # why there was nothing to read at the last look
        self._in_force = (_digest(in_force) if in_force is not None else sha256) or self._read()[0]
        self._before = self._in_force
        self._read_s = machine.now_s()

    def changed(self) -> bytes | None:
        """The new text, once; None while it is the old one, or not whole yet. Asked more often it looks every POLL_S all the same."""
        if (now_s := self._machine.now_s()) - self._read_s < POLL_S - EARLY_S:
            return None
        self._read_s = now_s
        now, data = self._read()
        stable, self._before = now == self._before, now
        if now is None or now == self._in_force or not (stable or not self._protect.read_twice):
            return None
        self._in_force = now
        return data

    def _read(self) -> tuple[str | None, bytes]:
        try:
            data = self._machine.disk.read(self.path)
        except OSError as err:
            self.missing = f"cannot be read: {reason(err)}"
            return None, b""
        if not data:
            self.missing = "is not there, or is a link to what is not" if data is None else "is empty"
            return None, b""
        self.missing = ""
        return _digest(data), data


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


async def poll_file(
    machine: Machine, path: Path, load: Callable[[bytes], Loaded], apply: Callable[[Loaded], None], refused: Callable[[str], None]
) -> None:
    """For a process that has no other settings than its file's. Until cancelled; `load` raises LlmgwError with every fault;
    `refused` is told why a changed file was not taken."""
    watch = FileWatch(machine, path)
    while True:
        await machine.sleep_until(machine.now_s() + POLL_S)
        if (data := watch.changed()) is None:
            continue
        try:
            loaded = load(data)
            apply(loaded)
        except (LlmgwError, OSError) as err:
            fault = words(err) if isinstance(err, OSError) else str(err)
            log.error("the changed file was not taken; what was in force stays", file=str(path), fault=fault)
            refused(fault)
        else:
            log.info("the changed file is in force", file=str(path), models=len(loaded.catalog.models))


class SettingsPoller:
    """`apply()` swaps what the process acts on after `in_force` has changed; `apply_objects(file)` what the file holds beside
    settings. `dry_load(file, document)` tries both in a process of its own and says why they do not load, "" when they do.
    `told(kind, text)` is for the history; `reloading()` stands around each change, for a supervisor. `store` None: the file is all
    there is.
    """

    def __init__(
        self,
        machine: Machine,
        in_force: SettingsInForce,
        *,
        folder: Path,
        store: Store | None,
        load: Callable[[bytes], Loaded],
        dry_load: DryLoad,
        apply: Callable[[], None],
        apply_objects: Callable[[Loaded], None],
        told: Callable[[str, str], None],
        reloading: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self._machine = machine
        self._in_force = in_force
        self._folder = folder
        self._store = store
        self._load = load
        self._dry_load = dry_load
        self._apply = apply
        self._apply_objects = apply_objects
        self._told = told
        self._reloading = reloading
        self._wake = trio.Event()
        self._looking = trio.Lock()
        self._file_text = b""
        self._watch: FileWatch | None = None
        if in_force.file.path is not None:
            # By what the process has read, not by what is there now: it may have been edited since, while the process was starting.
            self._watch = FileWatch(machine, in_force.file.path, sha256=in_force.file.sha256, protect=in_force.protect)
            self._file_text = self._watch_text()
        self._marks = settings_boot.load_marks(machine.disk, folder)
        self._cached: SettingsVersion | None = None
        self._began_s = machine.now_s()
        self._proven = False
        self._gone = ""  # what was told of a file that there is not, or that is empty
        self.file_fault = ""  # why the file as it stands does not load: a process that starts anew would not come up
        self._seen: tuple[int, str, str] | None = None  # the version, the file and its fault that were judged last
        self._judged_s = 0.0  # when
        self._bad_text, self._bad_s = b"", 0.0  # the text of a changed file that did not load, and when it was tried last
        self._loads: dict[tuple[str, str], str] = {}  # what a dry load said, by file and document
        self._silent = False
        self._said_of = ""  # the SHA-256 of the file that was warned of last
        self.newest = in_force.live
        self.row = RolloutRow()
        self.pause: Pause | None = None
        self.looked = trio.Event()  # replaced at each look

    def nudge(self) -> None:
        """There may be something new: look now."""
        self._wake.set()

    async def run(self) -> None:
        """Until cancelled."""
        self.warn_of_ignored()
        while True:
            await self.look()
            await self._remember()
            await wait_woken(self._machine, self._wake, self._machine.now_s() + POLL_S)
            self._wake = trio.Event()

    async def _remember(self) -> None:
        """What runs here is kept on this machine's disk; and what has run for long enough is not put aside here for a later end."""
        read = self._in_force.read
        if read is not None and read.version != self._cached:
            self._cached = read.version
            await self._machine.run_sync(lambda: settings_boot.save_cached(self._machine.disk, self._folder, read.version))
        applied = self._in_force.applied
        if not applied:
            return
        if applied != self._in_force.started_with or self._machine.now_s() - self._began_s < settings_boot.PROVEN_S:
            return
        if not self._proven:
            # Read anew, and written before anything else runs: this process may have been told meanwhile what comes after it.
            self._marks = settings_boot.load_marks(self._machine.disk, self._folder).prove(applied)
            settings_boot.save_marks(self._machine.disk, self._folder, self._marks)
            self._proven = True

    async def look_now(self) -> None:
        """What the store holds is in force here when this returns, as far as nothing has to be tried first: that follows."""
        await self.look(quick=True)
        self.nudge()

    async def look(self, *, quick: bool = False) -> None:
        """One look at the file and at the store. Raises nothing that either of them says. `quick`: tries nothing, which takes seconds."""
        async with self._looking:
            if not quick:
                await self._look_at_file()
            if self._store is not None:
                try:
                    await self._look_at_store(self._store, quick)
                except Unavailable as err:
                    if not self._silent:
                        log.debug("the settings cannot be read; what is in force stays", why=err.message)
                    self._silent = True
                else:
                    self._silent = False
            self.looked.set()
            self.looked = trio.Event()

    # --- the document

    async def _look_at_store(self, store: Store, quick: bool) -> None:
        head, self.row, self.pause = await rows.head(store)
        if head is None:
            return  # absent is not empty: what is in force stays
        self.newest = head[0]
        number = self.desired
        # A version that is held is left also for an older one than is desired, where that does not load here.
        while number and await self._refuses(store, number, quick) and self.row.is_held(self._in_force.live):
            number = self._newest_free(number - 1)

    async def _refuses(self, store: Store, number: int, quick: bool) -> bool:
        """Takes that version unless it is in force or waits already. True where it does not load here."""
        in_force = self._in_force
        if number == in_force.live and (number in (in_force.applied, in_force.pending)):
            return False
        seen, now_s = (number, _digest(self._file_text), self.file_fault), self._machine.now_s()
        if seen == self._seen and in_force.refused == number:
            if now_s - self._judged_s < AGAIN_S:
                return True
            self._loads.clear()  # what was missing on this machine may be there now
        self._seen, self._judged_s = seen, now_s
        if why := self._marks.aside(number):
            self._refuse(number, why)
            return True
        version = await rows.version(store, number)
        try:
            read = in_force.reads(version)
        except Invalid as err:
            if err.code == "damaged_version":
                self._seen = None  # a row, or a disk, may be mended
            self._refuse(number, err.message)
            return True
        waits = in_force.restart_keys(read.settings)
        if quick and waits and in_force.restarts:
            self._seen = None
            return False
        tried = waits and in_force.restarts and in_force.protect.only_loadable
        if tried and (why := self.file_fault or await self._try(read.document.text)):
            self._refuse(number, why)
            return True
        self.take(read, waits)
        return False

    @property
    def desired(self) -> int:
        """The version that is wanted here: by the newest and the holds as they are known in this very moment."""
        return self._newest_free(self.newest)

    def _newest_free(self, newest: int) -> int:
        """The newest version that is not held, from `newest` down; 0 for none."""
        return rollout.desired_version(newest, [held.version for held in self.row.held])

    def take(self, read: Read, waits: tuple[str, ...] = ()) -> None:
        """Its live keys are in force when this returns."""
        number = read.version.version
        before = self._in_force.live
        self._in_force.take(read)
        if number != before:
            with self._reloading():
                self._apply()
            if waits and self._in_force.restarts:
                log.info("settings are in force as far as they can be; the rest waits for a restart", version=number, keys=list(waits))
            elif waits:
                log.warning("keys of the settings take effect at the next start", version=number, keys=list(waits))
            else:
                log.info("settings are in force", version=number)
            self.warn_of_ignored()

    def _refuse(self, number: int, why: str) -> None:
        if self._in_force.refused != number or self._in_force.why != why:
            log.error("a settings version is not taken here; what was in force stays", version=number, why=why)
            self._told("settings.refused", f"version {number} is not taken here: {why}")
        self._in_force.refuse(number, why)

    async def _try(self, document: str) -> str:
        key = (_digest(self._file_text), document)
        if key not in self._loads:
            if len(self._loads) >= TRIED_MAX:
                self._loads.clear()
            self._loads[key] = await self._dry_load(self._file_text, document)
        return self._loads[key]

    def warn_of_ignored(self) -> None:
        """Once for each text of the file: what it says in vain, and where the document says something else."""
        keys = ignored(self._in_force.file, self._in_force.document)
        if not keys or self._in_force.file.sha256 == self._said_of:
            return
        self._said_of = self._in_force.file.sha256
        others = [one.path for one in layers(self._in_force.file, self._in_force.document) if one.in_vain not in (None, one.value)]
        log.warning(
            "cluster keys of the file have no effect: the store holds them; `llmgw ctl config` changes them",
            file=self._in_force.file.source,
            keys=", ".join(keys),
            **({"differ": ", ".join(others)} if others else {}),
        )

    # --- the file

    def _watch_text(self) -> bytes:
        assert self._watch is not None
        try:
            return self._machine.disk.read(self._watch.path) or b""
        except OSError:
            return b""

    async def _look_at_file(self) -> None:
        if self._watch is None:
            return
        file = str(self._watch.path)
        if (data := self._watch.changed()) is None:
            self._look_whether_it_is_there(file)
            again = self._bad_text and not self._watch.missing and self._machine.now_s() - self._bad_s >= AGAIN_S
            if not again:
                return
            data = self._bad_text
            self._loads.clear()
        try:
            loaded = self._load(data)
            if loaded.sets_nothing and not self._in_force.file.sets_nothing:
                raise Invalid(HALF_WRITTEN)
            self._check_same_store(loaded)
            before, self._file_text = self._file_text, data
            document = self._in_force.document
            waits = self._in_force.would_wait(loaded)
            if waits and self._in_force.restarts and (why := await self._try(document.text if document is not None else "")):
                self._file_text = before
                raise Invalid(why)
        except LlmgwError as err:
            fault = f"{file} as it stands does not load: {err}"
            self._bad_text, self._bad_s = data, self._machine.now_s()
            if self.file_fault != fault:
                log.error("the changed file was not taken; what was in force stays", file=file, fault=str(err))
                self._told("settings.refused", f"{file} was changed and does not load: {err}")
            self.file_fault = fault
            self._in_force.stay(self.file_fault)
            return
        self.file_fault, self._bad_text = "", b""
        waits = self._in_force.take_file(loaded)
        with self._reloading():
            self._apply_objects(loaded)
            self._apply()
        for warning in loaded.warnings:
            log.warning(warning, file=file)
        log.info("the changed file is in force", file=file, models=len(loaded.catalog.models))
        if waits:
            how = "take effect with a restart, which follows" if self._in_force.restarts else "take effect at the next start"
            log.warning(f"machine keys have changed; they {how}", file=file, keys=", ".join(waits))
        self.warn_of_ignored()

    def _look_whether_it_is_there(self, file: str) -> None:
        """Without its file, or with an empty one, this process could not start again: it says so, and restarts for nothing."""
        assert self._watch is not None
        missing = self._watch.missing
        gone = f"{file} {missing}"
        if missing and self._file_text and self.file_fault != gone:
            self.file_fault = self._gone = gone
            log.error("the file cannot be used; what was in force stays", file=file, why=f"it {missing}")
            self._told("settings.refused", gone)
            self._in_force.stay(gone)
        elif not missing and self._gone and self.file_fault == self._gone:
            self.file_fault = self._gone = ""
            log.info("the file is there again", file=file)

    def _check_same_store(self, file: Loaded) -> None:
        """A running control plane does not become another cluster's. Raises Invalid."""
        if file.settings.store != self._in_force.started.store:
            raise Invalid(
                "[store] differs from the one that this control plane runs on; stop it, and start it on the other one by hand",
                param="store",
            )


async def boot(machine: Machine, store: Store, folder: Path, file: Loaded) -> settings_boot.Boot:
    """What this control plane starts with: see `settings_boot`. Without an answer of the store, by what was last in force here."""
    marks = settings_boot.load_marks(machine.disk, folder)
    try:
        row = await rows.load_rollout(store)
        found: list[SettingsVersion] = []
        for number in {marks.told, marks.proven, row.proven} - {0}:
            with contextlib.suppress(NotFound):  # another store's, or one that was put back
                found.append(await rows.version(store, number))
        before: int | None = None
        while page := await rows.history(store, PAGE, before):
            found += page
            chosen = settings_boot.choose(_newest_first(found), row, marks, file)
            if chosen.read is not None:
                return chosen
            before = page[-1].version
        return settings_boot.choose(_newest_first(found), row, marks, file)
    except Unavailable as err:
        cached = settings_boot.load_cached(machine.disk, folder)
        if cached is None:
            raise
        log.warning(
            "the store does not answer; starting with the settings that were in force last", version=cached.version, why=err.message
        )
        return settings_boot.choose((cached,), RolloutRow(), marks, file)


def _newest_first(versions: list[SettingsVersion]) -> tuple[SettingsVersion, ...]:
    return tuple(sorted(dict.fromkeys(versions), key=lambda version: -version.version))
