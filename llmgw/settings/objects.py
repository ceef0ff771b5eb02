"""Objects between their tables and the domain: models, keys of clients, endpoints. The file, the admin API and ctl use the same way.

Holds no catalog and reads no file; an endpoint's key comes from the environment that is passed in.
"""

from __future__ import annotations

import datetime
import hashlib
import re
from collections.abc import Mapping
from typing import Any, Final

import attrs

from llmgw.domain.endpoint import Endpoint
from llmgw.domain.errors import Fault, Invalid
from llmgw.domain.ids import EndpointId
from llmgw.domain.model import CPU_BY_DEFAULT, Catalog, ModelKind, ModelSpec, Profile, ReplicaCounts
from llmgw.domain.policy import ApiKey
from llmgw.domain.words import a_value
from llmgw.settings import secrets
from llmgw.settings.decode import read_table, short, sound
from llmgw.settings.schema import EndpointTable, KeyTable, ModelTable, ProfileTable, ReplicasTable, names_fault

_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_FIRST_WALL_S: Final = (datetime.datetime(1, 1, 1, tzinfo=datetime.UTC) - _EPOCH).total_seconds()
_LAST_WALL_S: Final = (datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC) - _EPOCH).total_seconds()
TIME_SHOWN_MAX: Final = 60  # characters of what is no time: twice the longest time
_RFC3339: Final = re.compile(r"(\d{4}-\d\d-\d\d)[Tt ](\d\d:\d\d:\d\d)(\.\d{1,9})?([Zz]|[+-]\d\d:\d\d)?\Z", re.ASCII)


# --- models ---


def model_from_table(raw: object, path: str = "model") -> ModelSpec:
    """A `[[model]]` table as a value. `path` begins the paths of its faults. Raises Invalid with all of them."""
    faults: list[Fault] = []
    spec = read_model(raw, path, faults)
    if spec is None:
        raise Invalid.of("the model is not valid", tuple(faults))
    return spec


def read_model(raw: object, path: str, faults: list[Fault]) -> ModelSpec | None:
    """As `model_from_table`, with the faults added to `faults` and None when there are any.

    What a model's keys say together is checked of those that are sound by themselves.
    """
    before = len(faults)
    table = read_table(ModelTable, raw, path, faults, elsewhere=_MODEL_KEYS_ELSEWHERE)
    if table is None:
        return None
    spec = ModelSpec(
        name=table.name,
        profiles=tuple(_profile(profile) for profile in table.profile),
        aliases=table.aliases,
        kind=ModelKind(table.kind),
        pool=table.pool,
        replicas=_counts(table.replicas),
        idle_stop_s=table.idle_stop_s,
    )
    found = spec.faults(path)
    if (repeated := _repeated(spec.names)) is not None:
        found.append(Fault(f"{path}.aliases", f"the name {repeated!r} is there twice", (f"{path}.name", f"{path}.aliases")))
    faults += sound(found, faults[before:])
    return spec if len(faults) == before else None


_MODEL_KEYS_ELSEWHERE: Final = (
    *(f"model.profile.{field.name}" for field in attrs.fields(ProfileTable)),
    *(f"model.replicas.{field.name}" for field in attrs.fields(ReplicasTable)),
    *(f"model.{field.name}" for field in attrs.fields(ModelTable)),
)


def _profile(table: ProfileTable) -> Profile:
    gpus = table.gpus if table.gpus is not None else (0 if table.engine in CPU_BY_DEFAULT else 1)
    return Profile(
        name=table.name or table.engine,
        engine=table.engine,
        checkpoint=table.checkpoint,
        gpus=gpus,
        share_gpu=table.share_gpu,
        memory_mib=table.memory_mib,
        args=table.args,
        env=table.env,
        selector=table.selector,
        priority=table.priority,
        weight=table.weight,
        command=table.command,
        ready_path=table.ready_path,
        url=table.url.rstrip("/"),
        api_key_env=table.api_key_env,
    )


def _counts(replicas: ReplicasTable | int) -> ReplicaCounts:
    """A count alone is min and max too. Else what is not said is one replica, as far as what is said allows."""
    if isinstance(replicas, int):
        return ReplicaCounts(replicas, replicas, replicas)
    least, most, count = replicas.min, replicas.max, replicas.count
    if count is not None and least is None and most is None:
        return ReplicaCounts(count, count, count)
    if least is None:
        least = min(number for number in (1, most, count) if number is not None)
    if most is None:
        most = max(least, 1 if count is None else count)
    if count is None:
        count = min(max(1, least), most)
    return ReplicaCounts(least, most, count)


def model_to_table(spec: ModelSpec) -> dict[str, Any]:
    """A model as the `[[model]]` table that makes it, without what is at its default. Fit for TOML and JSON."""
    table: dict[str, Any] = {"name": spec.name}
    if spec.aliases:
        table["aliases"] = list(spec.aliases)
    if spec.kind is not ModelKind.CHAT:
        table["kind"] = spec.kind.value
    if spec.pool != "default":
        table["pool"] = spec.pool
    counts = spec.replicas
    if counts.min == counts.max == counts.count:
        table["replicas"] = counts.count
    else:
        table["replicas"] = {"min": counts.min, "max": counts.max, "count": counts.count}
    if spec.idle_stop_s:
        table["idle_stop_s"] = spec.idle_stop_s
    table["profile"] = [_profile_to_table(profile) for profile in spec.profiles]
    return table


def _profile_to_table(profile: Profile) -> dict[str, Any]:
    table: dict[str, Any] = {"name": profile.name, "engine": profile.engine}
    usual = Profile(name=profile.name, engine=profile.engine, gpus=0 if profile.engine in CPU_BY_DEFAULT else 1)
    for field in attrs.fields(ProfileTable):
        value = getattr(profile, field.name)
        if field.name in table or value == getattr(usual, field.name):
            continue
        if isinstance(value, tuple):
            value = list(value)
        elif isinstance(value, Mapping):
            value = dict(value)
        table[field.name] = value
    return table


def read_models(raw: object, path: str, faults: list[Fault]) -> Catalog:
    """The `[[model]]` tables as a catalog, or an empty one after faults; names and aliases are each used once."""
    before = len(faults)
    models: list[ModelSpec] = []
    owner: dict[str, str] = {}
    for index, table in enumerate(_tables(raw, path, faults)):
        at = f"{path}[{index}]"
        spec = read_model(table, at, faults)
        for name in _names_in(table, "name", "aliases"):  # of a faulty table too: all faults are told at once
            if owner.setdefault(name, at) != at:
                faults.append(Fault(at, f"the name {name!r} is already used by {owner[name]}"))
        if spec is not None:
            models.append(spec)
    return Catalog(tuple(models)) if len(faults) == before else Catalog()


def _names_in(table: object, one: str, many: str = "") -> tuple[str, ...]:
    """The texts at the key `one` and in the list at `many` of a table that may hold anything."""
    if not isinstance(table, Mapping):
        return ()
    listed = table.get(many)
    found = [table.get(one), *(listed if isinstance(listed, list) else ())]
    return tuple(dict.fromkeys(name for name in found if isinstance(name, str) and name))


# --- keys of clients ---


def read_keys(raw: object, path: str, faults: list[Fault], warnings: list[str]) -> tuple[ApiKey, ...]:
    """The `[[auth.key]]` tables as values; each name and each key once."""
    found: list[ApiKey] = []
    names: dict[str, int] = {}
    hashes: dict[str, int] = {}
    for index, table in enumerate(_tables(raw, path, faults)):
        at = f"{path}[{index}]"
        before = len(faults)
        key = _read_key(table, at, faults, warnings)
        whole = len(faults) == before
        for name in _names_in(table, "name"):
            if names.setdefault(name, index) != index:
                faults.append(Fault(f"{at}.name", f"the name {name!r} is already used by {path}[{names[name]}]"))
        if key is None:
            continue
        if key.sha256 and hashes.setdefault(key.sha256, index) != index:
            faults.append(Fault(at, f"the same key as {path}[{hashes[key.sha256]}]"))
        if whole:
            found.append(key)
    return tuple(found)


def key_from_table(raw: object, path: str = "key") -> ApiKey:
    """One `[[auth.key]]` table as a value. Raises Invalid with every fault."""
    faults: list[Fault] = []
    key = _read_key(raw, path, faults, [])
    if key is None or faults:
        raise Invalid.of("the key is not valid", tuple(faults))
    return key


def key_to_table(key: ApiKey) -> dict[str, Any]:
    """A key as the `[[auth.key]]` table that makes it, every field of it. Fit for TOML and JSON."""
    return {
        "name": key.name,
        "sha256": key.sha256,
        "models": list(key.models),
        "max_parallel": key.max_parallel,
        "requests_per_minute": key.requests_per_minute,
        "tokens_per_minute": key.tokens_per_minute,
        "expires": "" if key.expires_wall_s is None else format_time(key.expires_wall_s),
        "operator": key.operator,
    }


def _read_key(raw: object, path: str, faults: list[Fault], warnings: list[str]) -> ApiKey | None:
    """The key of a table, None where it is no table. Beside faults it is good for nothing but its hash, "" where that is not sound."""
    before = len(faults)
    if isinstance(raw, Mapping) and isinstance(raw.get("expires"), datetime.datetime):
        raw = {**raw, "expires": raw["expires"].isoformat()}  # TOML has times of its own; they are taken as well
    table = read_table(KeyTable, raw, path, faults)
    if table is None:
        return None
    together: list[Fault] = []
    if bool(table.sha256) == bool(table.key):
        reason = "needs sha256 or key, not both" if table.key else "needs sha256 (or key)"
        together.append(Fault(path, reason, (f"{path}.sha256", f"{path}.key")))
    faults += sound(together, faults[before:])
    if any(not "!" <= c <= "~" for c in table.key):
        faults.append(Fault(f"{path}.key", "a key has printable ASCII characters only, and no spaces: no header could carry another"))
    expires_wall_s = None
    if table.expires:
        try:
            expires_wall_s = parse_time(table.expires)
        except ValueError as err:
            faults.append(Fault(f"{path}.expires", str(err)))
    if table.key and len(faults) == before:
        warnings.append(
            f'{path}.key: the key of {table.name!r} stands in the file as text; put its hash there: sha256 = "{hash_key(table.key)}"'
        )
    return ApiKey(
        name=table.name,
        sha256=table.sha256.lower() or (hash_key(table.key) if table.key else ""),
        models=table.models,
        max_parallel=table.max_parallel,
        requests_per_minute=table.requests_per_minute,
        tokens_per_minute=table.tokens_per_minute,
        expires_wall_s=expires_wall_s,
        operator=table.operator,
    )


def hash_key(text: str) -> str:
    """What is kept of a client's key: the SHA-256 of its UTF-8 text, in hex."""
    return hashlib.sha256(text.encode()).hexdigest()


def parse_time(text: str) -> float:
    """RFC 3339 with a zone as seconds since 1970. Raises ValueError with the reason."""
    match = _RFC3339.match(text)
    if match is None:
        raise ValueError(f'expected a time like "2030-01-01T00:00:00Z" (RFC 3339), not {short(text, TIME_SHOWN_MAX)!r}')
    day, clock, fraction, zone = match.groups()
    if zone is None:
        raise ValueError(f"the zone is missing: {text}Z for UTC, or with an offset such as {text}+01:00")
    offset = "+00:00" if zone in "Zz" else zone
    try:
        return datetime.datetime.fromisoformat(f"{day}T{clock}{(fraction or '')[:7]}{offset}").timestamp()
    except (ValueError, OverflowError) as err:
        raise ValueError(f"{text!r} is no time: {err}") from err


def format_time(wall_s: float) -> str:
    """Seconds since 1970 as RFC 3339 in UTC, to the microsecond where it is no whole second.

    A zone may put a time of `parse_time` beyond the years that are written with four digits: then it is the first or the last of them.
    """
    moment = _EPOCH + datetime.timedelta(seconds=min(max(wall_s, _FIRST_WALL_S), _LAST_WALL_S))
    return moment.isoformat().replace("+00:00", "Z")


# --- endpoints ---


def read_endpoints(raw: object, path: str, faults: list[Fault], environ: Mapping[str, str]) -> tuple[Endpoint, ...]:
    """The `[[endpoint]]` tables as values. Ids are used once, and an alias means one model wherever it stands."""
    found: list[Endpoint] = []
    drafts: list[tuple[str, EndpointTable]] = []
    ids: dict[str, int] = {}
    for index, table in enumerate(_tables(raw, path, faults)):
        at = f"{path}[{index}]"
        before = len(faults)
        draft = read_table(EndpointTable, table, at, faults)
        if draft is not None:
            if not any(fault.path.startswith((f"{at}.models", f"{at}.aliases")) for fault in faults[before:]):
                drafts.append((at, draft))
            faults += sound(_names_faults(draft, at), faults[before:])
            key = _endpoint_key(draft, at, faults, environ)
            if len(faults) == before:
                found.append(_endpoint(draft, key))
        for known in _names_in(table, "id"):
            if ids.setdefault(known, index) != index:
                faults.append(Fault(f"{at}.id", f"the id {known!r} is already used by {path}[{ids[known]}]"))
    _alias_faults(drafts, path, faults)
    return tuple(found)


def _names_faults(table: EndpointTable, path: str) -> list[Fault]:
    """What an endpoint's names say of each other and cannot mean."""
    models, aliases = f"{path}.models", f"{path}.aliases"
    served = {*table.models, *table.aliases}
    found = []
    if (reason := names_fault(tuple(table.aliases))) is not None:
        found.append(Fault(aliases, reason))
    for alias, model in table.aliases.items():
        if model not in table.models:
            found.append(Fault(aliases, f"{alias!r} stands for {model!r}, which is not among models", (aliases, models)))
        if alias in table.models:
            found.append(Fault(aliases, f"{alias!r} is the name of a model here", (aliases, models)))
    for name, theirs in table.names.items():
        at = f"{path}.names"
        if name not in served:
            found.append(Fault(at, f"{name!r} is neither among models nor among aliases", (at, aliases, models)))
        if not theirs:
            found.append(Fault(at, f"what the engine calls {name!r} must not be empty"))
    for name in table.unlisted:
        at = f"{path}.unlisted"
        if name not in served:
            found.append(Fault(at, f"{name!r} is neither among models nor among aliases", (at, aliases, models)))
    return found


def _endpoint_key(table: EndpointTable, path: str, faults: list[Fault], environ: Mapping[str, str]) -> str:
    """What the router presents to the engine, "" for nothing and beside a fault."""
    if not table.api_key_env:
        return ""
    try:
        key = secrets.read_environment(table.api_key_env, f"{path}.api_key_env", environ)
    except Invalid as err:
        faults.append(Fault(f"{path}.api_key_env", err.message.removeprefix(f"{path}.api_key_env: ")))
        return ""
    if any(not " " <= c <= "~" for c in key):
        faults.append(Fault(f"{path}.api_key_env", f"the value of {table.api_key_env} holds characters that no HTTP header may carry"))
    return key


def _endpoint(table: EndpointTable, key: str) -> Endpoint:
    return Endpoint(
        id=EndpointId(table.id),
        url=table.url.rstrip("/"),
        models=table.models,
        aliases=table.aliases,
        names=table.names,
        unlisted=table.unlisted,
        engine=table.engine,
        pool=table.pool,
        weight=table.weight,
        priority=table.priority,
        key=key,
        max_inflight=table.max_inflight,
    )


def _alias_faults(tables: list[tuple[str, EndpointTable]], path: str, faults: list[Fault]) -> None:
    """A client's name means one thing: a right to a model covers its aliases, so an alias of two models would leak one.

    `tables` are those whose models and aliases are sound, each with its path.
    """
    models = {model: at for at, table in reversed(tables) for model in table.models}
    called = {at: table.id or at for at, table in tables}
    means: dict[str, tuple[str, str]] = {}
    for at, table in tables:
        for alias, model in table.aliases.items():
            first, where = means.setdefault(alias, (model, at))
            if first != model:
                text = f"the alias {alias!r} stands for {first!r} at {called[where]!r} and for {model!r} at {called[at]!r}"
                faults.append(Fault(path, text))
            if alias in models and models[alias] != at:
                faults.append(Fault(path, f"{alias!r} is an alias at {called[at]!r} and a model at {called[models[alias]]!r}"))


def _tables(raw: object, path: str, faults: list[Fault]) -> list[object]:
    if raw is None:
        return []
    if not isinstance(raw, list):
        hint = f"; write [[{path}]]" if isinstance(raw, Mapping) else ""
        faults.append(Fault(path, f"expected a list of tables, not {a_value(raw)}{hint}"))
        return []
    return raw


def _repeated(names: tuple[str, ...]) -> str | None:
    return next((name for index, name in enumerate(names) if name in names[:index]), None)
