"""The other control planes: who stands by, how much each of them hears, and a word to them when the lease is free.

A standby presents itself to the leader every second; that is how a leader knows whom it could hand over to, and notices that
it hears less than somebody else does. Nothing here decides who leads: the lease does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, Protocol

import attrs
import structlog
import trio

from llmgw.control.leadership import Leadership
from llmgw.domain.errors import LlmgwError, Unavailable
from llmgw.domain.ids import OwnerId, holder_name
from llmgw.domain.ports import Machine
from llmgw.domain.settings_version import PlaneSettings
from llmgw.domain.usage import UsageBatch
from llmgw.identity.admission import REVOKED
from llmgw.lease.state import PeerView
from llmgw.store.copies import News, Position

PRESENT_S: Final = 1.0  # between a standby's words to the leader
PRESENT_DEADLINE_S: Final = 2.0
HEALTHY_S: Final = 3.0  # a standby that was not heard for three of its words is not one to hand over to
FORGOTTEN_S: Final = 60.0  # members of the cluster are the control planes heard in the last minute (control.md 4)
RELEASED_DEADLINE_S: Final = 0.5  # a word that saves a standby part of its poll, and is not worth waiting for
CHANGED_DEADLINE_S: Final = 1.0  # as long as a standby takes to look by itself
SUCCESSOR_S_MAX: Final = 1.0  # a leader that leaves keeps its agents so long for the next one, which needs about 0.1 s
ASK_AGAIN_S: Final = 0.05
log = structlog.get_logger("llmgw.peers")


@attrs.frozen
class Presence:
    """A standby's word: who it is, where it is reached, and how many nodes it hears.

    `token_sha256` is of the admin token in its data directory, which the leader makes valid everywhere. `disk_fine`: that
    directory takes writes, without which nobody can lead. `settings` is what it makes of the newest settings. `reached_at` is where
    agents and routers of other machines find it, "" where they do not.
    """

    owner: OwnerId
    address: str
    build: str
    nodes_heard: int
    token_sha256: str = attrs.field(default="", repr=False)
    disk_fine: bool = True
    settings: PlaneSettings = PlaneSettings()
    reached_at: str = ""


class PeerLink(Protocol):
    """How one control plane reaches another. All raise LlmgwError; whoever was told of a release says whether it leads now."""

    async def present(self, address: str, presence: Presence) -> None: ...

    async def say_released(self, address: str) -> bool: ...

    async def say_changed(self, address: str) -> None: ...

    async def give_usage(self, address: str, batch: UsageBatch) -> None:
        """Returns once that one, the leader, has stored it."""
        ...

    async def news(self, address: str, position: Position) -> News:
        """What is new in a replicated store since `position`; that one waits a moment for something."""
        ...


class NoPeers:
    """For a control plane that is alone by definition."""

    async def present(self, address: str, presence: Presence) -> None:
        return None

    async def say_released(self, address: str) -> bool:
        return False

    async def say_changed(self, address: str) -> None:
        return None

    async def give_usage(self, address: str, batch: UsageBatch) -> None:
        raise Unavailable("there is no other control plane", code="not_leader")

    async def news(self, address: str, position: Position) -> News:
        raise Unavailable("there is no other control plane", code="not_leader")


class Peers:
    """`me()` is what this control plane says of itself; `joined(presence)` is called on a leader for each word of a standby."""

    def __init__(
        self,
        machine: Machine,
        leadership: Leadership,
        link: PeerLink,
        me: Callable[[], Presence],
        joined: Callable[[Presence], Awaitable[None]],
    ) -> None:
        self._machine = machine
        self._leadership = leadership
        self._link = link
        self._me = me
        self._joined = joined
        self._known: dict[OwnerId, tuple[Presence, float]] = {}
        self.reached_at: dict[str, str] = {}  # of each control plane that has presented itself here, by name, heard lately or not
        self._refused = ("", "")  # by whom this one's word was last refused, and how
        self._changed = trio.Event()  # something that others read every second is new: they are told to look now

    async def heard_from(self, presence: Presence) -> None:
        """A standby has presented itself here."""
        if presence.owner == self._leadership.owner:
            return  # the lease still names the process that this one has taken the place of, at the same address
        if presence.owner not in self._known:
            log.info("a control plane stands by", name=holder_name(presence.owner), address=presence.address, build=presence.build)
        # A process that was started anew at the same address is one standby, not two.
        self._known = {owner: one for owner, one in self._known.items() if one[0].address != presence.address}
        self._known[presence.owner] = (presence, self._machine.now_s())
        self.reached_at[holder_name(presence.owner)] = presence.reached_at
        self._compare()
        if self._leadership.is_leader:
            await self._joined(presence)

    def standbys(self) -> tuple[tuple[Presence, float], ...]:
        """(who, seconds since it was last heard), sorted; those heard within the last minute."""
        now_s = self._machine.now_s()
        self._known = {owner: (one, at_s) for owner, (one, at_s) in self._known.items() if now_s - at_s <= FORGOTTEN_S}
        return tuple((one, now_s - at_s) for _, (one, at_s) in sorted(self._known.items()))

    def healthy(self) -> tuple[Presence, ...]:
        """Those that could take over: heard lately, on a disk that takes writes."""
        return tuple(one for one, age_s in self.standbys() if age_s <= HEALTHY_S and one.disk_fine)

    async def check_healthy(self) -> None:
        """Before a hand-over: who does not answer now is none to hand over to, so that the lease is not let go of to nobody."""
        async with trio.open_nursery() as nursery:
            for one in self.healthy():
                nursery.start_soon(self._doubt_if_gone, one)
        self._compare()

    async def _doubt_if_gone(self, one: Presence) -> None:
        with trio.move_on_after(PRESENT_DEADLINE_S):
            try:
                await self._link.say_released(one.address)  # it looks at the lease, finds it held, and has answered
            except LlmgwError as err:
                log.debug("a standby does not answer", address=one.address, why=err.message)
            else:
                return
        self._known[one.owner] = (one, self._machine.now_s() - HEALTHY_S - PRESENT_S)  # known still, and not one to hand over to

    async def wait_leader(self, limit_s: float) -> str:
        """The leader's address, looked for again where none is known; "" after the limit."""
        self._leadership.look()
        with trio.move_on_after(limit_s):
            while not (address := self.leader_address()) and not self._leadership.is_leader:
                await self._leadership.changed.wait()
            return address
        return ""

    def addresses(self) -> tuple[str, ...]:
        """Where the other control planes are, as far as this one knows: the leader first."""
        found = [self.leader_address(), *(one.address for one, _ in self.standbys())]
        return tuple(dict.fromkeys(address for address in found if address))

    def leader_address(self) -> str:
        """Where the leader's admin port is, as the lease tells; "" while nobody else is known to lead."""
        record = self._leadership.record
        if record is None or record.released or record.owner == self._leadership.owner:
            return ""
        return record.addr

    async def run(self) -> None:
        """Until cancelled: a standby's word to the leader, and a word of the leader's that lets go."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._say_when_released)
            nursery.start_soon(self._say_when_changed)
            while True:
                await self._machine.sleep_until(self._machine.now_s() + PRESENT_S)
                if self._leadership.is_leader:
                    self._compare()
                elif address := self.leader_address():
                    await self._present(address)

    def say_changed(self) -> None:
        """The settings, the roll-out or the pause changed: standbys are told to look now. Their own look each second is the backstop."""
        self._changed.set()

    async def _say_when_changed(self) -> None:
        while True:
            await self._changed.wait()
            self._changed = trio.Event()
            async with trio.open_nursery() as nursery:
                for one, age_s in self.standbys():
                    if age_s <= HEALTHY_S:
                        nursery.start_soon(self._tell_changed, one.address)

    async def _tell_changed(self, address: str) -> None:
        with trio.move_on_after(CHANGED_DEADLINE_S):
            try:
                await self._link.say_changed(address)
            except LlmgwError as err:  # it looks by itself within a second
                log.debug("a standby did not take our word", address=address, why=err.message)

    async def _present(self, address: str) -> None:
        with trio.move_on_after(PRESENT_DEADLINE_S):
            try:
                await self._link.present(address, self._me())
            except LlmgwError as err:  # the lease decides whether it is dead
                if self._refused != (address, err.code) and err.code != "leader_unreachable":
                    log.warning("the leader does not take our word", address=address, why=err.message)
                self._refused = (address, err.code)
                if err.code == REVOKED:  # the feed with which our copy would say so is refused as well
                    self._leadership.bar(err.message)
            else:
                self._refused = ("", "")

    def _compare(self) -> None:
        healthy = self.healthy()
        heard = self._me().nodes_heard
        self._leadership.peers(PeerView(heard, max((one.nodes_heard for one in healthy), default=0), len(healthy)))

    async def _say_when_released(self) -> None:
        held = False
        while True:
            changed = self._leadership.changed
            holds = self._leadership.epoch > 0
            record = self._leadership.record
            if held and not holds and record is not None and record.released:
                await self.wait_succeeded()
                self._leadership.look()  # who asks here from now on is told who leads
            held = holds
            await changed.wait()

    async def wait_succeeded(self) -> None:
        """For a leader that has left: returns when another leads, when nobody is there to, or after SUCCESSOR_S_MAX."""
        until_s = self._machine.now_s() + SUCCESSOR_S_MAX
        while (there := [one for one, age_s in self.standbys() if age_s <= HEALTHY_S]) and self._machine.now_s() < until_s:
            for one in there:
                if await self._tell_released(one.address):
                    return
            await self._machine.sleep_until(self._machine.now_s() + ASK_AGAIN_S)

    async def _tell_released(self, address: str) -> bool:
        """Does that one lead by now?"""
        with trio.move_on_after(RELEASED_DEADLINE_S):
            try:
                return await self._link.say_released(address)
            except LlmgwError as err:  # it looks by itself within its poll
                log.debug("a standby did not take our word", address=address, why=err.message)
        return False
