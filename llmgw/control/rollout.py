"""How a settings version, or a machine's own changed file, reaches every control plane: one restart at a time, the leader last.

Pure: no clock, no I/O, no log. `next_step(view, row)` is asked of whoever leads, about each second and while it is CONFIRMED;
it says what to do next, with the reason. The row is in the store, so that any leader goes on with it. Owns: token (the address of
the one control plane that may be down now), held (a version that nobody may start into), proven (a version that somebody has led
with for `delay_s`), at rest (idle, or frozen while a newer version than the desired one is held).

How it goes, with the version as V and who led at the beginning as `led`:
| phase | token | what the leader does | what ends it |
|---|---|---|---|
| idle | "" | sees who is behind, or has a changed file | somebody is, and may restart: standby |
| standby | "" | chooses: who runs a held version, by address, `led` | chosen: token · only the leader left: handing_over · none: at rest |
| standby | X | tells X to restart, and waits | X runs V: done, next · X refuses V or stays away: frozen, V held |
| handing_over | led | lets go of the lease | one that runs V leads: proving · `led` leads again: frozen, V held |
| proving | led | leads, for `delay_s` with a finished plan | proven: standby, then leader · another leads, or no plan: frozen, V held |
| leader | led | as standby with a token; V is proven | `led` runs V, or is given up: at rest |
| frozen | "" | as idle, with what failed as the reason | somebody is behind another version: standby |

A held version is no longer desired, so whoever runs it is behind an older one and goes back by the same way; a leader that runs
one first lets somebody lead who does not. Frozen without a hold stops everybody: when only a file was changed, until its machine
(`token`) is back and wants nothing more or another version is desired; when no older version is left, until another is desired.

What the numbered rules of the design leave open, and what holds here:
- *Another version in the middle*: who has the token settles first, a leader that runs an unproven version proves it first; then
  the newest is rolled out from its beginning. A restart is into the version that the grant names, never into "the newest", or a
  bomb that is written while one is down has two victims.
- *A process that starts without having been told* starts into what it last ran (`start_version`), or into an older one where that is
  put aside: a crash tries nothing new.
- *What is gone back to is proven*: with a version, those before it that nobody has proven are held. A proven version is never held,
  and neither is the last one left.
- *Where a proven version fails*, the machine is at fault: it is left out with a reason, and the others go on. So it is when the old
  leader does not come back, the holder dies for good while going back, or a late standby cannot run what all others run.
- *The first* with a version runs it for `delay_s` before a second is told, the others for `LATER_S`: a process may well die 10 s
  after its start. One that had it and falls silent is waited for, and after `timeout_s` has it held; one that started anew by
  itself has it held at once. A new leader sees from its age that it has; so it is, too, when somebody else comes to want an unproven
  version after the roll-out has come to rest.
- *Going back*, those who have just started into what is held and may die of it go first, and nobody goes while a second one may.
- *Who is missing for other reasons* (heard in the last minute, and not now) is waited for, for `timeout_s` at most.
- *The lease is let go of and the wrong one takes it*: whoever cannot be the successor stands back from it (`stands_back`), for which
  the leader lets go of it only when such a one has had time to read that it will. One that takes it all the same passes it on, and
  both it and the old leader stand back until one that runs the version leads. Nobody there who runs it: frozen, held.
- *A leader that comes to lead with an unproven version*, at whatever phase, is its `successor`: nobody is told before it has proven
  itself, and any change of leader until then is a failure, since a wedged leader lives on. That includes an operator's hand-over.
- *Paused*: no token is given out and the leader does not let go for a roll-out; who has one finishes, and a held version leads not.
- *The verdict comes while somebody has the token*: the version is held at once, the token is kept until its holder has settled.
- *The token's holder leads*: it gives the token back, since it would be missed. Alone it keeps it and restarts.
- *Alone* is who has heard nobody for a minute while it led. A new leader has heard nobody yet: it waits, and begins nothing before
  `SETTLE_S`. Whoever was alone at its last roll-out, too, waits no longer than that. Alone nothing is proven: there is no other.
- *Nobody loads it*: nobody is behind. Only the leader loads it: it stays, and says so.
- *No finished plan* hinders no roll-out from beginning: the version that mends it has to come in. It hinders proving.
- *A version taken live over an unproven one* while that is tried is not told from it: a death then holds the one that was tried.

What it asks of the shell: `Save` is durable before `next_step` is asked again, and alone changes the row; `Grant`, `HandOver` and
`RestartMe` act on the row that is stored. A grant is said again until it is followed, with (version, for_file); who is told
obeys only if it has `pending == version`, or `restart_for_file`; it says `up_s = 0` from then on and leads no more. `pending` is
the newest version that is not held and loads there, if it is newer than what runs or what runs is held; `refused` the newest that
is not held and does not load there or was put aside. The first row of a store has version and `proven` 1.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final

import attrs

from llmgw.domain.settings_version import Held, PlaneSettings, RolloutPhase, RolloutRow

HEARD_S: Final = 3.0  # three words of a standby, as in peers.HEALTHY_S
HEALTHY_S: Final = 5.0  # served for so long, a process has not died while starting
LATER_S: Final = 15.0  # for those after the first: time for what a process begins some seconds after its start
SETTLE_S: Final = 10.0  # a new leader has heard by then whoever is there: a look at the lease and a word take 2 s
TOLD_S: Final = 3.0  # a standby reads the row within a second, and within another it stands back from the lease
STAND_BACK_S: Final = 3.0  # said again each second; lapses so soon after the row has changed
# Hand-overs and passings on after which no successor leads; each leaves the cluster without a leader for some seconds (UNTAKEN_S).
# Enough for three that nobody takes, with one in between that has not read in time that it should stand back.
TRIES_MAX: Final = 6
FORGOTTEN_S: Final = 60.0  # members are those heard in the last minute (control.md 4); as in peers.FORGOTTEN_S


@attrs.frozen
class Rules:
    """What protects an invariant, a field each. Nothing but a test takes one away."""

    token_first: bool = True  # a grant follows a row that is stored
    one_token: bool = True  # who has the token is waited for
    healthy_first: bool = True  # one that has only just started is not back
    runs_on: bool = True  # who is back has to run the version for some time before another is told
    done_stay: bool = True  # one that had it and is gone stops the others
    known_by_age: bool = True  # also under a new leader, who has not seen it go
    rest_watched: bool = True  # also when it has gone while the roll-out was at rest
    canary_stops: bool = True  # a failure freezes
    hold_back: bool = True  # what failed is held
    skip_refusers: bool = True  # who refuses a version is left out
    leader_last: bool = True  # the leader waits for the standbys
    settle: bool = True  # a new leader has heard nobody yet
    pass_on: bool = True  # a lease that the wrong one took is passed on
    stand_back: bool = True  # who cannot be the successor leaves the lease to those who can
    freeze_on_failed_successor: bool = True
    proving_delay: bool = True  # the old leader restarts once its successor has led for `delay_s`
    plan_in_time: bool = True  # a successor without a finished plan has failed
    held_leads_not: bool = True  # who runs a held version lets others lead
    start_as_told: bool = True  # a start that nobody asked for tries nothing new


RULES: Final = Rules()


# --- what it is asked with


@attrs.frozen
class Member:
    """A control plane heard in the last `FORGOTTEN_S`. `age_s`: since its last word; 0 for the leader itself."""

    address: str
    name: str
    age_s: float
    settings: PlaneSettings
    is_me: bool = False

    @property
    def heard(self) -> bool:
        return self.is_me or self.age_s <= HEARD_S

    @property
    def healthy(self) -> bool:
        return self.heard and self.settings.up_s >= HEALTHY_S


@attrs.frozen
class RolloutView:
    """What the leader knows; seconds are of its own clock.

    `members`: with the leader itself. `desired`: see `desired_version`. `leads_s`: since it began to lead. `confirmed_plan_s`: it
    has been CONFIRMED for so long with a finished plan, 0 if it is not. `saved_here`: it stored the row as it stands, in this
    epoch. `granted_age_s`: since then, or since it began to lead.
    """

    members: tuple[Member, ...]
    me: str
    desired: int
    leads_s: float
    confirmed_plan_s: float
    saved_here: bool
    granted_age_s: float
    paused: bool = False
    delay_s: float = 30.0
    timeout_s: float = 120.0
    epoch: int = 0


# --- what it says


@attrs.frozen
class Rest:
    """Nothing to do now."""

    why: str


@attrs.frozen
class Save:
    """Store this row, durably. Nothing else changes it."""

    row: RolloutRow


@attrs.frozen
class Grant:
    """Tell `address` to restart, into `row.version` unless `row.for_file`. Said again until it is followed."""

    row: RolloutRow
    address: str


@attrs.frozen
class HandOver:
    """Let go of the lease, and stay."""

    row: RolloutRow


@attrs.frozen
class RestartMe:
    """Restart this process, which leads and is alone; into `row.version` unless `row.for_file`."""

    row: RolloutRow


Step = Rest | Save | Grant | HandOver | RestartMe


# --- which version


def desired_version(newest: int, held: Collection[int]) -> int:
    """The newest that is not held; versions are 1, 2, 3 ... 0 when there is none."""
    return next((version for version in range(newest, 0, -1) if version not in held), 0)


def newest_held(row: RolloutRow) -> int:
    return max((one.version for one in row.held), default=0)


def start_version(told: int, ran: int, proven: int, newest: int, not_here: Collection[int], rules: Rules = RULES) -> int:
    """Into which version a process starts: what it was told, else what ran here last, else what is proven, else the newest before
    these, else the newest.

    0 when there is none. Each of the first three is 0 where it is not known; what "ran" has served for a minute. `not_here` are
    versions that are held, put aside or refused on this machine.
    """
    choices = (told, ran, proven, desired_version(max(ran, proven), not_here)) if rules.start_as_told else ()
    return next((version for version in choices if version and version not in not_here), desired_version(newest, not_here))


# --- who may succeed


def may_succeed(row: RolloutRow, applied: int, *, for_file: bool) -> bool:
    """May one that runs `applied` lead in place of a leader that restarts (for a file: any version that is not held)?"""
    return applied == row.version or (for_file and applied > 0 and not row.is_held(applied))


def stands_back(row: RolloutRow, address: str, applied: int, rules: Rules = RULES) -> bool:
    """Asked of each control plane about itself while it does not lead: does it leave a lease that is let go of to others?"""
    if row.phase is not RolloutPhase.HANDING_OVER or not rules.stand_back:
        return False
    return address == row.led or not may_succeed(row, applied, for_file=row.for_file)


# --- deciding


def next_step(view: RolloutView, row: RolloutRow, rules: Rules = RULES) -> Step:
    """What the leader does now. Total: every view and every row has an answer."""
    return _Case(view, row, rules).step()


class _Case:
    """One question: the view, the row, and what follows from both."""

    __slots__ = ("desired", "me", "members", "row", "rules", "view")

    def __init__(self, view: RolloutView, row: RolloutRow, rules: Rules) -> None:
        self.view = view
        self.row = row
        self.rules = rules
        self.desired = view.desired
        self.members = {member.address: member for member in view.members}
        self.me = self.members[view.me]

    def step(self) -> Step:
        row = self.row
        if row.successor and not self.view.saved_here and self.rules.freeze_on_failed_successor:
            return self._successor_failed(f"{self._name(row.successor)} did not keep the lease")
        if self._held_leads():
            return HandOver(row)
        if self._unproven() and row.phase is not RolloutPhase.HANDING_OVER:
            wait = self._prove_leader()
            if wait is not None:
                return wait
        match self.row.phase:
            case RolloutPhase.IDLE | RolloutPhase.FROZEN:
                return self._at_rest()
            case RolloutPhase.STANDBY if not self.row.token:
                return self._choose()
            case RolloutPhase.STANDBY:
                return self._wait_for_standby()
            case RolloutPhase.HANDING_OVER:
                return self._hand_over()
            case RolloutPhase.PROVING:
                return self._prove()
            case RolloutPhase.LEADER:
                return self._wait_for_old_leader()

    # --- who wants what

    def _wants(self, member: Member) -> bool:
        return self._goal(member) > 0 or member.settings.restart_for_file

    def _goal(self, member: Member) -> int:
        """The version that it is behind: the desired one, or, for one that runs a held version, an older one that loads there."""
        settings = member.settings
        if self.desired <= 0 or settings.applied == self.desired:
            return 0
        if settings.pending == self.desired or (not self.rules.skip_refusers and settings.refused == self.desired):
            return self.desired
        back = self.row.is_held(settings.applied) and not self.row.is_held(settings.pending)
        return settings.pending if back else 0

    def _unproven(self) -> bool:
        """Does this leader run a version that nobody has led with for long enough?"""
        applied = self.me.settings.applied
        # What was taken live on top asks nothing of a start or of leading: a crash right after it must not take it back.
        started = min(self.me.settings.started or applied, applied)
        return 0 < self.row.proven < started and not self.row.is_held(applied)

    def _version_is_proven(self) -> bool:
        return self.row.version <= self.row.proven

    def _standbys(self) -> Iterator[Member]:
        """By address: before the others who runs a held version, and of those who has just started and may die of it soon; behind
        all of them who led at the beginning."""
        row = self.row
        standbys = (one for one in self.view.members if not one.is_me)

        def turn(one: Member) -> tuple[bool, bool, bool, str]:
            held = row.is_held(one.settings.applied)
            return not held, not self._may_die_soon(one), one.address == row.led, one.address

        return iter(sorted(standbys, key=turn))

    def _may_die_soon(self, member: Member) -> bool:
        """It has just started into a version that is held."""
        return self.row.is_held(member.settings.applied) and member.settings.up_s < self._runs_s()

    def _successors(self, *, for_file: bool) -> bool:
        """Is somebody there to lead meanwhile, one that runs the version (for a file: any that is not held)?"""
        return any(one.healthy and self._may_lead(one, for_file=for_file) for one in self.view.members if not one.is_me)

    def _may_lead(self, member: Member, *, for_file: bool) -> bool:
        return may_succeed(self.row, member.settings.applied, for_file=for_file)

    def _alone(self) -> bool:
        if len(self.view.members) > 1:
            return False
        if not self.rules.settle or self.view.leads_s >= FORGOTTEN_S:
            return True
        return self.view.leads_s >= SETTLE_S and self.row.members == (self.view.me,)

    def _held_leads(self) -> bool:
        if not self.rules.held_leads_not or not self.row.is_held(self.me.settings.applied):
            return False
        good = (one.settings.applied for one in self.view.members if not one.is_me and one.healthy)
        return any(applied > 0 and not self.row.is_held(applied) for applied in good)

    # --- phases

    def _at_rest(self) -> Step:
        view, row = self.view, self.row
        if row.phase is RolloutPhase.FROZEN and row.version == self.desired:
            if not self._thawed():
                return Rest(row.reason or "the roll-out has stopped")
            return Save(self._rested(""))
        if row.phase is RolloutPhase.FROZEN and self.desired > newest_held(row):
            return Save(self._rested(""))
        if not any(self._wants(one) for one in view.members):
            if row.phase is RolloutPhase.IDLE and row.reason and row.version != self.desired:
                return Save(self._rested(""))
            return Rest(row.reason or "everybody runs what can run there")
        if self.rules.settle and view.leads_s < SETTLE_S:
            return Rest("a new leader listens first for who is there")
        if view.paused:
            return Rest("paused")
        if not self._any_can():
            return Rest(self._nobody_to_lead())
        return self._lost_at_rest() or self._begin()

    def _thawed(self) -> bool:
        """Frozen over a file: its machine is back and wants nothing more."""
        holder = self.members.get(self.row.token)
        return self.row.for_file and holder is not None and holder.healthy and not holder.settings.restart_for_file

    def _any_can(self) -> bool:
        if any(one.healthy and self._wants(one) for one in self.view.members if not one.is_me) or self._alone():
            return True
        if not self._wants(self.me):
            return False
        begun = _Case(self.view, attrs.evolve(self.row, version=self.desired), self.rules)
        return begun._successors(for_file=not self._goal(self.me))

    def _nobody_to_lead(self) -> str:
        if self._wants(self.me):
            goal = self._goal(self.me)
            what = f"version {goal}" if goal else "its changed file"
            asked = [one.name for one in self._standbys() if goal and one.healthy and not self._has_decided(one)]
            if asked:
                return f"{', '.join(asked)} has not said yet whether {what} loads there"
            return f"{self.me.name} leads and stays as it is: no standby is there that could lead while it restarts for {what}"
        return "whoever wants a restart is not heard now"

    def _begin(self) -> Step:
        """From the beginning, with the version that is desired now. Never while somebody has the token and may be down."""
        members = tuple(sorted(self.members))
        if len(members) == 1 and not self._alone():
            members = self.row.members or members  # nobody is heard for the moment, which makes nobody alone
        same = self.row.version == self.desired and self.rules.rest_watched  # whoever has it already is still watched
        row = attrs.evolve(
            self.row,
            phase=RolloutPhase.STANDBY,
            version=self.desired,
            members=members,
            token="",
            led=self.view.me,
            done=tuple(one for one in self.row.done if one in self.members) if same else (),
            for_file=False,
            reason="",
            successor="",
            proving=0,
            tries=0,
        )
        ran = self.me.settings.applied
        if ran > row.proven and not row.is_held(ran) and (not row.proven or self.view.confirmed_plan_s >= self.view.delay_s):
            row = attrs.evolve(row, proven=ran)
        return self._saved_then_chosen(row)

    def _prove_leader(self) -> Step | None:
        """Whoever comes to lead with a version that is not proven proves it first, and nobody restarts meanwhile."""
        row, view = self.row, self.view
        at_rest = row.phase in (RolloutPhase.IDLE, RolloutPhase.FROZEN)
        if at_rest and view.confirmed_plan_s >= view.delay_s:
            return Save(self._proven())
        # Later than that it has taken a live change while it led, which a change of leader says nothing about.
        if view.leads_s > SETTLE_S or view.me == row.successor or not self.rules.proving_delay:
            return None
        if self._alone() or (row.token == view.me and row.members == (view.me,)):
            return None
        if at_rest:
            members = tuple(sorted(self.members))
            row = attrs.evolve(
                row, phase=RolloutPhase.STANDBY, version=self.desired, members=members, token="", led=view.me, done=(), for_file=False
            )
        return Save(attrs.evolve(row, successor=view.me, proving=self.me.settings.applied))

    def _saved_then_chosen(self, row: RolloutRow) -> Step:
        """One write where the next choice is plain already."""
        chosen = _Case(attrs.evolve(self.view, granted_age_s=0.0, saved_here=True), row, self.rules)._choose()
        return chosen if not isinstance(chosen, Rest) else Save(row)

    def _choose(self) -> Step:
        view, row = self.view, self.row
        alone = self._alone()
        if self._unproven() and not alone:
            return self._gone_since() or self._proving(f"{self.me.name} leads") or Save(self._proven())
        if self.desired != row.version:
            return self._begin() if self.desired > 0 else Save(self._rested("no version is left"))
        wait = None if alone else self._missing()
        if wait is not None:
            return wait
        standbys = list(self._standbys())
        waiting = [one for one in standbys if one.healthy and self._wants(one)]
        if view.paused and (waiting or self._wants(self.me)):
            return Rest("paused")
        if not self.rules.leader_last and self._wants(self.me):
            return self._give(self.me)
        slow = [one for one in standbys if one.heard and not self._has_decided(one)] if view.granted_age_s <= view.timeout_s else []
        for one in standbys if waiting else ():
            if one is not waiting[0] and one.heard and self._may_die_soon(one):
                return Rest(f"{one.name} has just started into version {one.settings.applied}, which is held, and may die of it")
        if waiting and not any(row.is_held(one.settings.applied) for one in slow):
            return self._give(waiting[0])
        if slow:
            return Rest(f"{slow[0].name} is still trying whether version {row.version} loads there")
        if self._wants(self.me):
            for_file = not self._goal(self.me)
            if alone:
                return self._give(self.me)
            if self._successors(for_file=for_file):
                me = view.me
                over = attrs.evolve(row, phase=RolloutPhase.HANDING_OVER, token=me, led=me, for_file=for_file)
                return Save(attrs.evolve(over, released=view.epoch, tries=row.tries + 1))
            return Save(self._rested(self._nobody_to_lead()))
        return Save(self._rested(row.reason))

    def _has_decided(self, member: Member) -> bool:
        settings = member.settings
        return self.desired in (settings.applied, settings.pending, settings.refused) or self._goal(member) > 0

    def _missing(self) -> Step | None:
        """Who has to be there before another one goes down, and is not."""
        view = self.view
        wait = self._gone_since()
        if wait is not None:
            return wait
        for member in self._standbys():
            if not member.healthy and view.granted_age_s <= view.timeout_s:
                return Rest(f"{member.name} is not there")
        return None

    def _gone_since(self) -> Step | None:
        """Of those that had the version, is one not there any more, or not with it?"""
        view, row = self.view, self.row
        late = view.granted_age_s > view.timeout_s + (view.delay_s if row.phase is RolloutPhase.PROVING else 0.0)
        for address in self._had_it():
            member = self.members.get(address)
            if member is not None and member.healthy:
                how = self._lost_it(member)
                if how:
                    return self._failed(how)
            elif late:
                return self._failed(f"{self._name(address)} had it, and has not been heard for {view.timeout_s:g} s")
            else:
                return Rest(f"{self._name(address)}, which has version {row.version}, is not there")
        return None

    def _had_it(self) -> tuple[str, ...]:
        """Who came back with a version that nobody has proven: from what becomes of them the others know whether it is good."""
        return self.row.done if self.rules.done_stay and not self._version_is_proven() else ()

    def _lost_it(self, member: Member) -> str:
        """How one that had the version has it no more, or has it again; "" for one that has run it all the time."""
        settings = member.settings
        if member.healthy and settings.refused == self.row.version != settings.applied:
            return f"{member.name} had it and refuses it now: {settings.why or 'it did not say why'}"
        # Who has run for less than one runs before it is said to have it has started since, whoever led then.
        ran_s = self._runs_s() if self.rules.known_by_age else 0.0
        if not member.is_me and member.heard and settings.up_s < max(self.view.granted_age_s, ran_s):
            return f"{member.name} had it, and has started anew by itself"
        return ""

    def _lost_at_rest(self) -> Step | None:
        """Has one that had the version lost it since the roll-out came to rest? Then nobody else shall try it. A start of its own
        says so for `FORGOTTEN_S`; later it may as well be somebody's who restarts that machine."""
        view, row = self.view, self.row
        if row.version != self.desired or not self.rules.rest_watched:
            return None
        for address in self._had_it():
            member = self.members.get(address)
            how = self._lost_it(member) if member is not None else ""
            if (
                member is not None
                and how
                and (member.settings.refused == row.version or view.granted_age_s - member.settings.up_s <= FORGOTTEN_S)
            ):
                return self._failed(how)
        return None

    def _give(self, member: Member) -> Step:
        """The token, in a row of its own: the grant follows once that is stored."""
        view, row, me = self.view, self.row, self.me
        goal = self._goal(member)
        last = member.address == row.led != me.address and (not goal or me.settings.applied == goal)
        row = attrs.evolve(
            row,
            phase=RolloutPhase.LEADER if last else RolloutPhase.STANDBY,
            version=goal or row.version,
            token=member.address,
            given=view.epoch,
            for_file=not goal,
            members=(member.address,) if member.is_me and self._alone() else row.members,
            successor="" if member.is_me else row.successor,
            proving=0 if member.is_me else row.proving,
        )
        return Save(row) if self.rules.token_first or member.is_me else Grant(row, member.address)

    def _wait_for_standby(self) -> Step:
        row = self.row
        if row.token == self.view.me:
            return self._token_leads()
        return self._settled(self.members.get(row.token))

    def _token_leads(self) -> Step:
        row, me = self.row, self.me
        if not self._wants_token(me):
            if self._took(me):
                if me.settings.up_s < self._needed_s():
                    return Rest(f"{me.name} is back, for {me.settings.up_s:.0f} s of {self._needed_s():.0f} s")
                return self._went_well(me.address)
            if self._refuses(me):
                return self._failed(self._refusal(me))
        if self._wants_token(me) and (self._alone() or not self.rules.leader_last):
            return RestartMe(row)
        if self._wants_token(me) and len(self.view.members) == 1 and self.view.leads_s < FORGOTTEN_S:
            return Rest(f"{me.name} listens first for who is there")
        return self._saved_then_chosen(attrs.evolve(row, token="", for_file=False))

    def _settled(self, holder: Member | None) -> Step:
        """Is the token's holder, which does not lead, back, lost, on its way, or still to be told?"""
        view, row = self.view, self.row
        needed_s = self._needed_s()
        if not row.for_file and row.is_held(row.version) and self.rules.hold_back:
            # The verdict came while somebody had the token: who is there for longer than a grant takes has settled.
            there = holder is not None and holder.healthy and view.granted_age_s > HEARD_S
            late = view.granted_age_s > view.timeout_s
            return self._token_back() if there or late else Rest(f"waits for {self._name(row.token)}")
        for address in self._had_it():
            member = self.members.get(address)
            how = self._lost_it(member) if member is not None and address != row.token else ""
            if member is not None and how:
                # The holder settles first, and then everything goes on without the version.
                # It may have been told a newer one than that to which another one goes back now.
                held = self._with_held(max(row.version, member.settings.applied), how)
                if held != row.held:
                    return Save(attrs.evolve(row, held=held))
        if holder is not None and holder.heard and self._took(holder) and holder.settings.up_s > 0:
            up_s = holder.settings.up_s
            return self._went_well(row.token) if up_s >= needed_s else Rest(f"{holder.name} is back, for {up_s:.0f} s of {needed_s:.0f} s")
        if not self.rules.one_token and (holder is None or not holder.healthy):
            return self._went_well(row.token)
        if holder is not None and holder.healthy and not self._wants_token(holder) and self.rules.skip_refusers:
            # It has not restarted since it was given the token; what another leader told it is not known here.
            given_here = view.saved_here and row.given == view.epoch
            untold = given_here and holder.settings.up_s >= view.granted_age_s + HEALTHY_S
            if self._refuses(holder) and not untold:
                return self._failed(self._refusal(holder))
            if untold or self._has_decided(holder):
                return self._token_back()  # it will not restart into this version: there is a newer one, or its file has changed
        was_back = holder is not None and self._took(holder)
        more_s = (needed_s if was_back else 0.0) + (view.delay_s if self._unproven() else 0.0)
        if view.granted_age_s > view.timeout_s + more_s:
            return self._failed(f"{self._name(row.token)} was not back within {view.timeout_s:g} s")
        if holder is not None and holder.healthy:
            if self._unproven():
                return self._proving(f"{self.me.name} leads") or Save(self._proven())
            for address in self._had_it():
                if address != row.token and not self._is_there(address):
                    return Rest(f"{self._name(address)}, which has version {row.version}, is not there")
            return Grant(row, row.token)
        return Rest(f"waits for {self._name(row.token)}")

    def _wants_token(self, holder: Member) -> bool:
        settings = holder.settings
        return settings.restart_for_file if self.row.for_file else settings.pending == self.row.version

    def _took(self, holder: Member) -> bool:
        settings = holder.settings
        if self.row.for_file:
            anew = self.view.saved_here and holder.settings.up_s < self.view.granted_age_s  # and changed again since
            return anew or not settings.restart_for_file
        # A newer one: it has taken a live change since.
        return settings.applied >= self.row.version and not self.row.is_held(settings.applied)

    def _refuses(self, holder: Member) -> bool:
        return not self.row.for_file and holder.settings.refused == self.row.version

    def _refusal(self, holder: Member) -> str:
        return f"{holder.name} came back without it: {holder.settings.why or 'it did not say why'}"

    def _needed_s(self) -> float:
        if not self.rules.healthy_first:
            return 0.0
        row = self.row
        first = not row.done and not self._version_is_proven()
        has_it = row.token in self._had_it()  # a start for its file counts as one into the version, too
        if (row.for_file and not has_it) or len(self.view.members) == 1 or not self.rules.runs_on:
            return HEALTHY_S
        return max(HEALTHY_S, self.view.delay_s) if first else self._runs_s()

    def _runs_s(self) -> float:
        """For how long each of them runs the version at least, before it is said to have it."""
        return max(HEALTHY_S, min(self.view.delay_s, LATER_S)) if self.rules.runs_on and self.rules.healthy_first else 0.0

    def _went_well(self, address: str) -> Step:
        row = self.row
        done = row.done if row.for_file or address in row.done else (*row.done, address)
        return self._saved_then_chosen(attrs.evolve(row, phase=RolloutPhase.STANDBY, token="", for_file=False, done=done))

    def _token_back(self) -> Step:
        return self._saved_then_chosen(attrs.evolve(self.row, phase=RolloutPhase.STANDBY, token="", for_file=False))

    def _hand_over(self) -> Step:
        view, row = self.view, self.row
        if self.desired != row.version and not (self._unproven() and view.me != row.led):
            return self._begin() if self.desired > 0 else Save(self._rested("no version is left"))
        if view.me == row.led:
            if not view.saved_here:
                # In the very next epoch: nobody has led meanwhile, so nobody has failed. A standby may have been busy giving back a lease.
                if view.epoch == row.released + 1 and row.tries < TRIES_MAX:
                    return self._token_back()
                return self._successor_failed("nobody took the lease from it and kept it")
            gone = self._gone_since()
            if gone is not None:
                return gone
            if not self._wants(self.me) or any(one.healthy and self._wants(one) for one in self._standbys()):
                return self._token_back()
            if not self._successors(for_file=row.for_file):
                return self._token_back()
            unfit = any(not self._may_lead(one, for_file=row.for_file) for one in view.members if not one.is_me)
            if unfit and view.granted_age_s < TOLD_S and self.rules.stand_back:
                return Rest(f"{self.me.name} lets the others know that it hands over")
            return Rest("paused") if view.paused else HandOver(row)
        if self._unproven() or self._may_lead(self.me, for_file=row.for_file):
            return Save(attrs.evolve(row, phase=RolloutPhase.PROVING, successor=view.me, proving=self.me.settings.applied))
        if self.rules.pass_on:
            passes_on = row.released == view.epoch  # stored: whoever judges what comes of it counts from here
            if not passes_on and row.tries >= TRIES_MAX:
                return self._successor_failed("none that runs it took the lease")
            if self._successors(for_file=row.for_file):
                return HandOver(row) if passes_on else Save(attrs.evolve(row, released=view.epoch, tries=row.tries + 1))
            if view.leads_s < SETTLE_S:
                return Rest(f"{self.me.name} does not run version {row.version}, and looks for one that does")
        return self._successor_failed("none that runs it leads")

    def _prove(self) -> Step:
        row = self.row
        wait = self._proving(f"{self.me.name} leads in place of {self._name(row.led)}") or self._gone_since()
        if wait is not None:
            return wait
        if self.view.paused:
            return Rest("paused")
        return self._saved_then_chosen(attrs.evolve(self._proven(), phase=RolloutPhase.STANDBY, token="", for_file=False))

    def _proven(self) -> RolloutRow:
        proven = self.me.settings.applied if self._unproven() else self.row.proven
        return attrs.evolve(self.row, proven=proven, successor="", proving=0)

    def _proving(self, what: str) -> Step | None:
        """None once this leader, which runs the version, has shown that it can lead with it."""
        view, row = self.view, self.row
        if not self.rules.proving_delay or view.confirmed_plan_s >= view.delay_s:
            return None
        if self.rules.plan_in_time and view.confirmed_plan_s <= 0 and view.granted_age_s > view.timeout_s + view.delay_s:
            return self._failed(f"{self.me.name} leads, and has no finished plan after {view.granted_age_s:.0f} s", row.proving)
        return Rest(f"{what}, for {view.confirmed_plan_s:.0f} s of {view.delay_s:.0f} s")

    def _wait_for_old_leader(self) -> Step:
        row = self.row
        if row.token != self.view.me:
            return self._settled(self.members.get(row.token))
        return self._went_well(row.token) if self._took(self.me) else self._token_back()

    # --- ends

    def _rested(self, reason: str) -> RolloutRow:
        """At rest: idle, or frozen while a newer version than the desired one is held."""
        row = self.row
        newest = newest_held(row)
        frozen = newest > self.desired
        version = newest if frozen else self.desired
        return attrs.evolve(
            row,
            phase=RolloutPhase.FROZEN if frozen else RolloutPhase.IDLE,
            version=version,
            done=row.done if version == row.version else (),
            token="",
            for_file=False,
            successor="",
            proving=0,
            reason=reason or (f"version {newest} is held: {row.held[-1].why}" if frozen else ""),
        )

    def _successor_failed(self, how: str) -> Step:
        row = self.row
        if not self.rules.freeze_on_failed_successor:
            return self._token_back()
        why = f"in place of {self._name(row.led)}, {how}"
        if row.proving > row.proven and row.phase in (RolloutPhase.STANDBY, RolloutPhase.LEADER):
            # Whoever has the token may be down, and settles first; then everything goes on with what is desired without this one.
            return Save(attrs.evolve(row, held=self._with_held(row.proving, why), successor="", proving=0))
        return self._failed(why, row.proving)

    def _failed(self, why: str, proving: int = 0) -> Step:
        """`proving`: the version of a leader that has failed; else it is the one of the roll-out."""
        row = self.row
        guilty = proving if proving > row.proven else row.version
        if self._version_is_proven() and not row.for_file and guilty == row.version:
            # It is this machine that fails, and not the version: the others go on without it.
            return self._saved_then_chosen(attrs.evolve(row, phase=RolloutPhase.STANDBY, token="", reason=why))
        if not self.rules.canary_stops:
            return Save(attrs.evolve(row, phase=RolloutPhase.STANDBY, token="", for_file=False, done=(), successor="", proving=0))
        file_alone = row.for_file and not (guilty > row.proven and (proving > row.proven or row.token in row.done))
        token = row.token if file_alone else ""
        held = row.held if file_alone else self._with_held(guilty, why)
        frozen = attrs.evolve(
            row,
            phase=RolloutPhase.FROZEN,
            version=row.version if file_alone else guilty,
            held=held,
            token=token,
            done=(),
            successor="",
            proving=0,
            for_file=file_alone,
        )
        if file_alone:
            return Save(attrs.evolve(frozen, reason=f"restarts for changed files have stopped: {why}"))
        how = "is held" if frozen.is_held(guilty) else "goes no further, and no other is left to go back to"
        return Save(attrs.evolve(frozen, reason=f"version {guilty} {how}: {why}"))

    def _with_held(self, version: int, why: str) -> tuple[Held, ...]:
        """This one, and those before it that nobody has proven: what is gone back to is known to be good."""
        row = self.row
        left = desired_version(version - 1, [one.version for one in row.held])
        if not self.rules.hold_back or row.is_held(version) or not left:
            return row.held
        held = [*row.held, Held(version, why)]
        for older in range(row.proven + 1, version) if row.proven else ():
            if not row.is_held(older):
                held.append(Held(older, f"version {version} came before it was proven"))
        return tuple(sorted(held, key=lambda one: one.version))

    def _is_there(self, address: str) -> bool:
        return address in self.members and self.members[address].healthy

    def _name(self, address: str) -> str:
        member = self.members.get(address)
        return address if member is None else member.name


# --- for people


def describe(row: RolloutRow, view: RolloutView) -> str:
    """One sentence: where the roll-out stands and what it waits for."""
    step = next_step(view, row)
    if row.phase in (RolloutPhase.IDLE, RolloutPhase.FROZEN):
        return row.reason or (step.why if isinstance(step, Rest) else f"version {view.desired} is about to be rolled out")
    names = {member.address: member.name for member in view.members}
    what = "a changed file" if row.for_file else f"version {row.version}"
    token = names.get(row.token, row.token)
    age_s, timeout_s = min(view.granted_age_s, view.timeout_s), view.timeout_s
    match step:
        case Grant():
            return f"{what}: {token} is told to restart, {age_s:.0f} s of {timeout_s:.0f} s"
        case RestartMe():
            return f"{what}: {token} is alone and restarts"
        case HandOver():
            return f"{what}: {names.get(view.me, view.me)} hands over to one that runs it"
        case Rest(why) if why.startswith("waits for "):
            return f"{what}: waiting for {token} to come back, {age_s:.0f} s of {timeout_s:.0f} s"
        case Rest(why):
            return f"{what}: {why}"
        case Save(after):
            return f"{what}: {after.reason or 'the next step is about to be stored'}"
