"""Which catalog is current, and how it changes: the owner that the admin API calls for models and engine choices.

A reader takes the reference once and finishes its work against it. A change is durable first, then swapped, then told to the
sink, then published, and only then is the planner woken: a model that left stops receiving traffic before its replicas stop.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import attrs

from llmgw.control.event_log import EventLog
from llmgw.domain.errors import Conflict, Invalid, NotFound, PreconditionFailed
from llmgw.domain.model import Catalog, ModelSpec
from llmgw.domain.ports import CatalogSink
from llmgw.settings.objects import model_to_table
from llmgw.store import engine_choices, models
from llmgw.store.audit import CLUSTER, Origin
from llmgw.store.connection import Store

NEAR: Final = 0.6  # difflib's ratio from which a name is offered as the one that was meant


@attrs.frozen
class Change:
    """What applying one model does. `diff` holds (path, before, after) of each field that differs."""

    model: str
    change: str  # created | updated | unchanged
    diff: tuple[tuple[str, Any, Any], ...] = ()
    revision: int = 0


class LiveCatalog:
    """Holds which catalog is current. `publish` sends the endpoint list out at once, `wake` makes the planner look again."""

    def __init__(self, publish: Callable[[], None], wake: Callable[[], None]) -> None:
        self._catalog = Catalog()
        self._publish = publish
        self._wake = wake
        self._sinks: list[CatalogSink] = []

    @property
    def current(self) -> Catalog:
        return self._catalog

    def add_sink(self, sink: CatalogSink) -> None:
        self._sinks.append(sink)
        sink.set_catalog(self._catalog)

    def replace(self, catalog: Catalog) -> None:
        """Swap, tell the sinks, publish, wake: in this order, without a wait in between."""
        self._catalog = catalog
        for sink in self._sinks:
            sink.set_catalog(catalog)
        self._publish()
        self._wake()


class Models:
    """Models and engine choices. `file` names the file whose `[[model]]` tables are the catalog, or is "" with a store."""

    def __init__(
        self, store: Store, epoch: Callable[[], int], live: LiveCatalog, events: EventLog, reopen: Callable[[str], None], file: str
    ) -> None:
        self._store = store
        self._epoch = epoch
        self._live = live
        self._events = events
        self._reopen = reopen
        self._file = file
        self._choices: Mapping[str, str] = {}
        self._revisions: Mapping[str, int] = {}

    @property
    def catalog(self) -> Catalog:
        return self._live.current

    @property
    def choices(self) -> Mapping[str, str]:
        """The profile that an operator chose, by model."""
        return self._choices

    @property
    def durability(self) -> str:
        return self._store.durability

    def revision(self, name: str) -> int:
        """For `If-Match`. Models of a file have their catalog's generation."""
        return self._revisions.get(name, self._live.current.generation)

    def get(self, name: str) -> ModelSpec:
        """By name or alias. Raises NotFound, naming the nearest."""
        for spec in self._live.current.models:
            if name in spec.names:
                return spec
        near = difflib.get_close_matches(name, [known for spec in self._live.current.models for known in spec.names], 1, NEAR)
        raise NotFound(f"there is no model {name[:100]!r}" + (f"; did you mean {near[0]!r}?" if near else ""))

    async def reload(self) -> None:
        """What another leader may have changed."""
        self._choices = dict(await engine_choices.load(self._store))
        if not self._file:
            await self._reread()

    def told_import(self, imported: bool, specs: Sequence[ModelSpec]) -> None:
        """For the history: the file's models were taken at the first start against an empty store."""
        if imported and specs:
            names = ", ".join(spec.name for spec in specs)
            self._events.record("models.imported", "models", f"imported from the file at first start: {names}")

    def replace_from_file(self, catalog: Catalog) -> None:
        """The file is the catalog and has changed."""
        before = self._live.current
        if catalog.models == before.models:
            return
        for spec in catalog.models:
            if before.get(spec.name) != spec:
                self._reopen(spec.name)
        self._live.replace(attrs.evolve(catalog, generation=before.generation + 1))
        self._events.record("models.replaced", "models", f"the models of {self._file} are in force: {len(catalog.models)}")

    async def plan_apply(self, specs: Sequence[ModelSpec]) -> tuple[Change, ...]:
        """What applying these would do; raises `Invalid` when the catalog would not be valid. Writes nothing."""
        seen: set[str] = set()
        for spec in specs:
            if spec.name in seen:
                raise Invalid(f"model {spec.name!r} is given twice", param="model")
            seen.add(spec.name)
        current = self._live.current
        others = tuple(model for model in current.models if model.name not in seen)
        Catalog((*others, *specs))
        return tuple(_change(current.get(spec.name), spec, self.revision(spec.name)) for spec in specs)

    async def apply(self, specs: Sequence[ModelSpec], key: str | None = None, origin: Origin = CLUSTER) -> tuple[Change, ...]:
        """Adds or replaces these models and leaves the others alone."""
        self._writable()
        changes = await self.plan_apply(specs)
        await models.put_many(self._store, self._epoch(), specs, key, origin)
        for change in changes:
            if change.change != "unchanged":
                self._reopen(change.model)
                self._events.record(f"model.{change.change}", f"model/{change.model}", _told(change, origin))
        await self._reread()
        return tuple(attrs.evolve(change, revision=self.revision(change.model)) for change in changes)

    async def put(self, spec: ModelSpec, expected: int | None, key: str | None = None, origin: Origin = CLUSTER) -> Change:
        """One model, against the revision that the edit began from (0: there must be none, None: any).

        Raises PreconditionFailed when somebody was faster.
        """
        self._writable()
        (change,) = await self.plan_apply((spec,))
        try:
            await models.put(self._store, self._epoch(), spec, expected, key, origin)
        except Conflict as err:
            if err.code == "revision_moved" and expected is not None:
                raise PreconditionFailed(err.message) from err
            raise
        if change.change != "unchanged":
            self._reopen(spec.name)
            self._events.record(f"model.{change.change}", f"model/{spec.name}", _told(change, origin))
        await self._reread()
        return attrs.evolve(change, revision=self.revision(spec.name))

    async def remove(self, name: str, expected: int | None = None, key: str | None = None, origin: Origin = CLUSTER) -> int:
        """Takes a model out of the catalog; returns the set's revision. Raises NotFound, PreconditionFailed."""
        self._writable()
        try:
            revision = await models.remove(self._store, self._epoch(), name, expected, key, origin)
        except Conflict as err:
            if err.code == "revision_moved" and expected is not None:
                raise PreconditionFailed(err.message) from err
            raise
        self._events.record("model.removed", f"model/{name}", f"model {name} was removed{_by(origin)}")
        self._choices = {model: profile for model, profile in self._choices.items() if model != name}
        await self._reread()
        return revision

    async def scale(self, name: str, count: int, key: str | None = None, origin: Origin = CLUSTER) -> Change:
        """Sets how many replicas run now. Raises Invalid outside of min and max."""
        spec = self.get(name)
        counts = spec.replicas
        if counts.min == counts.max == counts.count:  # given as one number, and stays one
            counts = attrs.evolve(counts, min=count, max=count)
        scaled = attrs.evolve(spec, replicas=attrs.evolve(counts, count=count))
        faults = scaled.replicas.faults("replicas")
        if faults:
            raise Invalid(f"model {spec.name!r} cannot be scaled to {count}: {faults[0]}", faults=tuple(faults), param="count")
        return await self.put(scaled, None, key, origin)

    async def choose_engine(self, name: str, profile: str | None, origin: Origin = CLUSTER) -> str:
        """Runs this profile from now on (None: the first by priority again); returns the name of the one in force."""
        spec = self.get(name)
        if profile is not None and spec.profile(profile) is None:
            known = ", ".join(candidate.name for candidate in spec.profiles)
            raise NotFound(f"model {spec.name!r} has no profile {profile!r}; it has {known}")
        if profile is None:
            await engine_choices.clear(self._store, self._epoch(), spec.name, origin)
            self._choices = {model: chosen for model, chosen in self._choices.items() if model != spec.name}
        else:
            await engine_choices.choose(self._store, self._epoch(), spec.name, profile, origin)
            self._choices = {**self._choices, spec.name: profile}
        self._reopen(spec.name)
        in_force = spec.preferred(self._choices.get(spec.name)).name
        self._events.record("model.engine", f"model/{spec.name}", f"model {spec.name} runs profile {in_force}{_by(origin)}")
        self._live.replace(attrs.evolve(self._live.current, generation=self._live.current.generation + 1))
        return in_force

    def _writable(self) -> None:
        if self._file:
            raise Conflict(f"the models of this control plane come from {self._file}: change them there", code="models_in_file")

    async def _reread(self) -> None:
        stored = await models.load(self._store)
        self._revisions = stored.revisions
        if stored.models != self._live.current.models:
            # The store's own counter rises with each change; a generation of before our start must not be met again.
            self._live.replace(Catalog(stored.models, max(stored.revision, self._live.current.generation + 1)))


def _change(before: ModelSpec | None, after: ModelSpec, revision: int) -> Change:
    if before is None:
        return Change(after.name, "created", revision=revision)
    diff = tuple(_differences("", model_to_table(before), model_to_table(after)))
    return Change(after.name, "updated" if diff else "unchanged", diff, revision)


def _differences(path: str, before: Any, after: Any) -> list[tuple[str, Any, Any]]:
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        found: list[tuple[str, Any, Any]] = []
        for key in sorted({*before, *after}):
            found += _differences(f"{path}.{key}" if path else key, before.get(key), after.get(key))
        return found
    return [] if before == after else [(path, before, after)]


def _told(change: Change, origin: Origin) -> str:
    fields = ", ".join(path for path, _, _ in change.diff)
    return f"model {change.model} was {change.change}{_by(origin)}" + (f": {fields}" if fields else "")


def _by(origin: Origin) -> str:
    return f" by {origin.who}" if origin.who else ""
