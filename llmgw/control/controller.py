"""The control plane in one nursery: its owners, built once, and the tasks that it supervises.

The nursery's tasks are the design: leadership, settings poller, roll-out, events (the store's writer), publisher, reconciler,
engine watch, peers, usage, store follower, copy follower, disk watch, store watch, housekeeping.
All run on every control plane; those that act ask at each step whether it
leads. A crash of leadership or of the store's writer ends the process; the others are started again, three times in a minute.
Sessions and the admin API are served by `wiring` beside it and call the owners here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Final

import attrs
import structlog
import trio

from llmgw import __version__
from llmgw.control.attention import Attention
from llmgw.control.catalog import LiveCatalog, Models
from llmgw.control.commands import Commands
from llmgw.control.copy_follower import CopyFollower
from llmgw.control.endpoint_list import Made, build_list
from llmgw.control.engine_watch import watch_engines
from llmgw.control.event_log import EventLog
from llmgw.control.feed import RouterFeeds
from llmgw.control.footprint import SizeOf, needs
from llmgw.control.holds import Holds
from llmgw.control.identities import Identities
from llmgw.control.inventory import Inventory
from llmgw.control.keys import Keys
from llmgw.control.leadership import Candidacy, Leadership
from llmgw.control.node_watch import NodeWatch
from llmgw.control.nodes import Nodes
from llmgw.control.observed import Closing, Desired, MemoryNeed, Observed, ObservedReplica, PlanSettings
from llmgw.control.peers import PRESENT_S, NoPeers, PeerLink, Peers, Presence
from llmgw.control.planning import barrier, explain_model, explain_replica
from llmgw.control.publisher import Publisher
from llmgw.control.reach import planes_told
from llmgw.control.reconciler import Reconciler
from llmgw.control.restart import Rollouts
from llmgw.control.router_view import acknowledged_by_all, merged_use
from llmgw.control.sessions import Sessions
from llmgw.control.settings_in_force import SettingsInForce
from llmgw.control.settings_poller import DryLoad, SettingsPoller
from llmgw.control.settings_writer import ClusterSettings
from llmgw.control.supervision import keep_running
from llmgw.control.usage import UsageLedger
from llmgw.domain.endpoint import Endpoint, EndpointList, EndpointUse, ListStamp
from llmgw.domain.errors import Broken, Conflict, NotFound, StaleEpoch, Unavailable
from llmgw.domain.event import Event, Level
from llmgw.domain.files import STORAGE_UNAVAILABLE, words
from llmgw.domain.identity import MachineRole
from llmgw.domain.ids import EndpointId, OwnerId, ReplicaId, holder_name
from llmgw.domain.lease import FencingToken
from llmgw.domain.model import Catalog
from llmgw.domain.plan import Reason
from llmgw.domain.policy import ApiKey, Policy
from llmgw.domain.ports import EndpointSink, Machine, PolicySink, UsageSource
from llmgw.domain.replica import ReplicaState, RestartPolicy
from llmgw.domain.settings_version import Pause
from llmgw.lease.outage import Outage, Part
from llmgw.protocol.messages import RestartReplica
from llmgw.protocol.waiting import wait_woken
from llmgw.settings.load import Loaded, policy_of
from llmgw.settings.schema import Settings
from llmgw.store import admin_tokens, api_keys, audit, drains, idempotency
from llmgw.store import events as event_rows
from llmgw.store import identities as identity_rows
from llmgw.store import models as model_rows
from llmgw.store import usage as usage_rows
from llmgw.store.admin_tokens import AdminToken
from llmgw.store.audit import CLUSTER, Origin
from llmgw.store.connection import Store
from llmgw.store.copies import CopiedStore
from llmgw.store.nodes import StoredNode

STORE_LOOK_S: Final = 5.0  # how late the end of a full disk is noticed; the look costs a page of writing while it lasts
HOUSEKEEPING_S: Final = 3600.0  # retention is counted in days
HOUSEKEEPING_RETRY_S: Final = 60.0
FOLLOW_S: Final = 1.0  # a standby shows what the leader has changed within a second (control.md 3)
DISK_CHECK_FILE: Final = "disk-check"
DISK_CHECK_S: Final = 5.0  # as often as a leader's disk is tried
ORDERS_S_MAX: Final = 1.0  # an order takes milliseconds; one that waits for the store must not hold up the next leader
DAY_S: Final = 86_400.0
MONTH_S: Final = 31 * DAY_S  # the longest: what is kept for a month is never gone before it is over
TOKEN_NAME_DIGITS: Final = 6  # of a token's hash, in its name: two machines' first tokens are told apart
log = structlog.get_logger("llmgw.control")


@attrs.frozen
class Objects:
    """What a file holds beside settings, where there is no store to hold it."""

    catalog: Catalog = Catalog()
    keys: tuple[ApiKey, ...] = ()
    endpoints: tuple[Endpoint, ...] = ()


@attrs.frozen
class _MadeOf:
    """What an endpoint list is made of. Unchanged parts are the same objects, so that comparing costs nothing."""

    catalog: Catalog
    choices: Mapping[str, str]
    replicas: tuple[ObservedReplica, ...]
    closings: tuple[Closing, ...]
    static: tuple[Endpoint, ...]

    def same(self, other: _MadeOf) -> bool:
        return (
            self.catalog is other.catalog
            and self.choices is other.choices
            and self.replicas is other.replicas
            and self.static is other.static
            and [closing.replica for closing in self.closings] == [closing.replica for closing in other.closings]
        )


def plan_settings(settings: Settings) -> PlanSettings:
    """The planner's part of the settings."""
    reconcile = settings.reconcile
    return PlanSettings(
        grace_s=reconcile.grace_s,
        starts_max=reconcile.starts_max,
        restart=RestartPolicy(tuple(reconcile.restart_backoff_s), reconcile.crash_loop_attempts),
        spread=settings.placement.spread,
        pack=settings.placement.pack,
        drain_deadline_s=settings.route.drain_s,
        engine_commands={name: engine.command for name, engine in settings.engines.items()},
        load_limits_s={name: engine.load_limit_s for name, engine in settings.engines.items()},
        progress_limits_s={name: engine.progress_limit_s for name, engine in settings.engines.items()},
    )


def _no_file(text: bytes) -> Loaded:
    raise Broken("there is no file to load")


async def _loads(file: bytes, document: str) -> str:
    return ""


def _nobody_restarts(why: str) -> None:
    raise Broken(f"a restart was asked for where nobody restarts: {why}")


class Controller:
    """Built by `wiring`, which opened the store and found out the cluster's id. `candidacy` is with what it competes for the lease.

    `address` is where other control planes reach this one, `link` how it reaches them; `reached_at` is where agents and routers that
    joined do, "" where they do not; `token_sha256` is of its admin token.
    `file` names the file whose `[[model]]` tables are the catalog ("" with a store); `objects` is what it held at start, and
    what an empty store imports. `size_of` measures a checkpoint; `secret` reads a key from the environment. `load` reads the text
    of this machine's file, `dry_load` tries it in a process of its own, `restart` asks for the graceful restart of this process,
    `reloading` tells its supervisor of each change that is taken.
    """

    def __init__(
        self,
        machine: Machine,
        store: Store,
        in_force: SettingsInForce,
        objects: Objects,
        *,
        candidacy: Candidacy,
        file: str = "",
        address: str = "",
        reached_at: str = "",
        link: PeerLink | None = None,
        token_sha256: str = "",
        size_of: SizeOf = lambda checkpoint: None,
        secret: Callable[[str], str] = lambda name: "",
        load: Callable[[bytes], Loaded] = _no_file,
        dry_load: DryLoad = _loads,
        restart: Callable[[str], None] = _nobody_restarts,
        reloading: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self.machine = machine
        self.store = store
        self.in_force = in_force
        self.file = file
        self.address = address
        self.reached_at = reached_at
        self._token_sha256 = token_sha256
        self._objects = objects
        self._size_of = size_of
        self._secret = secret
        self._policy_sinks: list[PolicySink] = []
        self._usage_sources: list[UsageSource] = []
        self._made: Made = {}
        self.data_dir = candidacy.data_dir
        self._disk_fine = True
        self.outage = Outage()
        self._store_trouble: tuple[str, float] | None = None  # why it takes no writes, and since when
        store.watch(self._wrote)
        self._store_news = trio.Event()  # replaced at each
        self._orders = 0
        self._order_ended = trio.Event()  # replaced at each
        self._welcomed: dict[OwnerId, str] = {}
        self._on_reread: list[Callable[[], Awaitable[None]]] = []
        self._list: tuple[_MadeOf, dict[str, Reason | None], EndpointList] | None = None
        self._needs: tuple[Catalog, Mapping[str, MemoryNeed]] | None = None
        self.attention = Attention(machine)
        self.inventory = Inventory(self.attention.now_s, self._changed)
        self.leadership = Leadership(
            machine,
            candidacy,
            begin=store.lead,
            heard=lambda: self.inventory.heard_and_counted(self.settings.reconcile.node_lost_after_s),
            outage=self.outage,
        )
        self.events = EventLog(machine, self._append_events, self._epoch, self._may_write)
        self.nodes = Nodes(machine, store, self._epoch, self.events, self._changed, self._may_write)
        self.holds = Holds(machine, store, self._epoch, self.events, self._changed)
        self.live = LiveCatalog(self._publish, self._changed)
        self.models = Models(store, self._epoch, self.live, self.events, self.inventory.reopen, file)
        self.keys = Keys(machine, store, self._epoch, self.events, self._push_policy, self._tell_others, file)
        if file:
            self.keys.replace_from_file(objects.keys)
        self.identities = Identities(machine, store, self.leadership.cluster_id, self._epoch, self.events, self._tell_others)
        self.sessions = Sessions(
            machine,
            self.leadership,
            self.nodes,
            self.inventory,
            self.events,
            heartbeat_s=lambda: self.settings.reconcile.heartbeat_s,
            reached_at=reached_at,
        )
        self.commands = Commands(machine, self.leadership, self.sessions, self.inventory, self.events)
        self.publisher = Publisher(
            machine,
            self._build_list,
            self._stamp,
            self.inventory,
            interval_s=lambda: self.settings.publish.interval_s,
            met=self.leadership.met,
            knows=lambda: not barrier(self.settings.reconcile.grace_s, self.observe()),
        )
        self.reconciler = Reconciler(
            machine,
            self.leadership,
            self.commands,
            self.inventory,
            self.events,
            self.desired,
            self.observe,
            self._publish,
            # A leader whose loop is not heard for a ttl loses office, however rarely it is asked to look.
            tick_s=lambda: min(self.settings.reconcile.tick_s, candidacy.timings.renew_s),
            look=NodeWatch(self.events).look,
            awake=self._after_pause,
        )
        peer_link = link or NoPeers()
        self.peers = Peers(machine, self.leadership, peer_link, self._presence, self._welcome)
        self.usage = UsageLedger(
            machine,
            store,
            epoch=self._epoch,
            may_write=self._may_write,
            leader=self.peers.leader_address,
            carry=peer_link.give_usage,
        )
        self.routers = RouterFeeds(
            machine,
            self.leadership,
            known_replicas=lambda: self.inventory.known_if_unsettled(self._token(), self.nodes.known),
            ttl_s=lambda: self.settings.lease.ttl_s,
            listened_s=self.attention.now_s,
            poke=self.reconciler.poke,
            wake=lambda model: self.reconciler.poke(),  # a hint: what runs for a model is the planner's to say
            usage=self.usage.offer,
            reached_at=reached_at,
        )
        self.live.add_sink(self.routers)
        self.add_router(self.routers, self.routers, self.routers)
        self.settings_poller = SettingsPoller(
            machine,
            in_force,
            folder=candidacy.data_dir,
            store=None if file else store,
            load=load,
            dry_load=dry_load,
            apply=self._apply_settings,
            apply_objects=self._apply_objects,
            told=self._settings_told,
            reloading=reloading,
        )
        self.cluster_settings = ClusterSettings(
            store,
            self._epoch,
            lambda: self.leadership.owner,
            self.events,
            in_force,
            self.settings_poller,
            file,
            self._tell_others,
            machine.wall_s,
        )
        self.rollouts = Rollouts(
            machine,
            store,
            self.leadership,
            self.peers,
            self.events,
            in_force,
            self.settings_poller,
            folder=candidacy.data_dir,
            address=address,
            plans=lambda: self.reconciler.plans,
            restart=restart,
            changed=self._tell_others,
            alone=bool(file) or link is None,
        )
        self._copy_follower = (
            CopyFollower(machine, self.leadership, self.peers, peer_link, store, self.look_at_store)
            if isinstance(store, CopiedStore)
            else None
        )
        self.leadership.on_lead(self._reload)
        self.leadership.on_end(self._end_term)

    # --- what is wired to it

    def add_router(self, sink: EndpointSink, usage: UsageSource, policy: PolicySink, *, serves_already: bool = False) -> None:
        """A router that takes the list and the policy, and whose requests in flight count. Also a `CatalogSink` is added
        with `live.add_sink`. `serves_already`: it has a list of an earlier leader.
        """
        self._usage_sources.append(usage)
        self._policy_sinks.append(policy)
        policy.set_policy(self.policy())
        self.publisher.add_sink(sink, serves_already=serves_already)

    def on_reread(self, hook: Callable[[], Awaitable[None]]) -> None:
        """`hook` reads anew what another control plane may have changed beside what is kept here: who may call."""
        self._on_reread.append(hook)

    def policy(self) -> Policy:
        """What routers obey, from the settings and keys in force."""
        return policy_of(self.settings, self.keys.in_force)

    @property
    def settings(self) -> Settings:
        """Those in force. Asked at each use, never kept."""
        return self.in_force.settings

    def look_at_store(self) -> None:
        """Another control plane says that there is something new in the store."""
        self.settings_poller.nudge()
        self.rollouts.nudge()
        self._store_news.set()

    def paused(self) -> Pause | None:
        """The pause that stands, as this control plane knows it."""
        return self.settings_poller.pause

    def _apply_settings(self) -> None:
        """What is in force has changed: everything that keeps a part of it is told, and the planner looks again."""
        self._needs = None
        self._push_policy()
        self.sessions.set_pace()
        self._changed()

    def _push_policy(self) -> None:
        policy = self.policy()
        for sink in self._policy_sinks:
            sink.set_policy(policy)

    def _apply_objects(self, file: Loaded) -> None:
        """What a changed file holds beside settings: in force where there is no store that holds it."""
        if not self.file:
            self._objects = attrs.evolve(self._objects, keys=file.keys)
            self.keys.warn_of_file(file.keys, file.source)
            return
        self._objects = Objects(file.catalog, file.keys, file.endpoints)
        self.models.replace_from_file(file.catalog)
        self.keys.replace_from_file(file.keys)

    def _settings_told(self, kind: str, text: str) -> None:
        self.events.record(kind, "settings", text, Level.WARNING)

    def _tell_others(self) -> None:
        self.rollouts.nudge()
        self.peers.say_changed()

    # --- what is read

    def desired(self) -> Desired:
        catalog = self.live.current
        if self._needs is None or self._needs[0] is not catalog:
            self._needs = (catalog, needs(catalog, self._size_of))
        pause = self.paused()
        paused = None if pause is None else f"paused{_by(pause.author)}" + (f": {pause.reason}" if pause.reason else "")
        return Desired(catalog, self.models.choices, self._needs[1], self.holds.active(), plan_settings(self.settings), paused)

    def observe(self) -> Observed:
        return self.inventory.observe(
            self._token(),
            self.nodes.known,
            self.use(),
            acknowledged_by_all(self._usage_sources, self.publisher.generation),
            self.settings.reconcile.node_lost_after_s,
            self.settings.reconcile.grace_s,
            self.machine.wall_s(),
        )

    def use(self) -> Mapping[EndpointId, EndpointUse]:
        """What the routers see of each endpoint."""
        return merged_use(self._usage_sources) if self._usage_sources else {}

    def replicas(self) -> tuple[ObservedReplica, ...]:
        """For people: with ages of now, and one on its way out reads as draining, with why."""
        observed = self.observe()
        now_s = self.attention.now_s()
        closing = {closing.replica: closing for closing in observed.closings}
        shown = []
        for replica in observed.replicas:
            leaving = closing.get(replica.id)
            report = attrs.evolve(replica.report, age_s=now_s - replica.since_s)
            if replica.ordered_to_drain and not report.reason:
                report = attrs.evolve(report, reason="asked to go; another takes its place first")
            if leaving is not None and replica.state is ReplicaState.READY:
                report = attrs.evolve(report, reason=leaving.why)
                replica = attrs.evolve(replica, state=ReplicaState.DRAINING)
            shown.append(attrs.evolve(replica, report=report))
        return tuple(shown)

    def replica(self, replica_id: str) -> ObservedReplica:
        """Raises NotFound."""
        for replica in self.replicas():
            if replica.id == replica_id:
                return replica
        raise NotFound(f"there is no replica {replica_id[:100]!r}")

    def explain(self, of: str) -> Reason:
        """The reason that the last plan gave for `model/NAME`, or for `replica/ID` beside that of the plan which placed it.

        Raises NotFound for what is not there.
        """
        kind, _, name = of.partition("/")
        if kind == "model":
            spec = self.models.get(name)
            of = f"model/{spec.name}"
            if (found := self.reconciler.reasons.get(of)) is not None:
                return found
            return explain_model(spec, [replica for replica in self.replicas() if replica.model == spec.name])
        replica = self.replica(name)
        said = self.reconciler.reasons.get(of)
        nodes = {node.id: node for node in self.observe().nodes}
        return explain_replica(replica, nodes.get(replica.node), said.text if said is not None else "")

    def use_admin_token(self, sha256: str) -> None:
        """The file of this control plane's admin token holds another one: the leader puts its hash into the store."""
        self._token_sha256 = sha256

    # --- operators' orders that are neither nodes', models' nor holds'

    def restart_replica(self, replica_id: str, author: str = "") -> None:
        """In place and at once, with a fresh count of attempts. Raises NotFound, Unavailable."""
        replica = self.replica(replica_id)
        self.commands.send(replica.node, RestartReplica(replica.id, f"restart asked for{_by(author)}"), self.live.current.generation)
        self.events.record("replica.restart", f"replica/{replica.id}", f"restart of {replica.id} was asked for{_by(author)}")

    async def drain_replica(self, replica_id: str, origin: Origin = CLUSTER) -> None:
        """It goes; another takes its place first where there is room. Raises NotFound."""
        replica = self.replica(replica_id)
        await drains.add(self.store, self._epoch(), (replica.id,), origin)
        self.inventory.drain_replica(replica.id)
        self.events.record("replica.drain", f"replica/{replica.id}", f"{replica.id} was asked to go{_by(origin.who)}")

    async def remove_node(self, name: str, origin: Origin = CLUSTER) -> StoredNode:
        """Forgets a node on which nothing runs. Raises NotFound, and Conflict where something does."""
        node = self.nodes.by_name(name)
        over = (ReplicaState.STOPPED, ReplicaState.FAILED, ReplicaState.LOST)
        running = [replica.id for replica in self.replicas() if replica.node == node.id and replica.state not in over]
        if running:
            raise Conflict(f"{len(running)} of its replicas run on node {node.name}: drain it first", code="node_not_empty")
        await self.nodes.remove(node.id, origin)
        self.sessions.end(node.id)
        self.inventory.forget(node.id)
        return node

    async def restart_model(self, name: str, origin: Origin = CLUSTER) -> tuple[ReplicaId, ...]:
        """Failed replicas start again, and what was closed is open; the others are replaced one at a time."""
        spec = self.models.get(name)
        self.inventory.reopen(spec.name)
        over = (ReplicaState.STOPPED, ReplicaState.DRAINING, ReplicaState.LOST)
        mine = [replica for replica in self.replicas() if replica.model == spec.name and replica.state not in over]
        running = tuple(replica.id for replica in mine if replica.state is not ReplicaState.FAILED)
        await drains.add(self.store, self._epoch(), running, origin)
        for replica in mine:
            if replica.state is ReplicaState.FAILED:
                why = f"restart asked for{_by(origin.who)}"
                self.commands.send(replica.node, RestartReplica(replica.id, why), self.live.current.generation)
            else:
                self.inventory.drain_replica(replica.id)
        self.events.record("model.restart", f"model/{spec.name}", f"restart of model {spec.name} was asked for{_by(origin.who)}")
        self._changed()
        return tuple(replica.id for replica in mine)

    # --- the nursery

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Leads or stands by, plans and publishes until cancelled.

        Says started() once it is known whether it leads, and what is in the store.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.events.run)
            with contextlib.suppress(Unavailable):  # whoever leads reads it again
                await self._reload_identities()
            await nursery.start(self.leadership.run)
            if not self.leadership.is_leader:
                await self.reread()
                await self.settings_poller.look_now()  # nothing is served under live keys of before
            nursery.start_soon(self._watch_leadership)
            self.publisher.publish_now()
            nursery.start_soon(keep_running, self.machine, "publisher", self.publisher.run)
            nursery.start_soon(keep_running, self.machine, "reconciler", self.reconciler.run)
            nursery.start_soon(keep_running, self.machine, "engine watch", self._watch_engines)
            nursery.start_soon(keep_running, self.machine, "peers", self.peers.run)
            nursery.start_soon(keep_running, self.machine, "reach", self._tell_reach)
            nursery.start_soon(keep_running, self.machine, "usage", self.usage.run)
            nursery.start_soon(keep_running, self.machine, "settings poller", self.settings_poller.run)
            nursery.start_soon(keep_running, self.machine, "roll-out", self.rollouts.run)
            nursery.start_soon(keep_running, self.machine, "store follower", self._follow_store)
            if self._copy_follower is not None:
                nursery.start_soon(keep_running, self.machine, "copy follower", self._copy_follower.run)
            nursery.start_soon(keep_running, self.machine, "disk watch", self._watch_disk)
            nursery.start_soon(keep_running, self.machine, "housekeeping", self._keep_house)
            nursery.start_soon(keep_running, self.machine, "store watch", self._watch_store)
            task_status.started()

    async def _watch_leadership(self) -> None:
        """The barrier goes out when a term begins; once, whatever else changes during it."""
        greeted = 0
        while True:
            changed = self.leadership.changed
            if self.leadership.is_leader and self.leadership.epoch != greeted:
                greeted = self.leadership.epoch
                self.inventory.forget_sent_stops()
                self.commands.hello_all()
                self._changed()
                await self._keep_connected_nodes()
            await changed.wait()

    async def _tell_reach(self) -> None:
        """Machines that joined are told of every control plane: their files know those of their joining only."""
        while True:
            planes = None
            if self.leadership.is_leader:
                name, servers = holder_name(self.leadership.owner), self.identities.servers()
                removed = partial(self.identities.removed, MachineRole.SERVER)
                planes = planes_told(name, self.reached_at, self.peers.reached_at, servers, removed)
            self.sessions.set_planes(planes)
            self.routers.set_planes(planes)
            await self.machine.sleep_until(self.machine.now_s() + PRESENT_S)

    def _after_pause(self) -> None:
        """This process stood still for so long that sessions have ended, or will: what runs is asked anew before anything is judged."""
        if self.attention.take_pause() > self.settings.reconcile.heartbeat_s and self.leadership.is_leader:
            self.inventory.await_nodes(self.nodes.known.values())
            self.commands.hello_all()

    async def _keep_connected_nodes(self) -> None:
        """Nodes that came while somebody else led, or nobody: that leader may not have heard of them."""
        for facts in self.inventory.connected_facts():
            try:
                await self.nodes.heard(facts)
            except (Conflict, Unavailable, StaleEpoch) as err:
                log.warning("a node could not be put into the store", node=facts.name, why=err.message)

    async def _follow_store(self) -> None:
        while True:
            await wait_woken(self.machine, self._store_news, self.machine.now_s() + FOLLOW_S)
            self._store_news = trio.Event()
            if not self.leadership.may_write:
                try:
                    await self.reread()
                except Unavailable as err:
                    self.outage.failed(Part.READS, err.message, self.machine.now_s())
                    continue
            elif not self.leadership.is_leader:
                continue
            self.outage.works(Part.READS, self.machine.now_s())  # a leader has read it all anew

    async def reread(self) -> None:
        """On a standby: everything that the leader may have changed, in force and shown here. Raises Unavailable."""
        await self.nodes.reload()
        self.inventory.forget_all_but(self.nodes.known)
        await self.holds.reload()
        if self.file:
            self.models.replace_from_file(self._objects.catalog)
        else:
            await self.models.reload()
            await self._reload_keys()
        self.inventory.set_drains(await drains.load(self.store))
        self.inventory.expect(self.nodes.known.values())
        await self._reload_identities()
        await self.events.catch_up(
            lambda: event_rows.latest(self.store), lambda seq: event_rows.after(self.store, seq, event_rows.PAGE_MAX)
        )
        await self._reread_others()

    async def _reload_identities(self) -> None:
        """One that was removed does not compete for the lease, though it reaches it."""
        await self.identities.reload()
        self.leadership.bar(self.identities.own_fault())

    async def _reread_others(self) -> None:
        for hook in self._on_reread:
            await hook()

    async def _watch_engines(self) -> None:
        await watch_engines(self.machine, self.leadership, self.sessions, self.inventory.find, self.use)

    async def _watch_store(self) -> None:
        """Of a store that took no write: finds out by itself when it does again, though nobody orders anything."""
        while True:
            if self.store.trouble:
                with contextlib.suppress(Unavailable):
                    await self.store.prove_writable()
            await self.machine.sleep_until(self.machine.now_s() + STORE_LOOK_S)

    def _wrote(self, trouble: str) -> None:
        """The store says what came of a write."""
        now_s = self.machine.now_s()
        if trouble:
            self._store_trouble = self._store_trouble or (trouble, now_s)
            self.outage.failed(Part.STORE, trouble, now_s)
            return
        self.outage.works(Part.STORE, now_s)
        if self._store_trouble is not None:
            (why, since_s), self._store_trouble = self._store_trouble, None
            # The history could not be written before.
            self.events.record("store.refused", "store", f"the store took no writes for {now_s - since_s:.0f} s: {why}", Level.WARNING)

    async def _keep_house(self) -> None:
        while True:
            if not self.leadership.confirmed(self.machine.now_s()):
                await self.machine.sleep_until(self.machine.now_s() + HOUSEKEEPING_RETRY_S)
                continue
            now_wall_s = self.machine.wall_s()
            try:
                await event_rows.trim(self.store, self._epoch(), now_wall_s - self.settings.events.keep_days * DAY_S)
                await audit.trim(self.store, self._epoch(), now_wall_s - self.settings.events.keep_days * DAY_S)
                await idempotency.trim(self.store, self._epoch(), now_wall_s)
                await identity_rows.trim(self.store, self._epoch(), now_wall_s - self.settings.events.keep_days * DAY_S)
                await usage_rows.trim(self.store, self._epoch(), now_wall_s - self.settings.usage.keep_months * MONTH_S)
                if ended := self.inventory.ended_drains():
                    await drains.remove(self.store, self._epoch(), ended)
                if isinstance(self.store, CopiedStore) and (record := self.leadership.record) is not None:
                    await self.store.clean_up(record.base, lambda: self.leadership.confirmed(self.machine.now_s()))
            except (Unavailable, StaleEpoch) as err:
                if err.code != STORAGE_UNAVAILABLE:  # that is told as an outage
                    log.warning("old rows could not be removed; tried again later", why=str(err))
            await self.machine.sleep_until(self.machine.now_s() + HOUSEKEEPING_S)

    async def _reload(self, epoch: int) -> None:
        """The `on_lead` hook: everything that a leader before may have changed, in this order, before the first plan."""
        await self.nodes.reload()
        await self.holds.reload()
        if self.file:
            self.models.replace_from_file(self._objects.catalog)
        else:
            await self._import()
            await self._reload_keys()
        await self.models.reload()
        self.inventory.set_drains(await drains.load(self.store))
        self.inventory.await_nodes(self.nodes.known.values())
        await self._reload_identities()
        await self.identities.lead()
        if self._token_sha256:
            await self.ensure_admin_token(self._token_sha256)

    async def _import(self) -> None:
        """The first start against an empty store: the file's cluster keys as version 1, its models and its clients' keys, in one
        transaction. A store of a build that kept no keys gets those of its first leader's file."""
        specs, keys, wall_s = self._objects.catalog.models, self._objects.keys, self.machine.wall_s()
        imported: list[tuple[bool, bool]] = []
        await self.cluster_settings.import_first(
            lambda con, epoch: imported.append((model_rows.import_unit(con, epoch, specs), api_keys.import_unit(con, epoch, keys, wall_s)))
        )
        self.models.told_import(imported[-1][0], specs)
        self.keys.told_import(imported[-1][1], keys)
        await self.settings_poller.look_now()

    async def _reload_keys(self) -> None:
        await self.keys.reload()
        self.keys.warn_of_file(self._objects.keys, self.in_force.file.source)

    async def _end_term(self, fenced: bool) -> None:
        """The `on_end` hook: what this control plane began as a leader is over, and its last events are in the store."""
        if not fenced:  # what is being carried out is still under our epoch, and so is what is told of it
            with trio.move_on_after(ORDERS_S_MAX):
                while self._orders:
                    await self._order_ended.wait()
        self.commands.end_term()
        self.inventory.end_term()
        self.reconciler.end_term()
        if not fenced:
            await self.events.flush()
        await self.store.end_lead(fenced)

    def _presence(self) -> Presence:
        heard, _ = self.inventory.heard_and_counted(self.settings.reconcile.node_lost_after_s)
        said = self.in_force.said(self.rollouts.up_s)
        return Presence(self.leadership.owner, self.address, __version__, heard, self._token_sha256, self._disk_fine, said, self.reached_at)

    async def _watch_disk(self) -> None:
        """A standby's own disk, as a leader's is tried at each renewal: one that takes no writes is nobody to hand over to."""
        while True:
            if not self.leadership.may_write:
                try:
                    await self.machine.run_sync(lambda: self.machine.disk.write(self.data_dir / DISK_CHECK_FILE, b""))
                except OSError as err:
                    self.outage.failed(Part.DATA_DIR, words(err), self.machine.now_s())
                    self._disk_fine = False
                else:
                    self.outage.works(Part.DATA_DIR, self.machine.now_s())
                    self._disk_fine = True
            await self.machine.sleep_until(self.machine.now_s() + DISK_CHECK_S)

    async def _welcome(self, presence: Presence) -> None:
        """A standby's admin token is valid everywhere: each machine has one in its data directory."""
        if presence.token_sha256 and self._welcomed.get(presence.owner) != presence.token_sha256:
            await self.ensure_admin_token(presence.token_sha256)
            self._welcomed[presence.owner] = presence.token_sha256

    async def ensure_admin_token(self, sha256: str) -> None:
        """The token of a control plane's own file is in the store. Raises Unavailable, StaleEpoch."""
        await admin_tokens.ensure(self.store, self._epoch(), first_token(sha256, self.machine.wall_s()))
        await self._reread_others()

    @contextlib.contextmanager
    def ordering(self) -> Iterator[None]:
        """An operator's order is being carried out: a leader that lets go waits for it, for as long as ORDERS_S_MAX."""
        self._orders += 1
        try:
            yield
        finally:
            self._orders -= 1
            self._order_ended.set()
            self._order_ended = trio.Event()

    def _may_write(self) -> bool:
        return self.leadership.epoch > 0

    def _epoch(self) -> int:
        return self.leadership.epoch

    def _token(self) -> FencingToken | None:
        return self.leadership.token if self.leadership.is_leader else None

    def _stamp(self, generation: int) -> ListStamp | None:
        """Whose list it is: this leader's, or on a standby an observation under whom agents obey."""
        if self.leadership.is_leader:
            return ListStamp(self.leadership.token, generation)
        if self.leadership.may_write:
            return None  # about to lead: the list before stays until the barrier
        obeyed = self.inventory.obeyed()
        record = self.leadership.record
        if record is not None and (obeyed is None or obeyed.epoch < record.epoch):
            # The one before has just been succeeded: routers may have met the new one already, and would refuse the old one's name.
            obeyed = FencingToken(record.cluster_id, record.epoch, record.owner)
        return None if obeyed is None else ListStamp(obeyed, generation, from_standby=True)

    def _build_list(self) -> EndpointList:
        """The list, made anew only when something that it is made of has changed."""
        observed = self.observe()
        made_of = _MadeOf(
            self.live.current, self.models.choices, observed.replicas, observed.closings, self._objects.endpoints if self.file else ()
        )
        reasons = self.reconciler.reasons
        if self._list is not None and self._list[0].same(made_of):
            why = {name: reasons.get(name) for name in self._list[1]}
            if why == self._list[1]:
                return self._list[2]
        endpoints = build_list(made_of.catalog, made_of.choices, observed, reasons, made_of.static, self._secret, self._made)
        why = {f"model/{absence.names[0]}": reasons.get(f"model/{absence.names[0]}") for absence in endpoints.absences}
        self._list = (made_of, why, endpoints)
        return endpoints

    def _publish(self) -> None:
        self.publisher.publish_now()

    def _changed(self) -> None:
        self.publisher.poke()
        self.reconciler.poke()

    async def _append_events(self, batch: tuple[Event, ...]) -> tuple[Event, ...]:
        return await event_rows.append(self.store, self._epoch(), batch)


def first_token(sha256: str, wall_s: float) -> AdminToken:
    """The admin token of one control plane's own file."""
    return AdminToken(f"first-{sha256[:TOKEN_NAME_DIGITS]}", sha256, created_wall_s=wall_s)


def _by(author: str) -> str:
    return f" by {author}" if author else ""
