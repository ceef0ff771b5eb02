"""The control plane's end of routers that run by themselves: what they are pushed, what they say back.

To the publisher and the planner all of them together look like one router: it takes lists, catalogs and policies, and what it
acknowledges is what the slowest of them has. Sees messages and no socket; decides nothing about replicas.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, Protocol

import attrs
import structlog
import trio

from llmgw import __version__
from llmgw.control.router_view import merged_use
from llmgw.domain.endpoint import DIGEST_FORM, EndpointList, EndpointUse, ListStamp
from llmgw.domain.errors import Conflict, Invalid, LlmgwError
from llmgw.domain.ids import ClusterId, EndpointId, OwnerId
from llmgw.domain.lease import FencingToken
from llmgw.domain.model import Catalog
from llmgw.domain.policy import Policy
from llmgw.domain.ports import Machine, Wake
from llmgw.domain.usage import UsageBatch
from llmgw.protocol import list_delta
from llmgw.protocol import router_messages as r
from llmgw.protocol.channel import Channel, ChannelClosed
from llmgw.protocol.codec import Shared
from llmgw.protocol.messages import ControlPlanes, Goodbye, Message
from llmgw.protocol.router_messages import EPOCH_MAX, ROUTER_SILENT_S, STANDING_S
from llmgw.protocol.side_by_side import until_one_ends

HELLO_DEADLINE_S: Final = 10.0  # a peer that says nothing for so long is no router
SEND_DEADLINE_S: Final = 10.0  # a message that the network does not take for so long: the session is over
SILENT_DEADLINE_S: Final = 15.0  # a session without a message for so long is dead, whatever TCP says
PART_DEADLINE_S: Final = 2.0
HOLDS_NOTHING: Final = 2**62  # acknowledged where no router is there to hold up a stop
NAME_LENGTH_MAX: Final = 200  # of ids that a router gives itself
TAKEN_MAX: Final = 100  # a router that reads none of so many answers tells its batch again
PUSHES_KEPT: Final = 100  # a router that is so many changes behind counts as one that has acknowledged nothing, until it has
log = structlog.get_logger("llmgw.feed")


@attrs.define(eq=False)
class _Router:
    """What is known of one router process, over its sessions."""

    id: str
    instance: str
    build: str
    workers: int
    peer: str
    heard_s: float
    sessions: int = 0
    acknowledged: r.Acknowledged | None = None
    endpoints: int | None = None
    rows: dict[EndpointId, tuple[EndpointUse, float]] = attrs.field(factory=dict)  # and when it was said
    _shown: tuple[float, Mapping[EndpointId, EndpointUse]] | None = None

    def said(self, report: r.RouterReport, now_s: float) -> None:
        if report.full:
            self.rows.clear()
        for row in report.use:
            self.rows[row.endpoint] = (row.use, now_s)
        for endpoint in report.gone:
            self.rows.pop(endpoint, None)
        self.acknowledged, self.endpoints = report.acknowledged, report.endpoints
        self._shown = None

    def use(self, now_s: float) -> Mapping[EndpointId, EndpointUse]:
        """With ages of about now: made anew once a second, because with thousands of endpoints each time costs."""
        if self._shown is None or now_s - self._shown[0] >= STANDING_S:
            aged = {known: attrs.evolve(use, last_used_s=use.last_used_s + now_s - at_s) for known, (use, at_s) in self.rows.items()}
            self._shown = (now_s, MappingProxyType(aged))
        return self._shown[1]


@attrs.frozen
class _Source:
    """One router as `router_view` takes it."""

    router: _Router
    now_s: float

    def use(self) -> Mapping[EndpointId, EndpointUse]:
        return self.router.use(self.now_s)

    def acknowledged(self) -> int:
        return self.router.acknowledged.generation if self.router.acknowledged is not None else 0


@attrs.define(eq=False)
class _Session:
    """What one session was sent: the number of each value, and the token it went out under.

    `base` is the list that the router has of it by now; None: none yet, or the router is not sure of it.
    """

    router: _Router
    channel: Channel
    takes_deltas: bool
    certified: bool = False
    base: EndpointList | None = None
    policy: tuple[int, FencingToken] | None = None
    catalog: tuple[int, FencingToken] | None = None
    planes: tuple[ControlPlanes, FencingToken] | None = None
    push: int = 0
    generation: int = 0
    taken: deque[r.UsageTaken] = attrs.Factory(lambda: deque(maxlen=TAKEN_MAX))  # still to be said


class Claim(Protocol):
    """What a control plane's leadership says of itself here."""

    @property
    def cluster_id(self) -> ClusterId: ...

    @property
    def owner(self) -> OwnerId: ...

    @property
    def epoch(self) -> int: ...

    @property
    def is_leader(self) -> bool: ...

    @property
    def token(self) -> FencingToken: ...

    def met(self, epoch: int, owner: str) -> None:
        """A router has met it: at most news to who leads, or to who may."""
        ...


@attrs.frozen
class ConnectedRouter:
    """For people: a router that follows this control plane now. `generation` is the list that it acts on, 0 for none of ours.

    `endpoints` counts those of it, also of what a leader before us told it and this one cannot list yet; None: it does not tell.
    """

    id: str
    peer: str
    build: str
    workers: int
    generation: int
    silent_s: float
    endpoints: int | None


def _nobody_counts(batch: UsageBatch, taken: Callable[[str, int], None]) -> bool:
    """Its router keeps the batch."""
    return False


class RouterFeeds:
    """`known_replicas` gives the replicas that this leader knows while it has not heard from all of its nodes, else None.

    `poke` is called when a stop may have become possible, `wake` with the model that somebody waits for. `usage` takes what
    clients have used (`control.usage`). `listened_s` is the clock that silence is judged by (`control.attention`). `reached_at` is the
    address that this control plane is told of by, "" where it has none.
    """

    def __init__(
        self,
        machine: Machine,
        leadership: Claim,
        *,
        known_replicas: Callable[[], frozenset[EndpointId] | None],
        ttl_s: Callable[[], float],
        poke: Callable[[], None],
        wake: Wake,
        usage: Callable[[UsageBatch, Callable[[str, int], None]], bool] = _nobody_counts,
        listened_s: Callable[[], float] | None = None,
        reached_at: str = "",
    ) -> None:
        self._machine = machine
        self._listened_s = listened_s or machine.now_s
        self._leadership = leadership
        self._reached_at = reached_at
        self._planes: ControlPlanes | None = None
        self._known_replicas = known_replicas
        self._ttl_s = ttl_s
        self._poke = poke
        self._wake = wake
        self._usage = usage
        self._routers: dict[str, _Router] = {}  # by instance: a copied data directory makes two routers, not one that flaps
        self._changed = trio.Event()  # replaced at each change of what is pushed
        self._endpoints = EndpointList()
        self._listed: frozenset[str] = frozenset()
        self._stamp: ListStamp | None = None
        self._catalog = Catalog()
        self._policy: Policy | None = None
        self._number = {"catalog": 0, "policy": 0}
        self._push = 0  # counts what endpoint lists were sent, over all sessions
        # The push as it goes out over each list that a router may have ("" for the whole one): made once for all that have it.
        self._messages: dict[str, Shared] = {}
        # What each push left open: None for a leader's whole list, else the replicas that a router has let go of by it. Without
        # this an acknowledged generation could stand for an endpoint that the router has kept from a leader before.
        self._pushes: deque[tuple[int, frozenset[EndpointId] | None]] = deque(maxlen=PUSHES_KEPT)
        self._began_s: float | None = None

    # --- what is pushed

    def set_endpoints(self, endpoints: EndpointList, stamp: ListStamp) -> None:
        if self._began_s is None:
            self._began_s = self._listened_s()
        self._endpoints, self._stamp = endpoints, stamp
        self._listed = frozenset(endpoint.id for endpoint in endpoints.endpoints)
        self._begin_push()
        self._tell()

    def set_catalog(self, catalog: Catalog) -> None:
        self._catalog = _without_environments(catalog)
        self._number["catalog"] += 1
        self._tell()

    def set_policy(self, policy: Policy) -> None:
        if policy != self._policy:
            self._policy = policy
            self._number["policy"] += 1
            self._tell()

    def set_planes(self, planes: ControlPlanes | None) -> None:
        """What a leader tells routers that joined of the control planes; None while this one does not lead."""
        if planes != self._planes:
            self._planes = planes
            self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    def _begin_push(self) -> frozenset[EndpointId] | None:
        """A new number for what goes out from here on; returns what it leaves open, as `_pushes` has it."""
        self._push += 1
        self._messages.clear()
        gone = self._gone()
        self._pushes.append((self._push, gone))
        return gone

    def _gone(self) -> frozenset[EndpointId] | None:
        known = self._known_replicas() if self._leadership.is_leader else None
        return None if known is None else known - self._listed

    # --- what comes back

    def use(self) -> Mapping[EndpointId, EndpointUse]:
        return merged_use(self._live()) if self._routers else {}

    def acknowledged(self) -> int:
        """The generation that every router acts on which was heard within ROUTER_SILENT_S.

        0 for as long after the first list: routers that followed before our start are still on their way to us.
        """
        now_s = self._listened_s()
        if self._began_s is None or now_s - self._began_s < ROUTER_SILENT_S:
            return 0
        stamp = self._stamp
        return min((self._reached(source.router, stamp) for source in self._live()), default=HOLDS_NOTHING)

    def connected(self) -> tuple[ConnectedRouter, ...]:
        """Sorted by id."""
        now_s = self._listened_s()
        found = [
            ConnectedRouter(one.id, one.peer, one.build, one.workers, self._reached(one, self._stamp), now_s - one.heard_s, one.endpoints)
            for one in self._routers.values()
            if one.sessions
        ]
        return tuple(sorted(found, key=lambda one: (one.id, one.peer)))

    def _reached(self, router: _Router, stamp: ListStamp | None) -> int:
        acknowledged = router.acknowledged
        # A generation counts within its token only: that of a control plane before us says nothing about our lists.
        if acknowledged is None or stamp is None or acknowledged.token != stamp.token:
            return 0
        for push, let_go in reversed(self._pushes):
            if push == acknowledged.push:
                # By a whole list it has let go of everything else. By one that was not whole it has kept what we did not know
                # then: what we have come to know since is on its way to it.
                if let_go is None or ((gone := self._gone()) is not None and gone <= let_go):
                    return acknowledged.generation
                return 0
        return 0

    def _live(self) -> list[_Source]:
        """Routers heard lately. One that is gone for so long, or silent, holds up nothing; it is forgotten once it has left."""
        now_s = self._listened_s()
        for instance, router in list(self._routers.items()):
            if not router.sessions and now_s - router.heard_s >= ROUTER_SILENT_S:
                del self._routers[instance]
        return [_Source(router, now_s) for router in self._routers.values() if now_s - router.heard_s < ROUTER_SILENT_S]

    # --- sessions

    async def run(self, channel: Channel, certified: str = "") -> None:
        """One session, from the router's hello to its end. Never raises for what a peer does: the channel is closed with a reason.

        `certified` is the name in the router's certificate, "" where it came with the token of this machine.
        """
        try:
            with trio.move_on_after(HELLO_DEADLINE_S) as limit:
                hello = await channel.receive()
            if limit.cancelled_caught:
                raise Invalid(f"no RouterHello within {HELLO_DEADLINE_S:.0f} s", code="no_hello")
            if not isinstance(hello, r.RouterHello):
                raise Invalid(f"a session begins with RouterHello, not {type(hello).__name__}", code="no_hello")
            await self._admit(hello, channel, bool(certified))
        except ChannelClosed as err:
            log.debug("router session ended", peer=channel.peer, why=str(err))
        except LlmgwError as err:
            log.warning("router session refused", peer=channel.peer, code=err.code, why=err.message)
            await self._part(channel, err)
        finally:
            with trio.move_on_after(PART_DEADLINE_S, shield=True):
                await channel.close()

    async def _part(self, channel: Channel, err: LlmgwError) -> None:
        with trio.move_on_after(PART_DEADLINE_S):
            try:
                await channel.send(Goodbye(err.code, err.message, isinstance(err, Conflict)))
            except ChannelClosed:
                return
            await channel.close(1008, err.message)

    async def _admit(self, hello: r.RouterHello, channel: Channel, certified: bool) -> None:
        for name, value in (("router", hello.router), ("instance", hello.instance)):
            if not value or len(value) > NAME_LENGTH_MAX or not value.isprintable():
                raise Invalid(f"a router names its {name}", code="malformed_message")
        if abs(hello.protocol - r.ROUTER_PROTOCOL) > 1:
            raise Conflict(
                f"router {hello.router} ({hello.build}) speaks router protocol {hello.protocol}, this control plane ({__version__}) "
                f"speaks {r.ROUTER_PROTOCOL}",
                code="protocol",
            )
        self._meet(hello.highest)
        now_s = self._listened_s()
        router = self._routers.get(hello.instance)
        if router is None:
            router = self._routers[hello.instance] = _Router(hello.router, hello.instance, hello.build, hello.workers, channel.peer, now_s)
        router.heard_s, router.peer, router.acknowledged = now_s, channel.peer, hello.acknowledged
        router.sessions += 1
        log.info("router session opened", router=router.id, peer=channel.peer, build=hello.build)
        try:
            await self._serve(_Session(router, channel, takes_deltas=hello.digest_form == DIGEST_FORM, certified=certified))
        finally:
            router.sessions -= 1
            log.info("router session closed", router=router.id, peer=channel.peer)

    async def _serve(self, session: _Session) -> None:
        await until_one_ends(lambda: self._send_all(session), lambda: self._receive_all(session))

    async def _send_all(self, session: _Session) -> None:
        leads = self._leadership
        welcome = r.RouterWelcome(
            leads.cluster_id, leads.owner, leads.epoch, leads.is_leader, __version__, self._ttl_s(), reached_at=self._reached_at
        )
        await self._send(session, welcome)
        due_s = self._machine.now_s()
        while True:
            changed = self._changed
            for make in (self._policy_for, self._catalog_for, self._endpoints_for, self._planes_for):
                # Models before endpoints: a model that left is no longer known when its endpoints go. Control planes after what names
                # the token: they are taken from whoever is obeyed.
                if (message := make(session)) is not None:
                    await self._send(session, message)
            while session.taken:
                await self._send(session, session.taken.popleft())
            if self._machine.now_s() >= due_s:
                token = leads.token if leads.is_leader else None
                await self._send(session, r.Standing(token, session.generation, self._ttl_s(), session.push))
                due_s = self._machine.now_s() + STANDING_S
            with trio.move_on_after(max(0.0, due_s - self._machine.now_s())):
                await changed.wait()

    def _policy_for(self, session: _Session) -> r.PushPolicy | None:
        if not self._leadership.is_leader or self._policy is None:
            return None
        token = self._leadership.token
        if session.policy == (self._number["policy"], token):
            return None
        session.policy = (self._number["policy"], token)
        return r.PushPolicy(token, self._policy)

    def _catalog_for(self, session: _Session) -> r.PushCatalog | None:
        if not self._leadership.is_leader:
            return None
        token = self._leadership.token
        if session.catalog == (self._number["catalog"], token):
            return None
        session.catalog = (self._number["catalog"], token)
        return r.PushCatalog(token, self._catalog)

    def _planes_for(self, session: _Session) -> ControlPlanes | None:
        if not self._leadership.is_leader or self._planes is None or not session.certified:
            return None
        if session.planes == (now := (self._planes, self._leadership.token)):
            return None
        session.planes = now
        return self._planes

    def _endpoints_for(self, session: _Session) -> Shared | None:
        stamp = self._stamp
        token = self._leadership.token if self._leadership.is_leader else None
        # A list of the term before is not sent: the publisher is about to make one of this term.
        if stamp is None or (stamp.from_standby if token is not None else not stamp.from_standby):
            return None
        if token is not None and stamp.token != token:
            return None
        gone = self._pushes[-1][1]
        if self._gone() != gone:
            gone = self._begin_push()
        if session.push == self._push:
            return None
        session.push, session.generation = self._push, stamp.generation
        base, session.base = session.base, self._endpoints
        return self._pushed(stamp, gone, base if session.takes_deltas else None)

    def _pushed(self, stamp: ListStamp, gone: frozenset[EndpointId] | None, base: EndpointList | None) -> Shared:
        """What is pushed now, to whoever has `base`."""
        over = base.fingerprint if base is not None else ""
        if (made := self._messages.get(over)) is not None:
            return made
        settled, let_go = gone is None, tuple(sorted(gone or ()))
        message: r.ToRouter
        if base is None:
            message = r.PushEndpoints(stamp, self._endpoints, settled, let_go, self._push)
        elif (change := list_delta.delta(base, self._endpoints)) is not None:
            message = r.PushDelta(stamp, change, settled, let_go, self._push)
        else:
            return self._pushed(stamp, gone, None)
        made = self._messages[over] = Shared(message)
        return made

    async def _send(self, session: _Session, message: r.ToRouter | ControlPlanes | Shared) -> None:
        with trio.move_on_after(SEND_DEADLINE_S) as limit:
            await session.channel.send(message)
        if limit.cancelled_caught:
            raise ChannelClosed(f"router {session.router.id} did not take a message within {SEND_DEADLINE_S:.0f} s")

    async def _receive_all(self, session: _Session) -> None:
        while True:
            with trio.move_on_after(SILENT_DEADLINE_S) as limit:
                message = await session.channel.receive()
            if limit.cancelled_caught:
                raise ChannelClosed(f"router {session.router.id} said nothing for {SILENT_DEADLINE_S:.0f} s")
            self._take(session, message)
            if isinstance(message, Goodbye):
                return

    def _take(self, session: _Session, message: Message) -> None:
        router, now_s = session.router, self._listened_s()
        router.heard_s = now_s
        match message:
            case r.RouterReport():
                self._meet(message.highest)
                before, running = router.acknowledged, self._running_withdrawn(router)
                router.said(message, now_s)
                if router.acknowledged != before or self._running_withdrawn(router) != running:
                    self._poke()
            case r.AskEndpoints(why):
                log.info("a router asks for the whole list", router=router.id, why=why[:NAME_LENGTH_MAX])
                session.base, session.push = None, 0
                self._tell()
            case r.RouterRefused():
                log.warning(
                    "a router did not take what it was sent", router=router.id, code=message.code, why=message.text[:NAME_LENGTH_MAX]
                )
                self._meet_epoch(message.epoch, message.owner)
            case r.WakeModel(model):
                self._wake(model)
            case r.UsageReport(batch):

                def taken(boot: str, number: int) -> None:
                    session.taken.append(r.UsageTaken(boot, number))
                    self._tell()

                self._usage(batch, taken)
            case Goodbye():
                log.info("a router said goodbye", router=router.id, code=message.code, text=message.text[:NAME_LENGTH_MAX])
            case _:
                raise Invalid(f"a router does not send {type(message).__name__}", code="unexpected_message")

    def _running_withdrawn(self, router: _Router) -> dict[EndpointId, int]:
        return {known: use.in_flight for known, (use, _) in router.rows.items() if use.in_flight and known not in self._listed}

    def _meet(self, highest: FencingToken | None) -> None:
        """Raises Conflict for another cluster's router."""
        if highest is None:
            return
        if highest.cluster_id != self._leadership.cluster_id:
            raise Conflict(
                f"this router belongs to cluster {highest.cluster_id[:NAME_LENGTH_MAX]}, this is {self._leadership.cluster_id}; "
                "to move it, give it a new [router] data_dir",
                code="foreign_cluster",
            )
        self._meet_epoch(highest.epoch, highest.owner)

    def _meet_epoch(self, epoch: int, owner: OwnerId) -> None:
        if not 0 <= epoch <= EPOCH_MAX:
            raise Invalid(f"{epoch} is no epoch", code="malformed_message")
        if epoch:
            self._leadership.met(epoch, owner)


def _without_environments(catalog: Catalog) -> Catalog:
    """What engines are started with may hold secrets, and no router needs it."""
    models = tuple(
        attrs.evolve(model, profiles=tuple(attrs.evolve(profile, env={}) for profile in model.profiles)) for model in catalog.models
    )
    return Catalog(models, catalog.generation)
