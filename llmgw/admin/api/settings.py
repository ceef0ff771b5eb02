"""`/settings`: the cluster's settings as versions of one document: what holds, what was, what a change does, who runs what.

An edit is a whole document (as JSON or TOML) or single keys, and names the version that it began from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, Final, TypeVar

import attrs

from llmgw.admin.auth import HOP
from llmgw.admin.calls import Call, Reply, Route
from llmgw.admin.views import HIDDEN, time_text
from llmgw.control.controller import Controller
from llmgw.control.settings_writer import Planned
from llmgw.domain.errors import Fault, Invalid, NotFound, PreconditionFailed, PreconditionRequired
from llmgw.domain.ids import holder_name
from llmgw.domain.settings_version import Pause, PlaneSettings, RolloutPhase, RolloutRow, SettingsVersion
from llmgw.settings.decode import short
from llmgw.settings.document import EMPTY, Difference, Document, differences, document_of, parse_document, with_keys
from llmgw.settings.layout import ENGINE_SHOWN, Row, Section, settings_sections
from llmgw.settings.toml_text import parse_toml
from llmgw.store import settings as rows
from llmgw.store.admin_tokens import Role

T = TypeVar("T")
KEYS_MAX: Final = 1_000  # of one PATCH: there are far fewer, and each that nobody knows is compared with all of them
FAULTS_MAX: Final = 200  # that are told; whoever sent another kind of file needs no list of all of it
PAGE_MAX: Final = rows.PAGE_MAX - 1  # of one page of the history: the version before its last is read with it, to compare
LIMIT_MAX: Final = 10_000  # that may be asked for at once
VERSION_MAX: Final = 10**18  # what a column takes
COUNTED_MAX: Final = 10_000  # versions whose number of changes is remembered: small numbers of what never changes
_TRUE: Final = {"true": True, "1": True, "false": False, "0": False}


def routes(controller: Controller) -> tuple[Route, ...]:
    settings = controller.cluster_settings
    counted: dict[int, int] = {}

    async def off_the_loop(work: Callable[[], T]) -> T:
        """A document of a mebibyte takes half a second to read, and the lease is renewed meanwhile."""
        try:
            return await controller.machine.run_sync(work)
        except Invalid as err:
            raise _shortened(err) from err

    # --- what there is

    async def show(call: Call) -> Reply:
        version, document = await settings.newest()
        shown = {
            **version_view(controller, version, document),
            "desired": controller.settings_poller.desired,
            "control_planes": await planes(controller, call.headers.get(HOP)),
            "rollout": rollout_view(controller),
            "pause": pause_view(await load_pause(controller)),
        }
        return Reply(shown, headers=_etag(version.version))

    async def one(call: Call, version: str) -> Reply:
        found, document = await settings.version(_number(version, "version"))
        return Reply(version_view(controller, found, document), headers=_etag(found.version))

    async def history(call: Call) -> Reply:
        limit = min(call.integer("limit", 50, 1, LIMIT_MAX), PAGE_MAX)
        cursor = call.query.get("cursor")
        found = await settings.history(limit + 1, _number(cursor, "cursor") if cursor else None)
        page, more = found[:limit], len(found) > limit
        if any(version.version not in counted for version in page):
            parent = None if more or not page else await _before(page[-1])
            counts = await off_the_loop(lambda: _counts((*found, *([parent] if parent is not None else ()))))
            if len(counted) > COUNTED_MAX:
                counted.clear()
            counted.update({version.version: counts[version.version] for version in page})
        refused = await settings.refused()
        applied = {plane["name"]: plane["applied"] for plane in await planes(controller)}
        return Reply(
            {
                "versions": [
                    {
                        **_facts(controller, version),
                        "changes": counted[version.version],
                        "applied_by": sorted(name for name, number in applied.items() if number == version.version),
                        "refused_by": [
                            {"name": name, "why": why}
                            for number, name, why in refused
                            if number == version.version and applied.get(name) != number  # one that runs it now has taken it after all
                        ],
                    }
                    for version in page
                ],
                "next": str(page[-1].version) if more else None,
            }
        )

    async def _before(version: SettingsVersion) -> SettingsVersion | None:
        return (await settings.version(version.parent))[0] if version.parent else None

    async def diff(call: Call) -> Reply:
        if "from" not in call.query:
            raise Invalid("from and to name two versions; without to: the newest", param="from")
        old = _number(call.query["from"], "from")
        new = _number(call.query["to"], "to") if "to" in call.query else (await settings.newest())[0].version
        return Reply({"from": old, "to": new, "changes": [change_view(change) for change in await settings.diff(old, new)]})

    async def show_schema(call: Call) -> Reply:
        return Reply(_SCHEMA)

    async def effective(call: Call) -> Reply:
        secret = _secret_paths()
        keys = [
            {
                "path": layer.path,
                "value": HIDDEN if layer.path in secret and layer.value else plain(layer.value),
                "origin": layer.origin.value,
                "in_vain": HIDDEN if layer.path in secret and layer.in_vain else plain(layer.in_vain),
            }
            for layer in settings.layers()
        ]
        return Reply({"version": controller.in_force.live, "keys": keys})

    # --- what changes it

    async def base(call: Call) -> tuple[SettingsVersion, Document]:
        """The version that the edit began from. Raises PreconditionRequired, PreconditionFailed, Conflict without a store."""
        settings.check_writable()
        newest, document = await settings.newest()
        named = call.expected_revision(newest.version)
        if named is None:  # any that is there: whoever edits what he has not read takes somebody's edit back
            raise PreconditionRequired('an edit of the settings names the version it began from: If-Match: "VERSION"', param="If-Match")
        if named == newest.version:
            return newest, document
        moved = PreconditionFailed(
            f"the settings are at version {newest.version}, the edit began from {named}: read them again", code="revision_moved"
        )
        if _dry_run(call):
            raise moved
        try:
            return await settings.version(named)  # it may be a repeat: the store tells, in the write itself
        except NotFound as err:
            raise moved from err

    async def wanted(body: Mapping[str, Any], before: Document) -> Document:
        """The document that a body asks for. Raises Invalid with every fault."""
        given = [name for name in ("document", "toml") if name in body]
        keys = "set" in body or "unset" in body
        if len(given) + keys != 1:
            raise Invalid("the body holds one of: document (an object), toml (text), or set and unset (single keys)", param="document")
        if keys:
            return await off_the_loop(lambda: with_keys(before, *_keys(body)))
        if given == ["toml"]:
            text = body["toml"]
            if not isinstance(text, str):
                raise Invalid("toml is a text", param="toml")
            after = await off_the_loop(lambda: parse_document(text, "the document"))
        else:
            values = body["document"]
            if not isinstance(values, dict):
                raise Invalid("document is an object of tables", param="document")
            after = await off_the_loop(lambda: document_of(values, "the document"))
        if not after.values and before.values and body.get("reset") is not True:
            raise Invalid(
                "the document sets nothing, and would put every key back to its default; that is taken for a text that did not arrive"
                ' whole. Say "reset": true where it is meant',
                code="empty_document",
                param=given[0],
            )
        return after

    async def carry_out(
        call: Call, version: SettingsVersion, before: Document, after: Document, reason: str, more: tuple[str, ...] = ()
    ) -> Reply:
        if _dry_run(call):
            planned = settings.plan(before, after, version.version)
            return Reply(planned_view(version, after, planned, more, settings.durability, dry_run=True), kept=False)
        written, planned = await settings.write(after, version.version, reason, call.key, call.origin)
        return Reply(planned_view(written, after, planned, more, settings.durability, dry_run=False), headers=_etag(written.version))

    async def put(call: Call) -> Reply:
        body = call.table(("document", "toml", "reset", "reason"))
        reason = read_reason(body)
        version, before = await base(call)
        return await carry_out(call, version, before, await wanted(body, before), reason)

    async def patch(call: Call) -> Reply:
        body = call.table(("set", "unset", "reason"))
        reason = read_reason(body)
        version, before = await base(call)
        return await carry_out(call, version, before, await wanted(body, before), reason)

    async def check(call: Call) -> Reply:
        body = call.table(("document", "toml", "set", "unset", "reset", "reason"))
        read_reason(body)
        version, before = await settings.newest()
        after = await wanted(body, before)
        return Reply(planned_view(version, after, settings.plan(before, after, version.version), (), settings.durability, dry_run=True))

    async def rollback(call: Call) -> Reply:
        body = call.table(("version", "reason"))
        number, reason = body.get("version"), read_reason(body)
        if type(number) is not int or not 1 <= number <= VERSION_MAX:
            raise Invalid("version is the number of a version, from 1", param="version")
        version, before = await base(call)
        target, _ = await settings.version(number)
        try:
            after = await off_the_loop(lambda: parse_document(target.document, f"settings version {number}"))
        except Invalid as err:
            raise Invalid(
                f"version {number} does not load with this build, so nothing was changed: {err.message}", faults=err.faults, code=err.code
            ) from err
        held = _why_held(controller.settings_poller.row, number)
        more = () if held is None else (f"version {number} is held ({held}); what it says is tried again as a new version",)
        return await carry_out(call, version, before, after, reason or f"back to version {number}", more)

    whole = {
        "document": "an object of tables",
        "toml": "the same as text, in its place",
        "reset": "true: also one that sets nothing",
        "reason": "why, for the history",
    }
    keys = {"set": "an object of dotted keys and values", "unset": "a list of dotted keys", "reason": "why, for the history"}
    dry = {"dry_run": "true: only say what would change"}
    operator = Role.OPERATOR
    return (
        Route("GET", "/api/v1/settings", show, "The newest version, who runs what, and the roll-out; its ETag is the version",
              local=False),
        Route("PUT", "/api/v1/settings", put, "Replace the document (If-Match)", operator, whole, dry),
        Route("PATCH", "/api/v1/settings", patch, "Set and unset single keys (If-Match)", operator, keys, dry),
        Route("POST", "/api/v1/settings/check", check, "What a document, or single keys, would change; every fault", operator,
              {**whole, **keys}, remembered=False, local=True),
        Route("POST", "/api/v1/settings/rollback", rollback, "Write what an earlier version says as a new one (If-Match)", operator,
              {"version": "its number", "reason": "why"}, dry),
        Route("GET", "/api/v1/settings/history", history, "Versions, the newest first: who wrote, runs and refused them",
              query={"limit": f"a page holds at most {PAGE_MAX}", "cursor": "next of the page before"}),
        Route("GET", "/api/v1/settings/versions/<name:version>", one, "One version"),
        Route("GET", "/api/v1/settings/diff", diff, "What differs between two versions; 0 is the empty document",
              query={"from": "a version", "to": "another; the newest"}),
        Route("GET", "/api/v1/settings/schema", show_schema, "Every key: type, unit, range, default, scope, help", late=True),
        Route("GET", "/api/v1/settings/effective", effective, "What is in force on this control plane, and whose value that is"),
    )  # fmt: skip


# --- views


def version_view(controller: Controller, version: SettingsVersion, document: Document) -> dict[str, Any]:
    return {
        **_facts(controller, version),
        "document": plain(document.values),
        "toml": document.text,
        "durability": controller.cluster_settings.durability,
    }


def _facts(controller: Controller, version: SettingsVersion) -> dict[str, Any]:
    held = _why_held(controller.settings_poller.row, version.version)
    return {
        "version": version.version,
        "parent": version.parent,
        "author": version.author,
        "reason": version.reason,
        "created_at": time_text(version.created_wall_s) if version.version else None,
        "sha256": version.sha256,
        "held": held is not None,
        "why_held": held or "",
    }


def change_view(change: Difference) -> dict[str, Any]:
    return {"path": change.path, "before": plain(change.before), "after": plain(change.after), "applies": change.applies.value}


def planned_view(
    version: SettingsVersion, after: Document, planned: Planned, more: tuple[str, ...], durability: str, *, dry_run: bool
) -> dict[str, Any]:
    """`version` is the one that was written; in a dry run the one that the edit began from."""
    return {
        "version": version.version,
        "parent": version.parent,
        "sha256": after.sha256,
        "changes": [change_view(change) for change in planned.differences],
        "restart": list(planned.restart),
        "warnings": [*planned.warnings, *more],
        "dry_run": dry_run,
        "durability": durability,
    }


async def planes(controller: Controller, asked: str | None = None) -> list[dict[str, Any]]:
    """What each control plane makes of the versions, sorted by name: on the leader as heard, with ages; on a standby of itself, and
    of the others what the leader kept last (`heard_s` null). `asked` is the owner id of the standby that carried the question here."""
    leadership = controller.leadership
    leads = leadership.is_leader
    owner = leadership.owner
    me = (asked or owner) == owner
    own = controller.in_force.said(controller.rollouts.up_s)
    found = [_plane(holder_name(owner), controller.address, own, leads=leads, me=me, heard_s=0.0)]
    if leads:
        found += [
            _plane(holder_name(one.owner), one.address, one.settings, leads=False, me=one.owner == asked, heard_s=round(age_s, 1))
            for one, age_s in controller.peers.standbys()
        ]
    elif not controller.file:
        leader = controller.peers.leader_address()
        found += [
            _plane(one.name, one.address, one.settings, leads=one.address == leader, me=False, heard_s=None)
            for one in await rows.load_applied(controller.store)
            if one.address != controller.address
        ]
    return sorted(found, key=lambda plane: (plane["name"], plane["address"]))


def _plane(name: str, address: str, said: PlaneSettings, *, leads: bool, me: bool, heard_s: float | None) -> dict[str, Any]:
    told = {field: getattr(said, field) for field in ("live", "applied", "pending", "restart_for_file", "refused", "why")}
    return {"name": name, "address": address, "leads": leads, "me": me, "heard_s": heard_s, **told}


def rollout_view(controller: Controller) -> dict[str, Any]:
    row = controller.settings_poller.row
    return {"phase": row.phase.value, "version": row.version, "token": row.token, "reason": row.reason, "waiting": _sentence(controller)}


def _sentence(controller: Controller) -> str:
    """Where the roll-out stands; "" at rest. Only the leader sees whom it waits for."""
    row = controller.settings_poller.row
    if controller.leadership.is_leader:
        behind = any(said.pending or said.restart_for_file for _, said in _said(controller))
        return controller.rollouts.describe() if behind or row.phase is not RolloutPhase.IDLE else row.reason
    if row.phase is RolloutPhase.IDLE:
        return row.reason
    return row.reason or f"version {row.version}: {row.phase.value.replace('_', ' ')}{' ' + row.token if row.token else ''}"


def _said(controller: Controller) -> list[tuple[str, PlaneSettings]]:
    """(name, what it makes of the versions) of this control plane and, on the leader, of those that stand by; sorted by name."""
    said = [(holder_name(controller.leadership.owner), controller.in_force.said(controller.rollouts.up_s))]
    if controller.leadership.is_leader:
        said += [(holder_name(one.owner), one.settings) for one, _ in controller.peers.standbys()]
    return sorted(said, key=lambda pair: pair[0])


def pause_view(pause: Pause | None) -> dict[str, Any] | None:
    return None if pause is None else {"reason": pause.reason, "author": pause.author, "since": time_text(pause.since_wall_s)}


async def load_pause(controller: Controller) -> Pause | None:
    """As the store has it now, not as it was when the poller looked last."""
    return None if controller.file else await rows.load_pause(controller.store)


def summary(controller: Controller) -> dict[str, Any]:
    """For `/status`, as of the poller's last look."""
    poller, in_force = controller.settings_poller, controller.in_force
    return {
        "version": poller.newest,
        "desired": poller.desired,
        "live": in_force.live,
        "applied": in_force.applied,
        "held": poller.row.is_held(poller.newest),
        "rollout": _sentence(controller),
        "pause": pause_view(controller.paused()),
    }


def problems(controller: Controller) -> list[str]:
    """What of the settings needs a person."""
    poller, row = controller.settings_poller, controller.settings_poller.row
    found = []
    if row.phase is RolloutPhase.FROZEN:
        found.append(f"the roll-out of settings stands still: {row.reason or f'version {row.version} failed'}")
    held = _why_held(row, poller.newest)
    if held is not None:
        why = "" if row.phase is RolloutPhase.FROZEN and held in row.reason else f" ({held})"
        found.append(
            f"settings version {poller.newest} is held{why}: version {poller.desired} is in force, also for keys that are live;"
            f" `llmgw ctl config diff {poller.desired}` tells what was taken back"
        )
    waits = controller.in_force.pending if controller.leadership.is_leader and row.phase is RolloutPhase.IDLE else 0
    if waits and len(row.members) > 1 and not controller.peers.healthy():
        found.append(f"settings version {waits} waits: {controller.rollouts.describe()}")
    if poller.file_fault:
        found.append(f"{holder_name(controller.leadership.owner)}: {short(poller.file_fault)}")
    found += [
        f"settings version {one.refused} is not taken by {name}: {short(one.why)}"
        for name, one in _said(controller)
        if one.refused and one.refused >= poller.desired
    ]
    if (pause := controller.paused()) is not None:
        by = f" by {pause.author}" if pause.author else ""
        why = f": {pause.reason}" if pause.reason else ""
        since = time_text(pause.since_wall_s)
        found.append(f"paused{by} since {since}{why}; roll-outs, moves and scaling stand still until `llmgw ctl resume`")
    return found


def _why_held(row: RolloutRow, version: int) -> str | None:
    return next((held.why for held in row.held if held.version == version), None)


def plain(value: Any) -> Any:
    """As JSON has it."""
    if attrs.has(type(value)):
        return {field.name: plain(getattr(value, field.name)) for field in attrs.fields(type(value))}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    return value if value is None or isinstance(value, str | int | float) else str(value)


# --- the schema


def schema_view(sections: Sequence[Section]) -> dict[str, Any]:
    """Every table of settings with its keys. `array`: there may be many of it; `<name>` in a path stands for a name of one's own."""
    return {
        "sections": [
            {
                "name": _named(section.name),
                "help": section.help,
                "scope": section.scope.value,
                "array": section.array,
                "keys": [_key_view(section, row) for row in section.rows],
            }
            for section in sections
        ]
    }


def _key_view(section: Section, row: Row) -> dict[str, Any]:
    meta = row.meta
    return {
        "path": f"{_named(section.name)}.{row.name}",
        "type": row.type_text,
        "unit": meta.unit,
        "required": row.required,
        "default": None if row.required else plain(row.default),
        "low": meta.low,
        "high": meta.high,
        "choices": list(meta.choices),
        "scope": meta.scope.value,
        "applies": meta.applies.value,
        "secret": meta.secret,
        "help": meta.help,
        "example": plain(meta.example),
    }


def _named(section: str) -> str:
    return "engines.<name>" if section == f"engines.{ENGINE_SHOWN}" else section


_SCHEMA: Final = schema_view(settings_sections())


def _secret_paths() -> frozenset[str]:
    return frozenset(f"{section.name}.{row.name}" for section in settings_sections() for row in section.rows if row.meta.secret)


# --- what was sent


def read_reason(body: Mapping[str, Any]) -> str:
    reason = body.get("reason", "")
    if not isinstance(reason, str):
        raise Invalid("reason is a text", param="reason")
    return reason.strip()


def _keys(body: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    given, unset = body.get("set", {}), body.get("unset", [])
    if not isinstance(given, dict):
        raise Invalid('set is an object of dotted keys and values, as {"guard.max_messages": 100}', param="set")
    if not isinstance(unset, list) or not all(isinstance(path, str) for path in unset):
        raise Invalid("unset is a list of dotted keys", param="unset")
    if not given and not unset:
        raise Invalid("set and unset name no key", param="set")
    if len(given) + len(unset) > KEYS_MAX:
        raise Invalid(f"at most {KEYS_MAX} keys are changed at once", param="set")
    return given, unset


def _dry_run(call: Call) -> bool:
    text = call.query.get("dry_run", "false")
    if text not in _TRUE:
        raise Invalid("dry_run is true or false", param="dry_run")
    return _TRUE[text]


def _number(text: str, param: str) -> int:
    if not (text.isascii() and text.isdecimal()) or len(text) > 18:
        raise Invalid(f"{param} is the number of a version, not {text[:40]!r}", param=param)
    return int(text)


def _etag(version: int) -> dict[str, str]:
    return {"ETag": f'"{version}"'}


def _shortened(err: Invalid) -> Invalid:
    """The same error with no more faults than somebody reads."""
    if len(err.faults) <= FAULTS_MAX:
        return err
    what = err.message.partition(":\n")[0]
    more = Fault("", f"and {len(err.faults) - FAULTS_MAX} more faults")
    return Invalid.of(what, (*err.faults[:FAULTS_MAX], more))


def _counts(versions: Sequence[SettingsVersion]) -> dict[int, int]:
    """How many keys each of these, newest first and without a gap, changed in the one before it; the last is only compared with."""
    read = {version.version: _as_written(version) for version in versions}
    return {version.version: len(differences(read.get(version.parent, EMPTY), read[version.version])) for version in versions}


def _as_written(version: SettingsVersion) -> Document:
    """Without the schema's checks: an older version counts also where it does not load any more."""
    try:
        return Document(version.document, parse_toml(version.document, "a version"), EMPTY.settings)
    except Invalid:
        return EMPTY
