"""How a router by itself follows its control planes: one session with each, what is pushed acted on and kept, what is seen told.

It sees clock, disk and network through ports only. A router serves from what it has whatever happens here: no control plane,
a full disk, junk in a file or on the wire end in a log line and another try. Never decides who may call or who is chosen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Final, Protocol

import attrs
import structlog
import trio

from llmgw import __version__
from llmgw.domain.endpoint import DIGEST_FORM, Endpoint, EndpointList, EndpointUse, ListStamp
from llmgw.domain.errors import Conflict, Denied, LlmgwError, Unavailable
from llmgw.domain.ids import EndpointId
from llmgw.domain.lease import Fence, FencingToken, fence
from llmgw.domain.model import Catalog
from llmgw.domain.policy import Policy
from llmgw.domain.ports import CatalogSink, EndpointSink, Machine, PolicySink, UsageSource
from llmgw.domain.usage import UsageBatch
from llmgw.protocol import list_delta
from llmgw.protocol.channel import Channel
from llmgw.protocol.dialogue import Incoming, TooFar, TurnedAway, greet, part
from llmgw.protocol.losses import Loss
from llmgw.protocol.messages import ControlPlanes, Goodbye, Message
from llmgw.protocol.planes import dialled, remembered, without_second_names
from llmgw.protocol.router_messages import (
    EPOCH_MAX,
    ROUTER_PROTOCOL,
    ROUTER_SILENT_S,
    STANDING_S,
    TTL_S_DEFAULT,
    USAGE_PROTOCOL,
    Acknowledged,
    AskEndpoints,
    FromRouter,
    PushCatalog,
    PushDelta,
    PushEndpoints,
    PushPolicy,
    RouterHello,
    RouterRefused,
    RouterReport,
    RouterWelcome,
    Standing,
    UsageReport,
    UsageTaken,
    UseOf,
    WakeModel,
)
from llmgw.protocol.side_by_side import until_one_ends
from llmgw.router.gate import not_in_force
from llmgw.router.kept import KeptState, Pushed, kept_id
from llmgw.router.lists import Observation, may_take, observed_list, unsettled_list
from llmgw.router.metrics import Following
from llmgw.settings.address import engine_url_fault

log = structlog.get_logger("llmgw.router.follow")

RECONNECT_S_FIRST: Final = 1.0  # full jitter over a window that doubles from here, as agents do
RECONNECT_S_MAX: Final = 4.0  # below ROUTER_SILENT_S: a control plane that starts waits no longer for routers before it stops anything
assert RECONNECT_S_MAX < ROUTER_SILENT_S
TURNED_AWAY_AGAIN_S: Final = 60.0  # another cluster, or a build that is too far away: nothing changes until a person acts
DENIED_AGAIN_S: Final = 10.0  # a wrong token: its file may be on the way, and the other end logs each try
SEND_LIMIT_S: Final = 10.0  # a control plane that takes nothing for so long is dead to us; the next session tells all
SILENT_LIMIT_S: Final = 10.0  # one that says nothing for ten of its beats is dead to us, whatever TCP says
WAKE_AGAIN_S: Final = 1.0  # between two wishes for one model: the first has been heard, and clients ask by the thousand
WAKES_MAX: Final = 1000  # models remembered for that; beyond it all are forgotten
WITHDRAWN_LOOK_S: Final = 0.1  # between looks at requests that still run at withdrawn endpoints: a stop waits for their end
ASK_AGAIN_S: Final = 5.0  # a list that was asked for and has not come: it may be large, or cannot be read
LOGGED_RULES_MAX: Final = 20  # names of guard rules in one line
QUEUE_MAX: Final = 100  # refusals and wishes to wake that wait for one control plane; the oldest go first
WITHDRAWN_MAX: Final = 1000  # endpoints remembered as withdrawn by a leader: hours of a busy cluster's changes
TTL_S_LOW, TTL_S_HIGH = 2.0, 300.0  # the range of `lease.ttl_s`
INSTANCE_BYTES: Final = 8

Dial = Callable[[str], AbstractAsyncContextManager[Channel]]
Rule = Callable[[FencingToken | None, FencingToken], Fence]


class Followed(EndpointSink, CatalogSink, PolicySink, UsageSource, Protocol):
    """The router that is fed."""

    def settled(self) -> bool:
        """Does every worker of it act on the list that it was last given?"""
        ...


@attrs.define(eq=False)
class _Session:
    """One open session: what is still to be sent, what was told, and what a standby has shown in it.

    `said` is the list that its control plane said last, whether or not it was obeyed, and `push` its number: the next delta is over
    it.
    """

    url: str
    peer: str
    protocol: int
    heard_s: float
    queue: deque[FromRouter] = attrs.Factory(lambda: deque(maxlen=QUEUE_MAX))
    full: bool = True
    told: dict[EndpointId, tuple[EndpointUse, float]] = attrs.field(factory=dict)  # and when it was last used, on our clock
    acknowledged: Acknowledged | None = None
    withdrawn_use: Mapping[EndpointId, int] = attrs.field(factory=dict)
    refused: set[FencingToken] = attrs.field(factory=set)
    seen: tuple[ListStamp, Observation] | None = None
    said: EndpointList = EndpointList()
    push: int = 0
    asked_s: float | None = None  # when its whole list was asked for; None: it is not waited for


class Follower:
    """One instance per router process. `load` first, then `run`.

    `cors_origins` are this machine's own, whatever the policy of another machine says. `rule` is `domain.lease.fence`; a test
    that removes it shows that it matters.
    """

    def __init__(
        self,
        machine: Machine,
        router: Followed,
        dial: Dial,
        *,
        folder: Path,
        control_planes: tuple[str, ...],
        name: str = "router",
        workers: int = 1,
        cors_origins: tuple[str, ...] = (),
        rule: Rule = fence,
    ) -> None:
        self._machine = machine
        self._router = router
        self._dial = dial
        self._folder = folder
        self._configured = control_planes
        self._reached_at: dict[str, str] = {}  # what each address that answered has said of itself
        self._dialling: dict[str, trio.CancelScope] = {}
        self._nursery: trio.Nursery | None = None
        self._name = name
        self._workers = workers
        self._cors_origins = cors_origins
        self._rule = rule
        self._instance = machine.fresh_hex(INSTANCE_BYTES)
        self.router_id = ""
        self._state = Pushed()
        self._kept = KeptState(machine, folder, lambda: self._state)
        # What is pushed is taken one after another: else a list could be admitted, wait for the disk, and land after a newer one.
        self._turn = trio.Lock()
        self._open: list[_Session] = []
        self._changed = trio.Event()  # replaced at each: something is to be told at once
        self._leader_heard_s = self._list_heard_s = machine.now_s()
        self._leader_url = ""
        self._woken: dict[str, float] = {}
        self._ttl_s = TTL_S_DEFAULT
        self._observing: Observation | None = None  # a standby's, acted on while no leader is heard
        self._acting_on = EndpointList()
        self._acted: Acknowledged | None = None  # the leader's list that the router was last given
        self._confirmed: Acknowledged | None = None  # the one that every worker of it last acted on
        self._sound_urls: frozenset[str] = frozenset()
        # `taken(boot, number)`: a leader has stored this batch. Set by whoever has usage to tell.
        self.usage_taken: Callable[[str, int], None] = _nobody_tells

    @property
    def is_kept(self) -> bool:
        """Is all of `pushed` on disk?"""
        return self._kept.saved is self._state

    @property
    def pushed(self) -> Pushed:
        """What is known from control planes, now or before the last restart."""
        return self._state

    async def load(self) -> None:
        """What was last pushed is in force from here on. A file that cannot be used is told, and as good as none."""
        self.router_id = await self._machine.run_sync(lambda: kept_id(self._machine, self._folder, self._name, self._instance))
        kept = await self._kept.load()
        if kept is None:
            return
        self._state = attrs.evolve(kept, endpoints=self._sound(kept.endpoints))
        state = self._state
        if state.policy is not None:
            self._set_policy(state.policy)
        if state.catalog is not None:
            self._router.set_catalog(state.catalog)
        self._act()
        if state.stamp is not None:
            log.info(
                "serves what was last pushed",
                endpoints=len(state.endpoints.endpoints),
                epoch=state.stamp.token.epoch,
                generation=state.stamp.generation,
            )

    def wake(self, model: str) -> None:
        """Somebody waits for a model that has no replica: every control plane is told, the leader acts. Costs nothing to repeat."""
        now_s = self._machine.now_s()
        if now_s - self._woken.get(model, -WAKE_AGAIN_S) < WAKE_AGAIN_S:
            return
        if len(self._woken) >= WAKES_MAX:
            self._woken.clear()
        self._woken[model] = now_s
        for session in self._open:
            if WakeModel(model) not in session.queue:
                session.queue.append(WakeModel(model))
        self._tell()

    def tell_usage(self, batch: UsageBatch) -> bool:
        """Sends it to the leader, without waiting. False where none is heard, or one of a build that does not count."""
        for session in self._open:
            if session.url == self._leader_url and session.protocol >= USAGE_PROTOCOL:
                session.queue.append(UsageReport(batch))
                self._tell()
                return True
        return False

    def following(self) -> Following:
        """For /metrics."""
        now_s = self._machine.now_s()
        opened = {session.url for session in self._open}
        return Following(
            sessions={url: url in opened for url in self.control_planes()},
            leader=self._leader_url,
            epoch=self._state.highest.epoch if self._state.highest is not None else 0,
            leader_silent_s=now_s - self._leader_heard_s,
            list_age_s=now_s - self._list_heard_s,
            by_standby=self._observing is not None,
        )

    def look_again(self) -> None:
        """The router acts on something that it was given before, or has let go of it: whoever waits for that is told."""
        self._tell()

    async def run(self) -> None:
        """Keeps a session with every control plane until cancelled."""
        self._leader_heard_s = self._list_heard_s = self._machine.now_s()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._kept.run)
            nursery.start_soon(self._watch_leader)
            self._nursery, self._dialling = nursery, {}  # what a leader tells of control planes starts and ends tasks here
            self._dial_exactly()

    def control_planes(self) -> tuple[str, ...]:
        """Those that are dialled: the file's, and those that a leader has told of."""
        return dialled(self._configured, self._state.control_planes, self._reached_at)

    def _dial_exactly(self) -> None:
        """One task for each control plane, none for another."""
        wanted = self.control_planes()
        for url in [url for url in self._dialling if url not in wanted]:
            self._dialling.pop(url).cancel()
        for url in wanted:
            if url not in self._dialling and self._nursery is not None:
                self._dialling[url] = scope = trio.CancelScope()
                self._nursery.start_soon(self._keep, url, scope)

    # --- one control plane

    async def _keep(self, url: str, scope: trio.CancelScope) -> None:
        """Dials again and again, until told not to."""
        with scope:
            await self._dial_again_and_again(url)

    async def _dial_again_and_again(self, url: str) -> None:
        """With full jitter."""
        window_s = RECONNECT_S_FIRST
        loss = Loss()
        while True:
            wait_s: float | None = None
            ended: LlmgwError | None = None
            welcomed = trio.Event()
            try:
                async with self._dial(url) as channel:
                    await self._converse(channel, url, welcomed)
            except (TurnedAway, TooFar) as err:
                ended, wait_s = err, TURNED_AWAY_AGAIN_S
            except Denied as err:
                ended, wait_s = err, DENIED_AGAIN_S
            except LlmgwError as err:
                ended = err
            if welcomed.is_set():
                window_s = RECONNECT_S_FIRST
                loss.over()
            if loss.is_news(ended):
                why = ended.message if ended is not None else "the session ended"
                log.warning("no session with this control plane; the router serves what it has", url=url, why=why)
            await self._machine.sleep_until(self._machine.now_s() + (wait_s or self._machine.rng.uniform(0.0, window_s)))
            window_s = min(window_s * 2, RECONNECT_S_MAX)

    async def _converse(self, channel: Channel, url: str, welcomed: trio.Event) -> None:
        """One session from hello to end; `welcomed` is set once both have agreed to hold it.

        Raises LlmgwError for every end that is not a cancel.
        """
        welcome = await greet(channel, self._hello(), RouterWelcome)
        pin = self._state.highest.cluster_id if self._state.highest is not None else ""
        if pin and welcome.cluster_id != pin:
            text = f"this router belongs to cluster {pin}, and {url} is of cluster {welcome.cluster_id}"
            await part(channel, Goodbye("foreign_cluster", text))
            raise TurnedAway(f"{text}. To move the router, stop it and give it a new [router] data_dir", code="foreign_cluster")
        self._take_ttl(welcome.ttl_s)
        log.info("follows", url=url, cluster=welcome.cluster_id, server=welcome.owner, epoch=welcome.epoch, leads=welcome.leads)
        welcomed.set()
        if welcome.reached_at:
            self._reached_at[url] = welcome.reached_at
            self._remember(self._state.control_planes)
        session = _Session(url, channel.peer, welcome.protocol, self._machine.now_s())
        ours_to_end = True
        self._open.append(session)
        try:
            await until_one_ends(lambda: self._report(channel, session), lambda: self._listen(channel, session))
        except LlmgwError:
            ours_to_end = False
            raise
        finally:
            self._open.remove(session)
            if ours_to_end:
                await part(channel, Goodbye("session_ends", "the router ends this session"))

    def _hello(self) -> RouterHello:
        return RouterHello(
            self.router_id,
            self._instance,
            __version__,
            self._state.highest,
            self._acknowledged(),
            self._workers,
            ROUTER_PROTOCOL,
            DIGEST_FORM,
        )

    async def _listen(self, channel: Channel, session: _Session) -> None:
        incoming = Incoming(channel, log, SILENT_LIMIT_S)
        while True:
            message = await incoming.next()
            session.heard_s = self._machine.now_s()
            async with self._turn:
                await self._take(message, session)

    # --- what is pushed

    async def _take(self, message: Message, session: _Session) -> None:
        match message:
            case PushDelta(stamp, change, settled, gone, push):
                if (whole := self._completed(change, session)) is not None:
                    await self._take_list(PushEndpoints(stamp, whole, settled, gone, push), session)
            case PushEndpoints():
                await self._take_list(message, session)
            case PushCatalog(token, catalog):
                if self._admits(token, session):
                    changed = catalog != self._state.catalog
                    await self._lead(token, catalog=catalog)
                    if changed:
                        self._router.set_catalog(catalog)
            case PushPolicy(token, policy):
                if self._admits(token, session):
                    changed = policy != self._state.policy
                    await self._lead(token, policy=policy)
                    if changed:
                        self._set_policy(policy)
                        log.info("a policy is in force", keys=len(policy.keys), guard_rules=len(policy.guard.rule), epoch=token.epoch)
            case Standing(token, _, ttl_s, push):
                self._take_ttl(ttl_s)
                if push and push != session.push:
                    self._ask(session, "a list that it has sent has not arrived")
                if token is None:
                    return
                if self._admits(token, session):
                    await self._lead(token)
                    self._act_on_leader(token)
            case ControlPlanes():
                if session.url == self._leader_url:
                    self._remember(remembered(self._state.control_planes, message))
            case UsageTaken(boot, number):
                self.usage_taken(boot, number)
            case _:
                log.warning("a message that is not for a router", peer=session.peer, type=type(message).__name__)

    async def _take_list(self, message: PushEndpoints, session: _Session) -> None:
        session.said, session.push, session.asked_s = message.endpoints, message.push, None
        stamp = message.stamp
        if stamp.from_standby:
            self._observe(stamp, message.endpoints, session)
        elif self._admits(stamp.token, session) and not self._is_late(stamp):
            endpoints = self._sound(message.endpoints)
            if not message.settled:
                # Not the last leader's list: what a standby has seen go since must not come back.
                endpoints = unsettled_list(self._acting_on, endpoints, message.gone, self._state.catalog or Catalog())
            withdrawn = self._withdrawn_by(endpoints)
            await self._lead(stamp.token, stamp=stamp, push=message.push, endpoints=endpoints, withdrawn=withdrawn)
            self._observing = None
            self._list_heard_s = self._machine.now_s()
            self._act()
            self._tell()

    def _remember(self, known: tuple[str, ...]) -> None:
        known = without_second_names(self._configured, known, self._reached_at)
        if known != self._state.control_planes:
            self._state = attrs.evolve(self._state, control_planes=known)
            log.info("other control planes are known", control_planes=list(known))
            self._kept.save_soon()
            self._dial_exactly()

    def _completed(self, change: list_delta.ListDelta, session: _Session) -> EndpointList | None:
        """The whole list that a delta stands for. None where we cannot be sure of it: then it is asked for, and we stay as we are."""
        try:
            return list_delta.apply(session.said, change)
        except Conflict as err:
            self._ask(session, err.message)
            return None

    def _ask(self, session: _Session, why: str) -> None:
        now_s = self._machine.now_s()
        if session.asked_s is not None and now_s - session.asked_s < ASK_AGAIN_S:
            return
        session.asked_s = now_s
        log.warning("the list of endpoints is not certain; asks for the whole one", peer=session.peer, why=why)
        session.queue.append(AskEndpoints(why))
        self._tell()

    def _admits(self, token: FencingToken, session: _Session) -> bool:
        """May what a leader sent under `token` be taken? Tells the sender where not. Raises for another cluster's."""
        verdict = self._judge(token, session)
        if verdict is Fence.OBEY:
            self._leader_heard_s = self._machine.now_s()
            self._leader_url = session.url
            session.seen = None  # it leads: what it saw as a standby is said better by now
            return True
        self._refuse(verdict, token, session)
        return False

    def _judge(self, token: FencingToken, session: _Session) -> Fence:
        """Raises for what is no epoch: once taken, it could never be followed by another."""
        if not 0 <= token.epoch <= EPOCH_MAX:
            raise Unavailable(f"{session.peer} sends lists of epoch {token.epoch}, which is none")
        return self._rule(self._state.highest, token)

    def _refuse(self, verdict: Fence, token: FencingToken, session: _Session) -> None:
        highest = self._state.highest
        assert highest is not None
        if verdict is Fence.FOREIGN:
            raise TurnedAway(
                f"{session.peer} sends lists of cluster {token.cluster_id}, and this router belongs to cluster {highest.cluster_id}",
                code="foreign_cluster",
            )
        if token in session.refused:
            return
        session.refused.add(token)
        text = f"epoch {token.epoch} of {token.owner}: this router obeys epoch {highest.epoch} of {highest.owner}"
        log.warning("a stale control plane is not obeyed", peer=session.peer, epoch=token.epoch, highest=highest.epoch, owner=highest.owner)
        session.queue.append(RouterRefused("stale_epoch", text, highest.epoch, highest.owner))
        self._tell()

    def _is_late(self, stamp: ListStamp) -> bool:
        before = self._state.stamp
        return before is not None and before.token == stamp.token and stamp.generation < before.generation

    async def _lead(self, token: FencingToken, **changes: object) -> None:
        """The new state. A token that was not met before is on disk before anything is done under it.

        A disk that refuses does not stop the routing: the fence is then as old as the disk after a restart, and the log says so.
        """
        anew = token != self._state.highest
        if not anew and not changes:
            return
        self._state = attrs.evolve(self._state, highest=token, **changes)  # type: ignore[arg-type]
        if anew:
            log.info("obeys a leader", owner=token.owner, epoch=token.epoch)
            await self._kept.save()
        self._kept.save_soon()

    def _withdrawn_by(self, endpoints: EndpointList) -> tuple[EndpointId, ...]:
        listed = {endpoint.id for endpoint in endpoints.endpoints}
        gone = [endpoint.id for endpoint in self._state.endpoints.endpoints if endpoint.id not in listed]
        before = [known for known in self._state.withdrawn if known not in listed]
        return tuple(dict.fromkeys((*before, *gone)))[-WITHDRAWN_MAX:]

    def _sound(self, endpoints: EndpointList) -> EndpointList:
        """The list without endpoints whose address is none: one bad row must not cost the others."""
        bad: list[Endpoint] = []
        sound: set[str] = set()
        for endpoint in endpoints.endpoints:
            if endpoint.url in self._sound_urls or engine_url_fault(endpoint.url) is None:
                sound.add(endpoint.url)
            else:
                bad.append(endpoint)
        self._sound_urls = frozenset(sound)
        if not bad:
            return endpoints
        log.warning("endpoints without a usable address are left out", endpoints=[endpoint.id for endpoint in bad[:10]], count=len(bad))
        left_out = {endpoint.id for endpoint in bad}
        return attrs.evolve(endpoints, endpoints=tuple(one for one in endpoints.endpoints if one.id not in left_out))

    def _set_policy(self, policy: Policy) -> None:
        self._router.set_policy(attrs.evolve(policy, cors_origins=self._cors_origins))
        left = not_in_force(policy.guard)
        if left:  # its control planes may be of a later build
            log.warning("guard rules that this build does not enforce, or not wholly", rules=left[:LOGGED_RULES_MAX], count=len(left))

    def _act(self) -> None:
        """Hands the router the list that counts now: a leader's, or that list as a standby sees it."""
        state = self._state
        if state.stamp is None:
            return
        stamp, endpoints = state.stamp, state.endpoints
        if self._observing is not None:
            endpoints = observed_list(endpoints, frozenset(state.withdrawn), state.catalog or Catalog(), self._observing)
            stamp = attrs.evolve(stamp, from_standby=True)
        self._router.set_endpoints(endpoints, stamp)
        self._acting_on = endpoints
        self._acted = None if self._observing is not None else Acknowledged(stamp.token, stamp.generation, state.push)

    # --- what standbys see

    def _observe(self, stamp: ListStamp, endpoints: EndpointList, session: _Session) -> None:
        verdict = self._judge(stamp.token, session)
        if verdict is not Fence.OBEY:
            self._refuse(verdict, stamp.token, session)
            return
        listed = frozenset(endpoint.id for endpoint in endpoints.endpoints)
        before = session.seen[1].listed if session.seen is not None else frozenset()
        session.seen = (stamp, Observation(self._sound(endpoints), listed | before))

    async def _watch_leader(self) -> None:
        """While the leader is silent for a ttl, what a standby sees counts."""
        while True:
            await self._machine.sleep_until(self._machine.now_s() + STANDING_S)
            async with self._turn:
                await self._look_at_standbys()

    async def _look_at_standbys(self) -> None:
        silent_s = self._machine.now_s() - self._leader_heard_s
        if not may_take(silent_s, self._ttl_s):
            return
        if self._state.stamp is None:
            return  # there is no leader's list to correct
        found: tuple[ListStamp, Observation] | None = None
        for session in self._open:
            seen_here = session.seen
            if seen_here is None or self._rule(self._state.highest, seen_here[0].token) is not Fence.OBEY:
                continue
            if found is None or seen_here[0].token.epoch > found[0].token.epoch:  # of two standbys, the one whose agents are further
                found, self._list_heard_s = seen_here, session.heard_s
        if found is None:
            return  # nobody sees anything: what was last acted on stays
        stamp, seen = found
        if seen == self._observing:
            return
        if self._observing is None:
            log.warning("the leader is silent; what a standby sees is taken", silent_s=round(silent_s, 1), epoch=stamp.token.epoch)
        await self._lead(stamp.token)
        self._observing = seen
        self._act()
        self._tell()

    def _act_on_leader(self, token: FencingToken) -> None:
        """A leader is heard again. Its list counts, if it is the one that we have; that of a leader before it is older news."""
        if self._state.stamp is None or self._state.stamp.token != token:
            return
        self._list_heard_s = self._machine.now_s()
        if self._observing is not None:
            log.info("a leader is heard again; its list counts")
            self._observing = None
            self._act()
            self._tell()

    def _take_ttl(self, ttl_s: float) -> None:
        self._ttl_s = min(max(ttl_s, TTL_S_LOW), TTL_S_HIGH)

    # --- what goes back

    def _tell(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    def _acknowledged(self) -> Acknowledged | None:
        """None while a standby's view is acted on: no leader's list is. Never what is still on its way to the disk, or to a worker."""
        acted = self._acted
        if acted is None:
            self._confirmed = None
        elif self._router.settled():
            self._confirmed = attrs.evolve(acted, generation=min(self._router.acknowledged(), acted.generation))
        return self._confirmed

    def _withdrawn_use(self) -> dict[EndpointId, int]:
        """Requests in flight at endpoints that are on no list any more."""
        listed = {endpoint.id for endpoint in self._acting_on.endpoints}
        return {known: use.in_flight for known, use in self._router.use().items() if use.in_flight and known not in listed}

    async def _report(self, channel: Channel, session: _Session) -> None:
        while True:
            await self._send(channel, self._report_of(session))
            while session.queue:
                await self._send(channel, session.queue.popleft())
            due_s = self._machine.now_s() + STANDING_S
            while self._machine.now_s() < due_s and not self._is_news(session):
                changed = self._changed
                with trio.move_on_after(WITHDRAWN_LOOK_S if session.withdrawn_use else STANDING_S):
                    await changed.wait()

    def _is_news(self, session: _Session) -> bool:
        if session.queue or self._acknowledged() != session.acknowledged:
            return True
        return bool(session.withdrawn_use) and self._withdrawn_use() != session.withdrawn_use

    def _report_of(self, session: _Session) -> RouterReport:
        now_s = self._machine.now_s()
        used = self._router.use()
        rows: list[UseOf] = []
        for endpoint, use in used.items():
            used_at_s = now_s - use.last_used_s
            before = session.told.get(endpoint)
            if before is None or use.in_flight or _still(use) != _still(before[0]) or used_at_s > before[1] + WITHDRAWN_LOOK_S:
                rows.append(UseOf(endpoint, use))
                session.told[endpoint] = (use, used_at_s)
        gone = tuple(endpoint for endpoint in session.told if endpoint not in used)
        for endpoint in gone:
            del session.told[endpoint]
        full, session.full = session.full, False
        session.acknowledged = self._acknowledged()
        session.withdrawn_use = self._withdrawn_use()
        return RouterReport(self._state.highest, session.acknowledged, tuple(rows), gone, full, len(self._acting_on.endpoints))

    async def _send(self, channel: Channel, message: FromRouter) -> None:
        with trio.move_on_after(SEND_LIMIT_S) as limit:
            await channel.send(message)
        if limit.cancelled_caught:
            raise Unavailable(f"{channel.peer} took no message for {SEND_LIMIT_S:g} s")


def _nobody_tells(boot: str, number: int) -> None:
    """A router that counts nothing."""


def _still(use: EndpointUse) -> EndpointUse:
    """What does not change by itself."""
    return attrs.evolve(use, last_used_s=0.0, silent_s=0.0)
