"""One control plane's settings, simulated: a machine with a file, a store with versions, and what was applied and told."""

from __future__ import annotations

from pathlib import Path

import attrs
import trio

from llmgw.control.event_log import EventLog
from llmgw.control.settings_in_force import PROTECT, Protect, SettingsInForce
from llmgw.control.settings_poller import POLL_S, SettingsPoller, boot
from llmgw.control.settings_writer import ClusterSettings
from llmgw.domain.errors import Unavailable
from llmgw.domain.event import Event
from llmgw.domain.files import STORAGE_UNAVAILABLE
from llmgw.domain.ids import OwnerId
from llmgw.domain.settings_version import PlaneSettings, RolloutRow, SettingsVersion
from llmgw.settings.document import document_of, parse_document
from llmgw.settings.load import Loaded, Role, load_bytes
from llmgw.settings.schema import Settings
from llmgw.sim.machine import SimMachine
from llmgw.store import settings as rows
from llmgw.store.audit import Origin
from llmgw.store.connection import MEMORY, FileStore

FILE = Path("/etc/llmgw/llmgw.toml")
FOLDER = Path("/var/lib/llmgw")
ANN = Origin("ann", "192.0.2.7", 1000.0)


def load(data: bytes) -> Loaded:
    return attrs.evolve(load_bytes(data, source=str(FILE), role=Role.SERVER), path=FILE)


def version(number: int, text: str = "", sha256: str | None = None) -> SettingsVersion:
    """A version of the store, its document in the canonical form."""
    document = parse_document(text, "t") if sha256 is None else None
    return SettingsVersion(number, number - 1, text if document is None else document.text, sha256 or document.sha256)


def what(in_force: SettingsInForce, up_s: float = 0.0) -> PlaneSettings:
    """What it says, without what it started with."""
    return attrs.evolve(in_force.said(up_s), started=0)


class Store_(FileStore):
    """The real one, in memory; `silent` makes it not answer, `full` makes it take no write."""

    silent = False
    full = False

    async def read(self, unit, *args, **kwargs):
        if self.silent:
            raise Unavailable("the store does not answer", code=STORAGE_UNAVAILABLE)
        return await super().read(unit, *args, **kwargs)

    async def write(self, unit, epoch, *args, **kwargs):
        if self.silent or self.full:
            raise Unavailable("storage unavailable: the disk is full", code=STORAGE_UNAVAILABLE)
        return await super().write(unit, epoch, *args, **kwargs)


class SettingsWorld:
    """`applied` are the settings of each swap, `dry_loads` what was tried, `why_not` what trying says; `told` the history's lines."""

    def __init__(self, machine: SimMachine, store: Store_ | None) -> None:
        self.machine = machine
        self.store = store
        self.applied: list[Settings] = []
        self.files: list[Loaded] = []
        self.dry_loads: list[tuple[bytes, str]] = []
        self.why_not = ""
        self.told: list[str] = []
        self.events: list[Event] = []
        self.changes = 0
        self.epoch = 1
        self.in_force: SettingsInForce
        self.poller: SettingsPoller
        self.writer: ClusterSettings

    @classmethod
    async def make(cls, *texts: str, file: str = "", store: bool = True, machine: SimMachine | None = None, **options) -> SettingsWorld:
        """`texts` are the documents of the versions that the store holds already; `file` is the machine's file."""
        opened = await Store_.open(MEMORY, _inline) if store else None
        world = cls(machine or SimMachine(1), opened)
        world.machine.disk.files[FILE] = file.encode()
        for parent, text in enumerate(texts):
            assert opened is not None
            await rows.write_version(opened, 1, parent, parse_document(text, "t").text, "", "")
        await world.start(**options)
        return world

    async def start(
        self, *, restarts: bool = True, settles_alone: bool = False, protect: Protect = PROTECT, file_mode: bool = False
    ) -> None:
        """A process begins: it reads its file, chooses its version and looks for the first time."""
        data = self.machine.disk.files[FILE]
        loaded = load(data)
        begun = await boot(self.machine, self.store, FOLDER, loaded) if self.store is not None else None
        self.in_force = SettingsInForce(
            loaded,
            begun.read if begun is not None else None,
            restarts=restarts,
            settles_alone=settles_alone,
            refused=begun.refused if begun is not None else 0,
            why=begun.why if begun is not None else "",
            protect=protect,
        )
        self.poller = SettingsPoller(
            self.machine,
            self.in_force,
            folder=FOLDER,
            store=self.store if not file_mode else None,
            load=load,
            dry_load=self._dry_load,
            apply=lambda: self.applied.append(self.in_force.settings),
            apply_objects=self.files.append,
            told=lambda kind, text: self.told.append(f"{kind}: {text}"),
        )
        if self.store is not None:
            self.writer = ClusterSettings(
                self.store,
                lambda: self.epoch,
                lambda: OwnerId("ctl-1#abc"),
                EventLog(self.machine, self._append, lambda: self.epoch),
                self.in_force,
                self.poller,
                str(FILE) if file_mode else "",
                self._changed,
                self.machine.wall_s,
            )

    def _changed(self) -> None:
        self.changes += 1

    async def _append(self, batch: tuple[Event, ...]) -> tuple[Event, ...]:
        self.events += batch
        return batch

    async def _dry_load(self, file: bytes, document: str) -> str:
        self.dry_loads.append((file, document))
        await trio.lowlevel.checkpoint()
        return self.why_not

    def put_file(self, text: str | bytes | None) -> None:
        """As an editor that replaces the file; None takes it away."""
        if text is None:
            self.machine.disk.files.pop(FILE, None)
        else:
            self.machine.disk.files[FILE] = text.encode() if isinstance(text, str) else text

    async def write(self, text: str) -> SettingsVersion:
        """Another control plane writes the next version."""
        assert self.store is not None
        newest = await rows.newest(self.store)
        return await rows.write_version(self.store, 1, newest.version if newest else 0, parse_document(text, "t").text, "", "")

    async def write_raw(self, document: str, sha256: str | None = None) -> None:
        """A version as no build of ours would write it."""
        assert self.store is not None
        newest = await rows.newest(self.store)
        parent = newest.version if newest else 0
        good = document_of({}, "t").sha256 if sha256 is None else sha256
        row = (parent + 1, parent, document, good, "", "", 0.0)
        await self.store.write(
            lambda connection, epoch: connection.execute("INSERT INTO cluster_settings VALUES (?, ?, ?, ?, ?, ?, ?)", row), 1
        )

    async def save_row(self, row: RolloutRow) -> None:
        assert self.store is not None
        await rows.save_rollout(self.store, 1, row)

    async def look(self, times: int = 1) -> None:
        """So many looks, one each second."""
        for _ in range(times):
            await self.machine.sleep_until(self.machine.now_s() + POLL_S)
            await self.poller.look()

    @property
    def settings(self) -> Settings:
        return self.in_force.settings


async def _inline(work):
    return work()
