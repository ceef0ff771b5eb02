"""Which settings this process acts on, and what it makes of the newest version. One reference is swapped; nobody is asked twice.

Three layers: defaults, this machine's file (machine keys), the store's document (cluster keys). A key that takes a restart
stays as it was when the process started, until it starts again. Knows no store and reads no file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, Final

import attrs

from llmgw.domain.errors import Invalid
from llmgw.domain.setting import Scope
from llmgw.domain.settings_version import PlaneSettings, SettingsVersion
from llmgw.settings.document import Document, live_merge, parse_document, restart_keys
from llmgw.settings.layers import effective
from llmgw.settings.load import Loaded, table_scope
from llmgw.settings.schema import Settings

OWN_TABLES: Final = frozenset({"server", "store", "router", "log", "metrics", "tls"})
PLAYGROUND_KEYS: Final = frozenset({"router.listen", "router.tls_certificate", "router.tls_key"})  # where a separate router is found


@attrs.frozen
class Protect:
    """The rules that keep settings whole. Only a test takes one away.

    `durable_first`: nothing is applied that the store has not taken for good. `check_digest`: a document whose SHA-256 is not the
    stored one is not applied. `only_loadable`: nor one that does not load here. `read_twice`: a changed file counts when two looks
    have found the same.
    """

    durable_first: bool = True
    check_digest: bool = True
    only_loadable: bool = True
    read_twice: bool = True


PROTECT: Final = Protect()


@attrs.frozen
class Read:
    """A version's document as this machine reads it; `settings` with this machine's own keys."""

    version: SettingsVersion
    document: Document
    settings: Settings


class SettingsInForce:
    """`file` is this machine's file as it was read at start; `first` the version that it started with, None without one.

    `restarts` False: nobody restarts this process for a setting (`llmgw dev`), so a key that needs it waits for the next start.
    `settles_alone` says that lease keys concern nobody: this control plane leads by definition.
    """

    def __init__(
        self,
        file: Loaded,
        first: Read | None = None,
        *,
        restarts: bool = True,
        settles_alone: bool = False,
        refused: int = 0,
        why: str = "",
        protect: Protect = PROTECT,
    ) -> None:
        self.file = file
        self.started_with = first.version.version if first is not None else 0
        self.restarts = restarts
        self.settles_alone = settles_alone
        self.protect = protect
        self.settings = first.settings if first is not None else file.settings
        self.started = self.settings
        self.read = first
        self.applied = self.started_with
        self.pending = 0
        self.restart_for_file: tuple[str, ...] = ()
        self.refused = refused
        self.why = why

    @property
    def document(self) -> Document | None:
        """The document whose live keys are in force."""
        return self.read.document if self.read is not None else None

    @property
    def live(self) -> int:
        """The version whose live keys are in force; 0: none."""
        return self.read.version.version if self.read is not None else 0

    def said(self, up_s: float) -> PlaneSettings:
        """What this control plane tells the leader of itself."""
        wants = bool(self.restart_for_file)
        return PlaneSettings(self.live, self.applied, self.pending, wants, self.refused, self.why, round(up_s, 1), self.started_with)

    def reads(self, version: SettingsVersion) -> Read:
        """The version with this machine's file under it. Raises Invalid where it does not load here."""
        return read_version(version, self.file, self.protect)

    def restart_keys(self, settings: Settings) -> tuple[str, ...]:
        """Cluster keys that differ from those that this process started with and take a restart."""
        return () if self.settles_alone else restart_keys(self.started, settings)

    def take(self, read: Read) -> tuple[str, ...]:
        """Its live keys are in force from here on. Returns the keys that wait for a restart; with none the version is applied."""
        waits = self.restart_keys(read.settings)
        self.read = read
        self.settings = live_merge(self.settings, read.settings) if waits else self._as_started(read.settings)
        if waits:
            self.pending = read.version.version
        else:
            self.pending, self.applied = 0, read.version.version
            self.started_with = self.started_with or self.applied  # the first start imports it, or finds it imported
        if self.refused and read.version.version >= self.refused:
            self.refused, self.why = 0, ""
        return waits

    def refuse(self, version: int, why: str) -> None:
        """That version is not taken here; what is in force stays."""
        self.refused, self.why = version, why

    def stay(self, why: str) -> None:
        """This process must not restart now, neither for a version that waits for it nor for its file."""
        if self.pending:
            self.refuse(self.pending, why)
        self.pending, self.restart_for_file = 0, ()

    def would_wait(self, file: Loaded) -> tuple[str, ...]:
        """The machine keys of a changed file that take a restart of this process."""
        settings = effective(file, self.document)
        return tuple(path for path in restart_keys(self.started, settings, Scope.MACHINE) if concerns(path, self.started, settings))

    def take_file(self, file: Loaded) -> tuple[str, ...]:
        """The file has changed and loads. Returns the machine keys that wait for a restart.

        Where there is no document its cluster keys are in force from here on.
        """
        settings = effective(file, self.document)
        self.restart_for_file = waits = self.would_wait(file)
        self.file = attrs.evolve(file, settings=attrs.evolve(file.settings, **_machine(self.started)))
        self.settings = self._as_started(settings) if self.applied == self.live else live_merge(self.settings, settings)
        return waits

    def _as_started(self, settings: Settings) -> Settings:
        """With the machine keys that this process started with."""
        return attrs.evolve(settings, **_machine(self.started))


def read_version(version: SettingsVersion, file: Loaded, protect: Protect = PROTECT) -> Read:
    """Raises Invalid where the version does not load on the machine of this file."""
    if protect.check_digest and hashlib.sha256(version.document.encode()).hexdigest() != version.sha256:
        raise Invalid(f"settings version {version.version} is not what was written: its SHA-256 differs", code="damaged_version")
    document = parse_document(version.document, f"settings version {version.version}")
    return Read(version, document, effective(file, document))


def newest_loadable(
    versions: tuple[SettingsVersion, ...], usable: Callable[[int], str], file: Loaded
) -> tuple[Read | None, tuple[tuple[int, str], ...]]:
    """(the newest of `versions`, newest first, that loads here; (version, why) of those passed over).

    `usable(version)` says why one must not be used here: held for the cluster, or put aside after boots that failed; "" for fine.
    """
    passed = []
    for version in versions:
        if why := usable(version.version):
            passed.append((version.version, why))
            continue
        try:
            return read_version(version, file), tuple(passed)
        except Invalid as err:
            passed.append((version.version, err.message))
    return None, tuple(passed)


def concerns(path: str, before: Settings, after: Settings) -> bool:
    """Is this machine key a control plane's? The same file may be an agent's and a separate router's as well."""
    table = path.partition(".")[0]
    if table == "router" and not (before.router.embedded or after.router.embedded):
        return path in PLAYGROUND_KEYS
    return table in OWN_TABLES


def _machine(settings: Settings) -> dict[str, Any]:
    return {field.name: getattr(settings, field.name) for field in attrs.fields(Settings) if table_scope(field.name) is Scope.MACHINE}
