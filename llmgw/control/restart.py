"""Carries a roll-out on: the leader decides whose turn it is, and whoever has the token restarts.

The token is in the store's one row, written by the leader under its epoch; each control plane reads it with the settings. So
any leader goes on where the one before stopped, and a word that is lost is read a second later. The rules are `rollout`'s.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Final

import attrs
import structlog
import trio

from llmgw.control import rollout, settings_boot
from llmgw.control.event_log import EventLog
from llmgw.control.leadership import Leadership
from llmgw.control.peers import Peers
from llmgw.control.rollout import Grant, HandOver, Member, RestartMe, RolloutView, Rules, Save
from llmgw.control.settings_in_force import SettingsInForce
from llmgw.control.settings_poller import SettingsPoller
from llmgw.domain.errors import Conflict, LlmgwError
from llmgw.domain.event import Level
from llmgw.domain.ids import holder_name
from llmgw.domain.ports import Machine
from llmgw.domain.settings_version import Applied, RolloutPhase, RolloutRow
from llmgw.protocol.waiting import wait_woken
from llmgw.store import settings as rows
from llmgw.store.connection import Store

LOOK_S: Final = 1.0
FRESH_S: Final = 1.0  # a grant is followed so soon after it was read; the leader waits for several seconds at least
log = structlog.get_logger("llmgw.rollout")


class Rollouts:
    """`restart(why)` asks for this process's graceful restart, and returns; `plans()` counts the plans of this term.

    `alone`: there can be no other control plane, and nobody reads a row.
    """

    def __init__(
        self,
        machine: Machine,
        store: Store,
        leadership: Leadership,
        peers: Peers,
        events: EventLog,
        in_force: SettingsInForce,
        poller: SettingsPoller,
        *,
        folder: Path,
        address: str,
        plans: Callable[[], int],
        restart: Callable[[str], None],
        changed: Callable[[], None],
        alone: bool,
        rules: Rules = rollout.RULES,
    ) -> None:
        self._machine = machine
        self._store = store
        self._leadership = leadership
        self._peers = peers
        self._events = events
        self._in_force = in_force
        self._poller = poller
        self._folder = folder
        self._address = address
        self._plans = plans
        self._restart = restart
        self._changed = changed
        self._alone = alone
        self.rules = rules
        self._began_s = machine.now_s()
        self._wake = trio.Event()
        self._saved: tuple[int, RolloutRow, float] | None = None  # (epoch, the row that this leader stored, when)
        self._leads_s: tuple[int, float] = (0, 0.0)  # (epoch, since when it leads)
        self._confirmed_s: tuple[int, float] | None = None  # (epoch, since when it is confirmed with a plan)
        self._said: dict[str, Applied] = {}
        self._told_frozen = ""  # why, as it stands in the history: going back comes to the same rest again
        self._restarting = False

    def nudge(self) -> None:
        """Something changed: look again."""
        self._wake.set()

    @property
    def up_s(self) -> float:
        """Seconds that this process has served; 0 from the moment in which it begins to restart."""
        return 0.0 if self._restarting else self._machine.now_s() - self._began_s

    def describe(self) -> str:
        """Where the roll-out stands, in a sentence for people; "" at rest."""
        return rollout.describe(self._poller.row, self._view())

    def check_hand_over(self) -> None:
        """Raises Conflict while this leader proves a version: that it lets go would be taken for its failure."""
        row = self._poller.row
        if row.successor and row.successor == self._address:
            raise Conflict(
                f"this control plane is proving that version {row.proving} of the settings can lead: {self.describe()}; "
                "to hand over now would have that version held",
                code="proving",
            )

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._look()
            await wait_woken(self._machine, self._wake, self._machine.now_s() + LOOK_S)
            self._wake = trio.Event()

    async def _look(self) -> None:
        if self._restarting:
            return
        behind = self._in_force.restarts and (self._in_force.pending or self._in_force.restart_for_file)
        if self._alone:
            await self._keep_alone()
            if behind:
                self._begin_restart(self._why())
            return
        if not self._leadership.is_leader:
            self._confirmed_s = None
            self._stand_back()
            if self._is_told(self._poller.row):
                await self._follow_grant()
            return
        if not self._leadership.confirmed(self._machine.now_s()):
            self._confirmed_s = None
            return
        if self._in_force.restarts:
            await self._lead()

    async def _keep_alone(self) -> None:
        if self._poller.newest and self._leadership.confirmed(self._machine.now_s()):
            with contextlib.suppress(LlmgwError):  # looked at again
                await self._keep_said(self._view())

    def _is_told(self, row: RolloutRow) -> bool:
        """Is it this control plane's turn? One that hands over has the token, too, and waits until its successor has proved itself."""
        if row.token != self._address or row.phase not in (RolloutPhase.STANDBY, RolloutPhase.LEADER):
            return False
        if row.for_file:
            return bool(self._in_force.restart_for_file)
        return 0 < self._in_force.pending == row.version

    async def _follow_grant(self) -> None:
        """Not by what was read a while ago: a process that stood still may have lost the token to somebody else meanwhile."""
        asked_s = self._machine.now_s()
        try:
            row = await rows.load_rollout(self._store)
        except LlmgwError as err:  # without the store nobody restarts; looked at again
            log.debug("the roll-out cannot be read", why=err.message)
            return
        fresh = self._machine.now_s() - asked_s <= FRESH_S
        if fresh and self._is_told(row) and not self._leadership.may_write:
            self._begin_restart(self._why())

    async def _lead(self) -> None:
        try:
            await self._keep_said(self._view())
            if not self._leadership.confirmed(self._machine.now_s()):
                return  # it took so long that somebody else may lead
            view, row = self._view(), self._poller.row
            match rollout.next_step(view, row, self.rules):
                case Save(new):
                    await self._save(row, new)
                case Grant(_, address):  # it reads the row by itself; this saves it the second
                    log.debug("a control plane may restart", address=address)
                    self._peers.say_changed()  # not `changed`, which has this one look again at once, for ever
                case HandOver(_):
                    await self._peers.check_healthy()
                    if not isinstance(rollout.next_step(self._view(), row, self.rules), HandOver):
                        return  # who was to lead does not answer any more
                    log.info("handing over to one that can lead with the settings as they are to be", version=row.version)
                    self._leadership.hand_over()
                    self._stand_back()  # at once, and not at the next look: it may be taken by one that only passes it on
                case RestartMe(_):
                    self._begin_restart(self._why())
        except LlmgwError as err:  # the store does not answer, or somebody else leads: looked at again
            log.debug("the roll-out could not go on", why=err.message)

    def _stand_back(self) -> None:
        if rollout.stands_back(self._poller.row, self._address, self._in_force.applied, self.rules):
            self._leadership.stand_back(rollout.STAND_BACK_S)

    async def _save(self, before: RolloutRow, row: RolloutRow) -> None:
        epoch = self._leadership.epoch
        await rows.save_rollout(self._store, epoch, row)
        self._saved = (epoch, row, self._machine.now_s())
        self._poller.row = row
        if row.phase is RolloutPhase.FROZEN and row.reason != self._told_frozen:
            self._told_frozen = row.reason
            self._events.record("rollout.frozen", "settings", row.reason, Level.WARNING)
        elif row.phase is RolloutPhase.IDLE and before.phase not in (RolloutPhase.IDLE, RolloutPhase.FROZEN):
            self._events.record("rollout.done", "settings", f"every control plane runs version {before.version}")
        elif before.phase is RolloutPhase.IDLE and row.phase is not RolloutPhase.IDLE:
            self._events.record("rollout.begun", "settings", f"control planes restart one after another for version {row.version}")
        await self._poller.look_now()  # what is held or free now changes what is wanted here
        self._changed()

    async def _keep_said(self, view: RolloutView) -> None:
        """What each control plane makes of the versions is in the store: who runs what, and who refused why."""
        said = {
            member.address: Applied(member.address, member.name, attrs.evolve(member.settings, up_s=0.0), self._machine.wall_s())
            for member in view.members
        }
        fresh = [one for one in said.values() if (old := self._said.get(one.address)) is None or old.settings != one.settings]
        if fresh:
            await rows.save_applied(self._store, self._leadership.epoch, fresh)
            self._said.update(said)

    def _view(self) -> RolloutView:
        now_s = self._machine.now_s()
        leads = self._leadership.is_leader
        epoch, row = self._leadership.epoch, self._poller.row
        if not leads or not self._plans():
            self._confirmed_s = None
        elif self._confirmed_s is None or self._confirmed_s[0] != epoch:
            self._confirmed_s = (epoch, now_s)
        if self._leads_s[0] != epoch:
            self._leads_s = (epoch, now_s)
        saved_here = self._saved is not None and self._saved[:2] == (epoch, row)
        saved_s = self._saved[2] if self._saved is not None and saved_here else self._leads_s[1]
        me = Member(self._address, holder_name(self._leadership.owner), 0.0, self._in_force.said(self.up_s), is_me=True)
        others = tuple(Member(one.address, holder_name(one.owner), age_s, one.settings) for one, age_s in self._peers.standbys())
        rollout_settings = self._in_force.settings.rollout
        return RolloutView(
            members=(me, *others),
            me=self._address,
            desired=self._poller.desired,
            leads_s=now_s - self._leads_s[1] if leads else 0.0,
            confirmed_plan_s=now_s - self._confirmed_s[1] if self._confirmed_s is not None else 0.0,
            saved_here=saved_here,
            epoch=epoch,
            paused=self._poller.pause is not None,
            delay_s=rollout_settings.leader_delay_s,
            timeout_s=rollout_settings.standby_timeout_s,
            granted_age_s=now_s - saved_s if leads else 0.0,
        )

    def _why(self) -> str:
        if self._in_force.pending:
            return f"settings version {self._in_force.pending}"
        return f"its file: {', '.join(self._in_force.restart_for_file)}"

    def _begin_restart(self, why: str) -> None:
        self._restarting = True
        log.info("restarting", why=why)
        into = 0 if self._poller.row.for_file and not self._alone else self._in_force.pending
        settings_boot.tell_next(self._machine.disk, self._folder, into or self._in_force.applied)
        self._restart(why)
