"""The cluster settings' owner, which the admin API calls: writes versions, and tells what they hold and who runs which.

An edit names the version that it began from. It is checked, written in one transaction that checks again, durable, and only
then in force here and told to the others. A version is never changed: taking one back writes its content as a new one.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from typing import Any, Final

import attrs

from llmgw.control.event_log import EventLog
from llmgw.control.settings_in_force import SettingsInForce
from llmgw.control.settings_poller import SettingsPoller
from llmgw.domain.errors import Conflict, Invalid, NotFound, PreconditionFailed
from llmgw.domain.ids import OwnerId, holder_name
from llmgw.domain.settings_version import Pause, SettingsVersion
from llmgw.settings import not_yet
from llmgw.settings.document import EMPTY, Difference, Document, differences, document_of, imported, parse_document
from llmgw.settings.layers import Layer, layers
from llmgw.settings.place_holders import warnings_of_engines
from llmgw.store import settings as rows
from llmgw.store.audit import Origin
from llmgw.store.connection import Store

REASON_MAX: Final = 1000  # characters of why a version was written


@attrs.frozen
class Planned:
    """What a document would do, or did. `restart`: the keys of it for which control planes restart, one after another."""

    differences: tuple[Difference, ...]
    restart: tuple[str, ...]
    warnings: tuple[str, ...]


class ClusterSettings:
    """`file` names the file that holds the cluster's settings where there is no store, else ""; `changed()` tells the others."""

    def __init__(
        self,
        store: Store,
        epoch: Callable[[], int],
        owner: Callable[[], OwnerId],
        events: EventLog,
        in_force: SettingsInForce,
        poller: SettingsPoller,
        file: str,
        changed: Callable[[], None],
        wall_s: Callable[[], float],
    ) -> None:
        self._store = store
        self._epoch = epoch
        self._owner = owner
        self._events = events
        self._in_force = in_force
        self._poller = poller
        self.file = file
        self._changed = changed
        self._wall_s = wall_s

    @property
    def durability(self) -> str:
        return self._store.durability

    # --- what there is

    async def newest(self) -> tuple[SettingsVersion, Document]:
        """The newest version; without a store number 0, what the file says. Raises Unavailable before there is any."""
        if self.file:
            file = self._in_force.file  # as it stands: what an import would add to it is not in force here
            document = document_of(file.cluster_values, self.file)
            return SettingsVersion(0, 0, document.text, document.sha256, "", f"from {self.file}"), document
        version = await rows.newest(self._store)
        if version is None:
            return SettingsVersion(0, 0, EMPTY.text, EMPTY.sha256), EMPTY
        return version, _read(version)

    async def version(self, number: int) -> tuple[SettingsVersion, Document]:
        """Raises NotFound."""
        if self.file:
            raise NotFound(f"the settings stand in {self.file}, which has no versions", code="file_holds_it")
        version = await rows.version(self._store, number)
        return version, _read(version)

    async def history(self, limit: int, before: int | None) -> tuple[SettingsVersion, ...]:
        """Newest first, those below `before`."""
        return () if self.file else await rows.history(self._store, limit, before)

    async def diff(self, old: int, new: int) -> tuple[Difference, ...]:
        """Raises NotFound. Version 0 is the empty document."""
        before = EMPTY if old == 0 else (await self.version(old))[1]
        after = EMPTY if new == 0 else (await self.version(new))[1]
        return differences(before, after)

    async def refused(self) -> tuple[tuple[int, str, str], ...]:
        """(version, name of a control plane, why) of everything that was refused anywhere, sorted."""
        return () if self.file else await rows.load_refused(self._store)

    def layers(self) -> tuple[Layer, ...]:
        """Every key of this control plane: what it is here, and whose value that is."""
        return layers(self._in_force.file, self._in_force.document)

    def plan(self, before: Document, after: Document, base: int = 0) -> Planned:
        """What putting `after` in place of `before`, the document of version `base`, does. Writes nothing."""
        changes = differences(before, after)
        # Also keys of an earlier edit that are not in force yet: whoever runs this version has restarted for those as well.
        restart = self._in_force.restart_keys(after.settings)
        warnings = tuple(warnings_of_engines(after.settings)) + _not_yet(after)
        held = next((one.why for one in self._poller.row.held if one.version == base), None)
        if held is not None and (again := self.taken_back(before)):
            warnings += (f"version {base} is held ({held}); this is written on top of it, so what it says is tried again: {again}",)
        return Planned(changes, restart, warnings)

    def taken_back(self, newest: Document) -> str:
        """The keys that the newest version sets otherwise than what is in force here, in words; "" for none."""
        return ", ".join(change.path for change in differences(self._in_force.document or EMPTY, newest))

    # --- what changes it

    async def write(self, document: Document, parent: int, reason: str, key: str | None, origin: Origin) -> tuple[SettingsVersion, Planned]:
        """Writes a version; one that says what `parent` says writes none and returns `parent`.

        Raises Invalid, PreconditionFailed where somebody was faster, Conflict without a store, StaleEpoch, Unavailable.
        """
        self.check_writable()
        if len(reason) > REASON_MAX:
            raise Invalid(f"a reason has at most {REASON_MAX} characters", param="reason")
        before = EMPTY if parent == 0 else (await self.version(parent))[1]
        newest = await rows.newest(self._store)
        planned = self.plan(before, document, parent)
        if not self._in_force.protect.durable_first:
            await self._put_in_force_first(document, parent)
        try:
            version = await rows.write_version(self._store, self._epoch(), parent, document.text, origin.who, reason, key, origin)
        except Conflict as err:
            if err.code != "revision_moved":
                raise
            raise PreconditionFailed(err.message, code=err.code) from err
        if version.version > (newest.version if newest is not None else 0):  # a repeat gets one that the history tells of already
            self._events.record("settings.written", "settings", _told(version, planned))
        await self._poller.look()
        self._changed()
        return version, planned

    async def _put_in_force_first(self, document: Document, parent: int) -> None:
        """What `durable_first` forbids; a test takes that rule away."""
        version = SettingsVersion(parent + 1, parent, document.text, document.sha256)
        self._poller.take(self._in_force.reads(version))

    async def import_first(self, import_objects: Callable[..., Any]) -> SettingsVersion | None:
        """Version 1 from this machine's file, with what `import_objects(connection, epoch)` imports beside it in the same
        transaction; None where there is a version already."""
        document = imported_keys(self._in_force)
        version = await rows.import_first(
            self._store, self._epoch(), document.text, holder_name(self._owner()), self._wall_s(), import_objects
        )
        if version is not None:
            source = self._in_force.file.source or "this build's defaults"
            self._events.record("settings.imported", "settings", f"version 1 is imported from {source}")
        return version

    async def pause(self, reason: str, origin: Origin) -> Pause:
        """Roll-outs, moves and scaling stand still until `resume`. The pause that stands, which may be an earlier one.

        Raises Invalid, StaleEpoch, Unavailable.
        """
        if len(reason) > REASON_MAX:
            raise Invalid(f"a reason has at most {REASON_MAX} characters", param="reason")
        pause = Pause(reason, origin.who, origin.at_wall_s)
        stands = await rows.pause(self._store, self._epoch(), pause, origin)
        if stands == pause:
            self._events.record("cluster.paused", "cluster", f"paused{_by(origin.who)}" + (f": {reason}" if reason else ""))
        await self._poller.look()
        self._changed()
        return stands

    async def resume(self, origin: Origin) -> bool:
        """False where there was no pause."""
        resumed = await rows.resume(self._store, self._epoch(), origin)
        if resumed:
            self._events.record("cluster.resumed", "cluster", f"resumed{_by(origin.who)}")
        await self._poller.look()
        self._changed()
        return resumed

    def check_writable(self) -> None:
        """Raises Conflict where the file holds the settings."""
        if self.file:
            raise Conflict(
                f"without [store] the settings stand in {self.file}: edit that file, a change is taken live", code="file_holds_it"
            )


def imported_keys(in_force: SettingsInForce) -> Document:
    """What this machine's file would be as version 1."""
    return imported(in_force.file.cluster_values, in_force.file.source or "the file")


def _read(version: SettingsVersion) -> Document:
    """A stored version, also one that this build cannot load: then its text alone."""
    try:
        return parse_document(version.document, f"settings version {version.version}")
    except Invalid:
        return Document(version.document, _plain(version.document), EMPTY.settings)


def _plain(text: str) -> Mapping[str, Any]:
    try:
        return tomllib.loads(text)
    except ValueError:
        return {}


def _not_yet(document: Document) -> tuple[str, ...]:
    return tuple(not_yet.warnings_of(document.paths, document.settings, ()))


def _told(version: SettingsVersion, planned: Planned) -> str:
    keys = ", ".join(change.path for change in planned.differences[:5])
    more = f" and {len(planned.differences) - 5} more" if len(planned.differences) > 5 else ""
    text = f"version {version.version}{_by(version.author)}: {keys}{more}"
    return f"{text} ({version.reason})" if version.reason else text


def _by(author: str) -> str:
    return f" by {author}" if author else ""
