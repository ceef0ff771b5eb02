"""Every setting, declared once: type, unit, range, default, scope, when it applies, help.

The loader, `llmgw check`, the example file and the reference page all read this. Nothing here reads a file. `[route]` and
`[guard]` are declared in `domain.policy`, because a router obeys them. Tables that a later release brings into force are
declared too, so that a file written for it is held to the same rules now.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Protocol, runtime_checkable

import attrs

from llmgw.domain.errors import Fault
from llmgw.domain.event import Level
from llmgw.domain.model import ENGINES, PLACE_HOLDERS, ModelKind
from llmgw.domain.policy import GuardPolicy, RouteSettings
from llmgw.domain.setting import META, TABLE, Applies, Scope, SettingMeta, name_fault, needed_name_fault, setting, tables
from llmgw.settings import address as addresses
from llmgw.settings import secrets

_M, _C, _O = Scope.MACHINE, Scope.CLUSTER, Scope.OBJECT
_LIVE, _RESTART = Applies.LIVE, Applies.RESTART

NAMES: Final = "llmgw.names"  # the metadata of a table of tables: the names it may hold

# Chosen: nobody waits longer than a day for one step, and a typo of three zeros is caught.
_DAY_S: Final = 86_400
_COUNT_MAX: Final = 1_000_000_000

ENDPOINT_ENGINES: Final = ("vllm", "sglang", "llama.cpp", "ollama", "openai")
STARTED_ENGINES: Final = tuple(name for name in ENGINES if name != "openai")
FILE_MODE_PATH: Final = "llmgw.db"


@runtime_checkable
class Checked(Protocol):
    """A table whose keys are checked together.

    Asked also where some keys are at fault by themselves, with defaults in their place: a fault names what it `looked_at`,
    and is dropped where one of those is at fault.
    """

    def faults(self, path: str) -> list[Fault]: ...


def _pair_faults(certificate: str, key: str, certificate_path: str, key_path: str) -> list[Fault]:
    if bool(certificate) == bool(key):
        return []
    where = key_path if certificate else certificate_path
    return [Fault(where, "a certificate and its key come together; this one is missing", (certificate_path, key_path))]


def _table(cls: type, help: str) -> Any:
    """A field that is a `[table]` of its own."""
    return attrs.field(factory=cls, metadata={TABLE: help})


def _no_engines() -> Mapping[str, Any]:
    return MappingProxyType({})


def _path_fault(value: str) -> str | None:
    if not value:
        return None
    if not value.startswith("/") or "\0" in value:
        return f"expected an absolute path, not {value!r}"
    return None


def _needed_path_fault(value: str) -> str | None:
    return "must not be empty" if not value else _path_fault(value)


def _labels_fault(value: Mapping[str, str]) -> str | None:
    for name, text in value.items():
        if (reason := needed_name_fault(name) or name_fault(text)) is not None:
            return f"label {name!r}: {reason}"
    return None


@attrs.frozen
class ServerSettings:
    """`[server]`: the control plane of this machine."""

    name: str = setting(
        "", help="What this control plane is called; empty: the machine's host name.", scope=_M, check=name_fault, example="ctl-1"
    )
    data_dir: str = setting(
        "/var/lib/llmgw", help="Owner, epoch and token files, caches, logs. One running process each.", scope=_M, check=_needed_path_fault
    )
    admin_listen: str = setting(
        "127.0.0.1:8081",
        help="Where the admin API and the console listen: host:port or [v6]:port.",
        scope=_M,
        check=addresses.tcp_listen_fault,
    )
    advertise: str = setting(
        "", help="How other control planes, routers and agents reach this one; empty: http:// and admin_listen.", scope=_M,
        check=addresses.optional_url_fault, example="https://ctl-1.example:8081",
    )  # fmt: skip

    @property
    def data_path(self) -> Path:
        """`data_dir`, absolute."""
        return Path(self.data_dir).expanduser().absolute()


# Every client of the store has to make the same names of it, and some encode other characters or fold what looks like a folder.
_REPLICA: Final = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/(?!\.\.?(/|\Z))[A-Za-z0-9._=-]+)*/?\Z")


def _replica_fault(value: str) -> str | None:
    if not value or _REPLICA.match(value) is not None:
        return None
    return f'expected "s3://bucket/prefix" with letters, digits and . _ = - between single slashes, not {value!r}'


def _region_fault(value: str) -> str | None:
    if re.match(r"[A-Za-z0-9_-]{1,64}\Z", value) is None:
        return f'expected a region such as "eu-central-1", not {value!r}; a store that has none takes "us-east-1"'
    return None


def _credentials_fault(value: str) -> str | None:
    if value == "env" or (value.startswith("file:/") and "\0" not in value):
        return None
    return 'expected "env" or "file:/PATH"'


def _store_path_fault(value: str) -> str | None:
    return "must not be empty" if not value or "\0" in value else None


@attrs.frozen
class StoreSettings:
    """`[store]`: where cluster settings, models and events are kept."""

    path: str = setting(
        FILE_MODE_PATH, help="The database: relative to [server] data_dir, or absolute. Shared by one machine's control planes.", scope=_M,
        check=_store_path_fault,
    )  # fmt: skip
    replica: str = setting(
        "", help="The object store's bucket and prefix that holds its replica; empty: file mode.", scope=_M, check=_replica_fault,
        example="s3://bucket/prefix",
    )  # fmt: skip
    s3_endpoint: str = setting(
        "", help="The object store's address; empty: AWS.", scope=_M, check=addresses.optional_url_fault, example="https://s3.example:9000"
    )
    s3_region: str = setting("us-east-1", help="The object store's region.", scope=_M, check=_region_fault)
    s3_credentials: str = setting(
        "env",
        help='"env": AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN; or "file:/PATH", whose lines say NAME=value.',
        scope=_M,
        check=_credentials_fault,
    )


@attrs.frozen
class RouterSettings:
    """`[router]`: the data plane of this machine."""

    embedded: bool = setting(True, help="`llmgw server` runs the router in its own process.", scope=_M)
    listen: str = setting(
        "127.0.0.1:8080", help="Where /v1 listens: host:port, [v6]:port or unix:/path.", scope=_M, check=addresses.listen_fault
    )
    workers: int = setting(1, help="Worker processes of a separate router; they share its port.", scope=_M, low=1, high=256)
    control_planes: tuple[str, ...] = setting(
        (), help="A separate router follows these; empty: it serves what its file says.", scope=_M, check=addresses.urls_fault,
        example=("https://ctl-1.example:8081", "https://ctl-2.example:8081"),
    )  # fmt: skip
    token_file: str = setting(
        "", help="What a separate router shows to control planes until it has a certificate.", scope=_M, check=_path_fault,
        example="/var/lib/llmgw/agent-token",
    )  # fmt: skip
    data_dir: str = setting(
        "/var/lib/llmgw-router",
        help="What was last pushed is kept here; unused without control_planes.",
        scope=_M,
        check=_needed_path_fault,
    )
    tls_certificate: str = setting(
        "",
        help="The public port's own certificate (PEM); empty: as in [tls].",
        scope=_M,
        check=_path_fault,
        example="/etc/llmgw/public.pem",
    )
    tls_key: str = setting("", help="The key of tls_certificate (PEM).", scope=_M, check=_path_fault, example="/etc/llmgw/public-key.pem")
    cors_origins: tuple[str, ...] = setting(
        (), help='Browser origins that may call /v1: "https://app.example", or "*".', scope=_M, check=addresses.origins_fault,
        example=("https://app.example",),
    )  # fmt: skip

    def faults(self, path: str) -> list[Fault]:
        return _pair_faults(self.tls_certificate, self.tls_key, f"{path}.tls_certificate", f"{path}.tls_key")


@attrs.frozen
class AgentSettings:
    """`[agent]`: this machine as a node."""

    name: str = setting("", help="What this node is called; empty: the machine's host name.", scope=_M, check=name_fault, example="gpu-1")
    control_planes: tuple[str, ...] = setting(
        (), help="The agent keeps a session with each of these.", scope=_M, check=addresses.urls_fault,
        example=("https://ctl-1.example:8081", "https://ctl-2.example:8081"),
    )  # fmt: skip
    facility: str = setting(
        "",
        help="The room, rack or power domain this node stands in; replicas spread over them.",
        scope=_M,
        check=name_fault,
        example="room-1",
    )
    labels: Mapping[str, str] = setting(
        factory=lambda: MappingProxyType({}),
        help="What profiles may select nodes by.",
        scope=_M,
        check=_labels_fault,
        example={"gpu": "h100"},
    )
    data_dir: str = setting(
        "/var/lib/llmgw-agent", help="The node's id, state of its replicas, logs of its engines.", scope=_M, check=_needed_path_fault
    )
    checkpoints_dir: str = setting(
        "", help="Where models' files are kept; empty: checkpoints in data_dir.", scope=_M, check=_path_fault,
        example="/var/lib/llmgw-agent/checkpoints",
    )  # fmt: skip
    address: str = setting(
        "127.0.0.1", help="Engines listen here; routers on other machines need one they can reach.", scope=_M,
        check=lambda value: addresses.listen_fault(f"[{value}]:1" if ":" in value else f"{value}:1"),
    )  # fmt: skip
    engine_ports: str = setting(
        "20000-20999", help="The range engines get their ports from, inclusive.", scope=_M, check=addresses.ports_fault
    )
    token_file: str = setting(
        "", help="What the agent shows until it has a certificate; empty: the agent-token file of this machine's control plane.", scope=_M,
        check=_path_fault, example="/var/lib/llmgw/agent-token",
    )  # fmt: skip

    @property
    def checkpoints_path(self) -> Path:
        """`checkpoints_dir`, or its default in `data_dir`."""
        return Path(self.checkpoints_dir) if self.checkpoints_dir else Path(self.data_dir) / "checkpoints"

    @property
    def ports(self) -> tuple[int, int]:
        """`engine_ports` as numbers, both included."""
        return addresses.parse_ports(self.engine_ports)


@attrs.frozen
class LogSettings:
    """`[log]`: what a process writes to its standard error."""

    level: str = setting("info", help="The least that is logged.", scope=_M, choices=("debug", "info", "warning", "error"))
    format: str = setting("auto", help="auto: coloured text on a terminal, logfmt elsewhere.", scope=_M, choices=("auto", "logfmt", "json"))


@attrs.frozen
class MetricsSettings:
    """`[metrics]`: who may read /metrics."""

    token: str = setting(
        "", help='"env:NAME" or "file:/PATH": what /metrics asks for where it is not on loopback.', scope=_M, secret=True,
        check=secrets.reference_fault, example="file:/etc/llmgw/metrics-token",
    )  # fmt: skip


@attrs.frozen
class TlsSettings:
    """`[tls]`: this machine's certificate; empty: the cluster's own CA, or none on loopback."""

    certificate: str = setting("", help="Certificate chain (PEM).", scope=_M, check=_path_fault, example="/etc/llmgw/tls.pem")
    key: str = setting("", help="Its key (PEM).", scope=_M, check=_path_fault, example="/etc/llmgw/tls-key.pem")
    ca: str = setting(
        "", help="Certificates of others are checked against these (PEM).", scope=_M, check=_path_fault, example="/etc/llmgw/ca.pem"
    )
    plain: str = setting(
        "loopback",
        help="Where ports speak plain HTTP without a certificate: on loopback; never; anywhere: whoever stands between reads all of it.",
        scope=_M,
        choices=("loopback", "never", "anywhere"),
    )

    def secures(self, *, loopback: bool) -> bool:
        """Is a port TLS, be it with the cluster's own certificate, that is on loopback or not?"""
        return bool(self.certificate) or self.plain == "never" or (self.plain == "loopback" and not loopback)

    def faults(self, path: str) -> list[Fault]:
        return _pair_faults(self.certificate, self.key, f"{path}.certificate", f"{path}.key")


@attrs.frozen
class LeaseSettings:
    """`[lease]`: how long leadership lasts unrenewed. 3 renew_s <= ttl_s."""

    ttl_s: float = setting(15.0, help="How long the lease lasts unrenewed.", scope=_C, applies=_RESTART, unit="s", low=2, high=300)
    renew_s: float = setting(
        5.0, help="Between renewals; at most a third of ttl_s.", scope=_C, applies=_RESTART, unit="s", low=0.05, high=100
    )
    poll_s: float = setting(1.0, help="Between a standby's looks at the lease.", scope=_C, applies=_RESTART, unit="s", low=0.05, high=60)

    def faults(self, path: str) -> list[Fault]:
        found = []
        if 3 * self.renew_s > self.ttl_s:  # a renewal may fail twice and the third still comes in time (control.md 2.1)
            reason = f"must be at most a third of ttl_s ({self.ttl_s:g} s), not {self.renew_s:g}"
            found.append(Fault(f"{path}.renew_s", reason, (f"{path}.renew_s", f"{path}.ttl_s")))
        if self.poll_s > self.ttl_s:
            reason = f"must be at most ttl_s ({self.ttl_s:g} s), not {self.poll_s:g}"
            found.append(Fault(f"{path}.poll_s", reason, (f"{path}.poll_s", f"{path}.ttl_s")))
        return found


@attrs.frozen
class RolloutSettings:
    """`[rollout]`: how a settings version reaches every control plane."""

    standby_timeout_s: float = setting(
        120.0, help="A standby that is not back after this stops the roll-out.", scope=_C, applies=_LIVE, unit="s", low=5, high=3600
    )
    leader_delay_s: float = setting(
        30.0, help="The leader restarts when its successor has led this long.", scope=_C, applies=_LIVE, unit="s", low=5, high=3600
    )


@attrs.frozen
class BrakeSettings:
    """`[reconcile.brake]`: when too much looks dead at once, move nothing."""

    share: float = setting(0.34, help="More than this share of the nodes silent.", scope=_C, applies=_LIVE, low=0, high=1)
    min_nodes: int = setting(3, help="And at least so many nodes silent.", scope=_C, applies=_LIVE, low=1, high=100_000)
    window_s: float = setting(60.0, help="Within this time.", scope=_C, applies=_LIVE, unit="s", low=5, high=600)


def _backoff_fault(value: tuple[float, ...]) -> str | None:
    if not 1 <= len(value) <= 32:
        return f"expected 1 to 32 numbers, not {len(value)}"
    for number in value:
        if not (math.isfinite(number) and 0 <= number <= _DAY_S):
            return f"each must be between 0 and {_DAY_S} s, not {number:g}"
    return None


@attrs.frozen
class ReconcileSettings:
    """`[reconcile]`: how the cluster is kept as it was asked for. node_lost_after_s >= 3 heartbeat_s."""

    tick_s: float = setting(1.0, help="Longest time between two looks at what is.", scope=_C, applies=_LIVE, unit="s", low=0.05, high=60)
    heartbeat_s: float = setting(10.0, help="Between an agent's signs of life.", scope=_C, applies=_LIVE, unit="s", low=0.1, high=600)
    node_lost_after_s: float = setting(
        30.0, help="A node silent for this long is lost; at least three heartbeats.", scope=_C, applies=_LIVE, unit="s", low=0.3, high=3600
    )
    grace_s: float = setting(
        60.0, help="A new leader waits this long for a node's first answer before its replicas count as missing.", scope=_C, applies=_LIVE,
        unit="s", low=0, high=3600,
    )  # fmt: skip
    restart_backoff_s: tuple[float, ...] = setting(
        (1.0, 2.0, 4.0, 8.0, 16.0, 30.0), help="Before each start after a crash; the last repeats.", scope=_C, applies=_LIVE, unit="s",
        check=_backoff_fault,
    )  # fmt: skip
    crash_loop_attempts: int = setting(
        6, help="Starts in a row, the first included, before a replica has failed; ready for 10 minutes resets the count.", scope=_C,
        applies=_LIVE, low=1, high=1000,
    )  # fmt: skip
    starts_max: int = setting(8, help="Replicas that start at the same time.", scope=_C, applies=_LIVE, low=1, high=10_000)
    brake: BrakeSettings = _table(BrakeSettings, "When too much looks dead at once, move nothing.")

    def faults(self, path: str) -> list[Fault]:
        least_s = 3 * self.heartbeat_s
        if self.node_lost_after_s >= least_s:
            return []
        reason = f"must be at least three times heartbeat_s ({least_s:g} s), not {self.node_lost_after_s:g}"
        return [Fault(f"{path}.node_lost_after_s", reason, (f"{path}.node_lost_after_s", f"{path}.heartbeat_s"))]


@attrs.frozen
class PlacementSettings:
    """`[placement]`: where a replica goes when several nodes could take it."""

    spread: str = setting(
        "facility", help="What replicas of a model are spread over: facility, or a label's name.", scope=_C, applies=_LIVE,
        check=needed_name_fault,
    )  # fmt: skip
    pack: bool = setting(True, help="Fill GPUs of used nodes first, so that large models find empty ones.", scope=_C, applies=_LIVE)


@attrs.frozen
class PublishSettings:
    """`[publish]`: how endpoints reach routers."""

    interval_s: float = setting(
        1.0, help="Longest time between two lists; a change is sent at once.", scope=_C, applies=_LIVE, unit="s", low=0.2, high=10
    )


@attrs.frozen
class AuthSettings:
    """`[auth]`: who may call /v1."""

    required: bool = setting(
        True, help="Callers of /v1 need a key; false: anybody may call (the default of `llmgw dev` on loopback).", scope=_C, applies=_LIVE
    )


@attrs.frozen
class LimitsSettings:
    """`[limits]`: for keys that set none. 0: no limit."""

    max_parallel: int = setting(0, help="Requests of one key at a time; 0: no limit.", scope=_C, applies=_LIVE, low=0, high=_COUNT_MAX)
    requests_per_minute: int = setting(0, help="Requests of one key; 0: no limit.", scope=_C, applies=_LIVE, low=0, high=_COUNT_MAX)
    tokens_per_minute: int = setting(0, help="Tokens of one key; 0: no limit.", scope=_C, applies=_LIVE, low=0, high=_COUNT_MAX)


@attrs.frozen
class UsageSettings:
    """`[usage]`: who used how much."""

    keep_months: int = setting(13, help="How long usage is kept.", scope=_C, applies=_LIVE, unit="months", low=1, high=1200)


def _command_fault(value: tuple[str, ...]) -> str | None:
    if value and (not value[0] or any("\0" in part for part in value)):
        return "the first part is the program and must not be empty" if not value[0] else "a part holds a NUL byte"
    return None


@attrs.frozen
class EngineSettings:
    """`[engines.<name>]`: an engine on this cluster's nodes. Applies to its next start."""

    command: tuple[str, ...] = setting(
        (), help="The engine's program with leading arguments; empty: found in PATH.", scope=_C, applies=_LIVE, check=_command_fault,
        example=("/opt/vllm/bin/vllm",),
    )  # fmt: skip
    load_limit_s: float = setting(1800.0, help="Longest time from start to ready.", scope=_C, applies=_LIVE, unit="s", low=1, high=604_800)
    progress_limit_s: float = setting(
        60.0, help="With requests running and no progress for this long, the engine is probed and restarted.", scope=_C, applies=_LIVE,
        unit="s", low=1, high=_DAY_S,
    )  # fmt: skip


@attrs.frozen
class EventsSettings:
    """`[events]`: the history of what the cluster did."""

    keep_days: int = setting(90, help="How long events are kept.", scope=_C, applies=_LIVE, unit="days", low=1, high=36_500)


@attrs.frozen
class NotifySettings:
    """`[notify]`: alarms to a webhook."""

    url: str = setting(
        "", help="Gets one POST per event at or above level; empty: none.", scope=_C, applies=_LIVE, check=addresses.optional_url_fault,
        example="https://hooks.example/llmgw",
    )  # fmt: skip
    level: str = setting(
        "warning", help="The least that is posted.", scope=_C, applies=_LIVE, choices=tuple(level.value for level in Level)
    )


@attrs.frozen
class Settings:
    """Everything a process is told, apart from objects. `store` None: no `[store]` table, a lone control plane on its file."""

    server: ServerSettings = _table(ServerSettings, "The control plane of this machine.")
    store: StoreSettings | None = attrs.field(
        default=None,
        metadata={TABLE: "Where cluster settings, models and events are kept. Without this table: a lone control plane on its file."},
    )
    router: RouterSettings = _table(RouterSettings, "The data plane of this machine.")
    agent: AgentSettings = _table(AgentSettings, "This machine as a node.")
    log: LogSettings = _table(LogSettings, "What a process writes to its standard error.")
    metrics: MetricsSettings = _table(MetricsSettings, "Who may read /metrics.")
    tls: TlsSettings = _table(TlsSettings, "This machine's certificate; empty: the cluster's own CA, or none on loopback.")
    lease: LeaseSettings = _table(LeaseSettings, "How long leadership lasts unrenewed.")
    rollout: RolloutSettings = _table(RolloutSettings, "How a settings version reaches every control plane.")
    reconcile: ReconcileSettings = _table(ReconcileSettings, "How the cluster is kept as it was asked for.")
    placement: PlacementSettings = _table(PlacementSettings, "Where a replica goes when several nodes could take it.")
    publish: PublishSettings = _table(PublishSettings, "How endpoints reach routers.")
    route: RouteSettings = _table(RouteSettings, "How requests are relayed.")
    auth: AuthSettings = _table(AuthSettings, "Who may call /v1.")
    guard: GuardPolicy = _table(GuardPolicy, "What a request may hold.")
    limits: LimitsSettings = _table(LimitsSettings, "For keys that set none of their own.")
    usage: UsageSettings = _table(UsageSettings, "Who used how much.")
    engines: Mapping[str, EngineSettings] = attrs.field(
        factory=_no_engines,
        metadata={TABLE: "An engine on this cluster's nodes, by its name; applies to its next start.", NAMES: STARTED_ENGINES},
    )
    events: EventsSettings = _table(EventsSettings, "The history of what the cluster did.")
    notify: NotifySettings = _table(NotifySettings, "Alarms to a webhook.")

    def engine(self, name: str) -> EngineSettings:
        """What is set for an engine, or the defaults."""
        return self.engines.get(name) or EngineSettings()

    def faults(self, path: str) -> list[Fault]:
        listen, admin = self.router.listen, self.server.admin_listen
        if self.router.embedded and listen == admin and not listen.endswith(":0"):
            looked_at = ("router.listen", "server.admin_listen", "router.embedded")
            return [Fault("router.listen", f"the same address as server.admin_listen ({admin})", looked_at)]
        return []

    @property
    def store_path(self) -> Path | None:
        """The database's path, or None without a store."""
        return None if self.store is None else self.server.data_path / Path(self.store.path).expanduser()

    @property
    def advertise(self) -> str:
        """`server.advertise` without a trailing slash, or the address that follows from `server.admin_listen`."""
        return self.server.advertise.rstrip("/") or f"http://{self.server.admin_listen}"


# --- objects: tables that name things; in a store they have tables of their own ---


def _some_fault(value: tuple[str, ...]) -> str | None:
    if not value:
        return "must name at least one"
    return names_fault(value)


def names_fault(value: tuple[str, ...]) -> str | None:
    """Names of models in a list: none empty, none that cannot be one, none twice."""
    return next((fault for name in value if (fault := model_name_fault(name)) is not None), None) or addresses.repeated_fault(value)


def model_name_fault(value: str) -> str | None:
    """A name that clients and operators see and that stands in paths of addresses."""
    if not value:
        return "a name must not be empty"
    if value in (".", ".."):  # every client and proxy takes them out of a path before it is sent
        return f"{value!r} cannot be a name: in the path of an address it means a folder"
    # Also those that turn the direction of what follows, or show as nothing: two names that look the same would be two models.
    hidden = next((c for c in value if not c.isprintable()), None)
    if hidden is not None:
        return f"a name must not hold control characters or invisible ones; this one holds U+{ord(hidden):04X}"
    return None


def _env_fault(value: Mapping[str, str]) -> str | None:
    for name, text in value.items():
        if not name or "=" in name or "\0" in name or "\0" in text:
            return f"{name!r} is not an environment variable's name, or its value holds a NUL byte"
    return None


@attrs.frozen
class ReplicasTable:
    """`replicas = { … }`; a bare number is count alone."""

    min: int | None = setting(None, help="Never fewer while ready ones exist.", scope=_O, applies=_LIVE, low=0, high=10_000)
    max: int | None = setting(None, help="Never more.", scope=_O, applies=_LIVE, low=0, high=10_000)
    count: int | None = setting(
        None, help="How many now: what `ctl model scale` sets. Alone: min and max too.", scope=_O, applies=_LIVE, low=0, high=10_000
    )


@attrs.frozen
class ProfileTable:
    """`[[model.profile]]`: one way to run the model."""

    engine: str = setting(help="The program that serves it.", scope=_O, applies=_LIVE, choices=ENGINES, example="vllm")
    name: str = setting(
        "", help="What the profile is called; empty: as its engine.", scope=_O, applies=_LIVE, check=name_fault, example="vllm"
    )
    checkpoint: str = setting("", help="The model's files: a path or a repo id.", scope=_O, applies=_LIVE, example="/models/llama-8b")
    gpus: int | None = setting(
        None, help="GPUs of one replica; 0: the CPU device. Default: 0 for xllamacpp, command and openai, else 1.", scope=_O, applies=_LIVE,
        low=0, high=1024, example=1,
    )  # fmt: skip
    share_gpu: bool = setting(False, help="May stand on one GPU with others, as far as memory goes.", scope=_O, applies=_LIVE)
    memory_mib: int = setting(
        0, help="Memory of one replica over all its devices; 0: the checkpoint's files x 1.2 + 512 MiB until measured.",
        scope=_O, applies=_LIVE, unit="MiB", low=0, high=1_073_741_824,
    )  # fmt: skip
    args: tuple[str, ...] = setting((), help="Passed to the engine.", scope=_O, applies=_LIVE, example=("--max-model-len", "16384"))
    env: Mapping[str, str] = setting(
        factory=lambda: MappingProxyType({}), help="Environment of the engine.", scope=_O, applies=_LIVE, check=_env_fault,
        example={"VLLM_LOGGING_LEVEL": "WARNING"},
    )  # fmt: skip
    selector: Mapping[str, str] = setting(
        factory=lambda: MappingProxyType({}), help="Labels a node must carry.", scope=_O, applies=_LIVE, check=_labels_fault,
        example={"gpu": "h100"},
    )  # fmt: skip
    priority: int = setting(0, help="Lower is preferred.", scope=_O, applies=_LIVE, low=-1000, high=1000)
    weight: float = setting(1.0, help="Of a replica, in routing.", scope=_O, applies=_LIVE, low=0, high=1_000_000)
    command: tuple[str, ...] = setting(
        (), help=f'For engine "command": its command line, with {" ".join(f"{{{name}}}" for name in PLACE_HOLDERS)}.', scope=_O,
        applies=_LIVE, check=_command_fault, example=("/opt/x", "--port", "{port}"),
    )  # fmt: skip
    ready_path: str = setting("/health", help='For engine "command": answers 200 when it is up.', scope=_O, applies=_LIVE)
    url: str = setting(
        "", help='For engine "openai": the address, without /v1.', scope=_O, applies=_LIVE,
        check=lambda value: addresses.engine_url_fault(value) if value else None, example="https://api.example",
    )  # fmt: skip
    api_key_env: str = setting(
        "",
        help="The environment variable that holds the engine's key.",
        scope=_O,
        applies=_LIVE,
        check=secrets.env_name_fault,
        example="NAME",
    )


@attrs.frozen
class ModelTable:
    """`[[model]]`: what clients name. `ctl model apply -f FILE` takes the same tables."""

    name: str = setting(help="What clients name.", scope=_O, applies=_LIVE, check=model_name_fault, example="llama-8b")
    aliases: tuple[str, ...] = setting((), help="Other names for it.", scope=_O, applies=_LIVE, check=names_fault, example=("fast",))
    kind: str = setting(
        "chat", help="What it does, which picks the probe.", scope=_O, applies=_LIVE, choices=tuple(kind.value for kind in ModelKind)
    )
    pool: str = setting("default", help="A label for listings; routing ignores it.", scope=_O, applies=_LIVE, check=name_fault)
    replicas: ReplicasTable | int = setting(
        1, help="How many: a number, or { min, max, count }.", scope=_O, applies=_LIVE, low=0, high=10_000,
        example={"min": 1, "max": 2, "count": 1},
    )  # fmt: skip
    idle_stop_s: float = setting(
        0.0, help="Replicas stop when unused for this long; 0: never.", scope=_O, applies=_LIVE, unit="s", low=0, high=31_536_000
    )
    profile: tuple[ProfileTable, ...] = tables("Ways to run it: the first by priority, unless `ctl model engine` chose another.")


def _sha256_fault(value: str) -> str | None:
    if value and re.match(r"[0-9a-fA-F]{64}\Z", value) is None:
        return "expected the 64 hex digits of a SHA-256"
    return None


@attrs.frozen
class KeyTable:
    """`[[auth.key]]`: a client of /v1."""

    name: str = setting(
        help="What the key is called in logs and usage.", scope=_O, applies=_LIVE, check=needed_name_fault,
        example="team-a",
    )  # fmt: skip
    sha256: str = setting(
        "", help="SHA-256 of the key's text, in hex.", scope=_O, applies=_LIVE, check=_sha256_fault,
        example="9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    )  # fmt: skip
    key: str = setting("", help="The key's text itself: accepted and warned about.", scope=_O, applies=_LIVE, secret=True)
    models: tuple[str, ...] = setting(("*",), help='What it may use; "*": all.', scope=_O, applies=_LIVE, check=names_fault)
    max_parallel: int = setting(0, help="Requests at a time; 0: as in [limits].", scope=_O, applies=_LIVE, low=0, high=_COUNT_MAX)
    requests_per_minute: int = setting(0, help="0: as in [limits].", scope=_O, applies=_LIVE, low=0, high=_COUNT_MAX)
    tokens_per_minute: int = setting(0, help="0: as in [limits].", scope=_O, applies=_LIVE, low=0, high=_COUNT_MAX)
    expires: str = setting(
        "", help="When it ends: RFC 3339 with a zone; empty: never.", scope=_O, applies=_LIVE, example="2030-01-01T00:00:00Z"
    )
    operator: bool = setting(
        False, help="Its answers tell endpoint and times, and it may ask one endpoint by its id.", scope=_O, applies=_LIVE
    )


def _endpoint_id_fault(value: str) -> str | None:
    if re.match(r"[A-Za-z0-9._:/@+-]{1,128}\Z", value) is None:
        return f"expected 1 to 128 letters, digits or ._:/@+-, not {value!r}"
    return None


@attrs.frozen
class EndpointTable:
    """`[[endpoint]]`: an engine that answers somewhere already."""

    id: str = setting(help="What it is called in logs and metrics.", scope=_O, applies=_LIVE, check=_endpoint_id_fault, example="u1")
    url: str = setting(
        help="Its address, without /v1.", scope=_O, applies=_LIVE, check=addresses.engine_url_fault, example="http://127.0.0.1:9001"
    )
    models: tuple[str, ...] = setting(help="What it serves.", scope=_O, applies=_LIVE, check=_some_fault, example=("m1", "m2"))
    aliases: Mapping[str, str] = setting(
        factory=lambda: MappingProxyType({}),
        help="A client's name and the model it stands for; a right to the model covers it, and it is listed.", scope=_O, applies=_LIVE,
        example={"fast": "m1"},
    )  # fmt: skip
    names: Mapping[str, str] = setting(
        factory=lambda: MappingProxyType({}), help="What the engine calls a model, where that differs.", scope=_O, applies=_LIVE,
        example={"m1": "/models/x.gguf"},
    )  # fmt: skip
    unlisted: tuple[str, ...] = setting((), help="Names served but left out of /v1/models.", scope=_O, applies=_LIVE, example=("m2",))
    engine: str = setting("openai", help="What runs there.", scope=_O, applies=_LIVE, choices=ENDPOINT_ENGINES, example="vllm")
    pool: str = setting("default", help="A label for listings; routing ignores it.", scope=_O, applies=_LIVE, check=name_fault)
    weight: float = setting(1.0, help="Its share among endpoints of one priority.", scope=_O, applies=_LIVE, low=0, high=1_000_000)
    priority: int = setting(0, help="Lower is preferred.", scope=_O, applies=_LIVE, low=-1000, high=1000)
    api_key_env: str = setting(
        "", help="The environment variable that holds what the router presents to the engine.", scope=_O, applies=_LIVE,
        check=secrets.env_name_fault, example="U1_KEY",
    )  # fmt: skip
    max_inflight: int = setting(0, help="Requests at a time; 0: as in [route].", scope=_O, applies=_LIVE, low=0, high=1_000_000)


def meta_of(field: Any) -> SettingMeta | None:
    """What is declared of an attrs field, or None for a field that is a table."""
    found = field.metadata.get(META)
    return found if isinstance(found, SettingMeta) else None
