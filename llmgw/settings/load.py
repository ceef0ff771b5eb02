"""A file to values: every fault of it at once, each with its path, and what is worth a warning. Applies nothing and expands nothing."""

from __future__ import annotations

import enum
import errno
import hashlib
import os
import stat
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import attrs

from llmgw.domain.endpoint import Endpoint
from llmgw.domain.errors import Fault, Invalid, NotFound
from llmgw.domain.model import Catalog, ModelSpec
from llmgw.domain.policy import ApiKey, Policy
from llmgw.domain.setting import Scope
from llmgw.settings import not_yet, objects, place_holders
from llmgw.settings.address import TcpAddress, leads_to, parse_listen
from llmgw.settings.decode import field_types, given_paths, known_paths, read_table, sound
from llmgw.settings.schema import Settings, meta_of
from llmgw.settings.toml_text import parse_toml

DEFAULT_FILE: Final = Path("/etc/llmgw/llmgw.toml")
HALF_WRITTEN: Final = "it sets nothing, which is taken for a file that was not written whole"  # why a running process refuses it
FILE_BYTES_MAX: Final = 16 * 1024 * 1024  # chosen: thousands of models fit; a wrong path such as a checkpoint does not fill memory
OBJECT_TABLES: Final = ("model", "endpoint")
KEY_TABLE: Final = "auth.key"  # of objects too, beside the settings of [auth]


class Role(enum.Enum):
    """Which process reads the file: it decides what has no effect there and what must not be missing."""

    DEV = "dev"
    SERVER = "server"
    ROUTER = "router"
    AGENT = "agent"


@attrs.frozen
class Loaded:
    """A file's values. `given` are the dotted paths that stand in it; `sha256` is of its text, to notice a change.

    `cluster_keys` are those of `given` that a store's document replaces, `cluster_values` what stands there, as plain data.
    `habits` are cluster keys (`table.key`) whose default is another in this process, and by how it was started.
    """

    settings: Settings
    catalog: Catalog = Catalog()
    keys: tuple[ApiKey, ...] = ()
    endpoints: tuple[Endpoint, ...] = ()
    warnings: tuple[str, ...] = ()
    source: str = ""
    path: Path | None = None
    given: frozenset[str] = frozenset()
    cluster_keys: tuple[str, ...] = ()
    cluster_values: Mapping[str, Any] = attrs.field(factory=dict, eq=False, repr=False)
    sha256: str = ""
    habits: Mapping[str, Any] = attrs.field(factory=dict)

    @property
    def sets_nothing(self) -> bool:
        """Is it empty, or only comments and tables without keys? A running process takes such a file for one that is half written."""
        return not self.given and self.settings.store is None  # [store] alone says that there is one

    @property
    def models(self) -> tuple[ModelSpec, ...]:
        """The catalog's models, sorted by name."""
        return self.catalog.models

    @property
    def policy(self) -> Policy:
        """What a router must obey, as far as the file says it."""
        return policy_of(self.settings, self.keys)


def policy_of(settings: Settings, keys: tuple[ApiKey, ...]) -> Policy:
    """What routers obey under these settings. `[limits]` hold for keys that set none of their own."""
    limits = settings.limits
    limited = tuple(
        attrs.evolve(
            key,
            max_parallel=key.max_parallel or limits.max_parallel,
            requests_per_minute=key.requests_per_minute or limits.requests_per_minute,
            tokens_per_minute=key.tokens_per_minute or limits.tokens_per_minute,
        )
        for key in keys
    )
    return Policy(settings.route, settings.auth.required, limited, settings.router.cors_origins, settings.guard)


def load_file(path: Path, *, role: Role | None = None, environ: Mapping[str, str] | None = None) -> Loaded:
    """Reads and checks `path`. Raises NotFound without it, Invalid with every fault or when it cannot be read."""
    try:
        data = _read(path)
    except FileNotFoundError as err:
        raise NotFound(f"there is no file {path}{_led_nowhere(path)}", code="no_such_file") from err
    except OSError as err:
        raise Invalid(f"{path} cannot be read: {err.strerror or err}", code="unreadable_file") from err
    if len(data) > FILE_BYTES_MAX:
        raise Invalid(f"{path} is larger than {FILE_BYTES_MAX} bytes: that is no settings file")
    return attrs.evolve(load_bytes(data, source=str(path), role=role, environ=environ), path=path)


def _led_nowhere(path: Path) -> str:
    try:
        return f": it is a link to {os.readlink(path)}, which is not there"
    except OSError:  # it is no link
        return ""


def _read(path: Path) -> bytes:
    # A pipe whose other end is open would keep us waiting, so it is not waited for.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is a pipe")
        with open(descriptor, "rb", closefd=False) as stream:
            return stream.read(FILE_BYTES_MAX + 1)
    finally:
        os.close(descriptor)  # here, because open() would leave that of a folder open


def load_bytes(data: bytes, *, source: str, role: Role | None = None, environ: Mapping[str, str] | None = None) -> Loaded:
    """As `load_text`, from UTF-8. Raises Invalid when it is not."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as err:
        line = data[: err.start].count(b"\n") + 1
        raise Invalid(f"{source} is not UTF-8 text (line {line})") from err
    return load_text(text, source=source, role=role, environ=environ)


def load_text(text: str, *, source: str, role: Role | None = None, environ: Mapping[str, str] | None = None) -> Loaded:
    """Checks the text of a file. `source` names it in errors; `role` None checks what any process would.

    `environ` is where endpoints' keys are taken from, by default this process's. Raises Invalid with every fault.
    """
    raw = parse_toml(text, source)
    environ = os.environ if environ is None else environ
    faults: list[Fault] = []
    warnings: list[str] = []
    settings_raw, models_raw, keys_raw, endpoints_raw = _split(raw)
    settings = read_table(Settings, settings_raw, "", faults, elsewhere=(*known_paths(Settings), *OBJECT_TABLES, KEY_TABLE))
    catalog = objects.read_models(models_raw, "model", faults)
    keys = objects.read_keys(keys_raw, KEY_TABLE, faults, warnings)
    endpoints = objects.read_endpoints(endpoints_raw, "endpoint", faults, environ)
    if settings is not None:
        faults += sound(_role_faults(role, settings, endpoints), faults)
    if faults or settings is None:
        raise Invalid.of(f"{source} is not valid", tuple(faults))
    given = given_paths(raw)
    warnings += _role_warnings(role, settings, catalog, keys, endpoints)
    warnings += place_holders.warnings_of(catalog.models)
    warnings += place_holders.warnings_of_engines(settings)
    warnings += not_yet.warnings_of(given, settings, catalog.models)
    return Loaded(
        settings=settings,
        catalog=catalog,
        keys=keys,
        endpoints=endpoints,
        warnings=tuple(warnings),
        source=source,
        given=frozenset(given),
        cluster_keys=tuple(path for path in given if _scope_of(path) is Scope.CLUSTER),
        cluster_values={table: value for table, value in settings_raw.items() if table_scope(table) is Scope.CLUSTER},
        sha256=hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest(),
    )


def _split(raw: dict[str, Any]) -> tuple[dict[str, Any], Any, Any, Any]:
    """Settings apart from objects: (settings, models, keys, endpoints)."""
    settings = {key: value for key, value in raw.items() if key not in OBJECT_TABLES}
    keys = None
    auth = settings.get("auth")
    if isinstance(auth, dict) and "key" in auth:
        keys = auth["key"]
        settings["auth"] = {key: value for key, value in auth.items() if key != "key"}
    return settings, raw.get("model"), keys, raw.get("endpoint")


def _scope_of(path: str) -> Scope | None:
    """The scope of a dotted path of the file; None for objects."""
    table = path.partition(".")[0]
    if table in OBJECT_TABLES or path == KEY_TABLE:
        return None
    return table_scope(table)


def table_scope(table: str) -> Scope | None:
    """Whose the keys of a top-level table are: one table has one scope. None for what is no table of settings."""
    kind = field_types(Settings).get(table)
    if kind is None:
        return None
    inner = next(member for member in (kind, *typing.get_args(kind)) if attrs.has(member))
    return next(meta.scope for field in attrs.fields(inner) if (meta := meta_of(field)) is not None)


def _role_faults(role: Role | None, settings: Settings, endpoints: tuple[Endpoint, ...]) -> list[Fault]:
    if role is Role.AGENT and not settings.agent.control_planes:
        return [Fault("agent.control_planes", "an agent needs the address of at least one control plane")]
    if role in (Role.AGENT, Role.DEV) or (role is not Role.ROUTER and not settings.router.embedded):
        return []  # nobody listens there; the options of `dev` may say where it does
    return own_endpoint_faults(settings.router.listen, endpoints)


def _unserved(keys: tuple[ApiKey, ...], endpoints: tuple[Endpoint, ...], catalog: Catalog) -> list[str]:
    """A warning for each key that names a model which this file, where it is all there is, has nobody serve."""
    served = {name for model in catalog.models for name in model.names}
    served |= {name for endpoint in endpoints for name in (*endpoint.models, *endpoint.aliases)}
    if not served:
        return []
    unserved = [(key.name, [name for name in key.models if name not in served]) for key in keys if "*" not in key.models]
    what = "endpoint or model" if catalog.models else "endpoint"
    return [f"auth.key: {key!r} may use {', '.join(map(repr, names))}, which no {what} serves" for key, names in unserved if names]


def expired(keys: tuple[ApiKey, ...], wall_s: float) -> list[str]:
    """A warning for each key that has ended by `wall_s`, the time of day."""
    return [
        f"auth.key: {key.name!r} has expired ({objects.format_time(key.expires_wall_s)}) and is refused"
        for key in keys
        if key.expires_wall_s is not None and key.expires_wall_s <= wall_s
    ]


def own_endpoint_faults(listen: str, endpoints: tuple[Endpoint, ...]) -> list[Fault]:
    """Endpoints that are the router itself, which listens on `listen`: a request for one would go round until something is full."""
    return [
        Fault(
            "endpoint",
            f"{one.id!r} at {one.url} is this router itself (router.listen is {listen}), which would ask itself without end",
            ("endpoint", "router.listen"),
        )
        for one in endpoints
        if leads_to(one.url, listen)
    ]


def _role_warnings(
    role: Role | None, settings: Settings, catalog: Catalog, keys: tuple[ApiKey, ...], endpoints: tuple[Endpoint, ...]
) -> list[str]:
    found: list[str] = []
    alone = role is Role.ROUTER and not settings.router.control_planes
    if role is Role.ROUTER and catalog.models:
        found.append("[[model]] has no effect for a router, which takes endpoints only")
    if alone and not endpoints:
        found.append("no [[endpoint]] and no router.control_planes: this router has nothing to route to")
    if role is Role.SERVER and settings.router.embedded and settings.router.control_planes:
        found.append("router.control_planes has no effect while router.embedded is true: that router is fed in this process")
    if role in (Role.SERVER, Role.DEV) and settings.router.embedded and settings.router.workers > 1:
        found.append("router.workers has no effect while router.embedded is true: that router is a part of this process")
    if alone and settings.auth.required and not keys:
        found.append("auth.required is true and there is no [[auth.key]]: every call of /v1 will be refused")
    if alone or (role in (None, Role.SERVER) and settings.store is None and not settings.router.control_planes):
        found += _unserved(keys, endpoints, catalog if role is not Role.ROUTER else Catalog())
    listens = settings.router.listen if role in (Role.ROUTER, Role.SERVER, Role.DEV) else ""
    if listens and not settings.auth.required:
        where = parse_listen(listens)
        if isinstance(where, TcpAddress) and not where.loopback:
            found.append(f"auth.required is false and router.listen is {listens}: anybody who reaches that address may call /v1")
    return found
