"""What must hold over every history of the world, each by its name in the design. A predicate returns what is wrong, in words.

None of them knows how a rule is made; they look at records, messages, lists and engines only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from llmgw.domain.endpoint import ListStamp
from llmgw.domain.lease import LeaseRole
from llmgw.lease.record import RecordState
from llmgw.protocol.messages import Command, CommandResult, Inventory, LeaderHello, Outcome, StartReplica, StopReplica
from llmgw.protocol.router_messages import ROUTER_SILENT_S, PushDelta, PushEndpoints, RouterReport
from tests.property.world import (
    DELAY_S,
    TIMEOUT_S,
    Arrived,
    Claim,
    Crashed,
    Edited,
    Engine,
    Entry,
    FileSaved,
    Gone,
    Happened,
    InForce,
    Left,
    Listed,
    Obeys,
    Recorded,
    Refuses,
    Restarts,
    Serves,
    Stood,
    Stored,
    Wrote,
)

History = Sequence[Entry]
SURGE: Final = 1  # more of a model than asked for while it is updated or moved
SETTLE_S: Final = 60.0  # what was wanted so long ago may still be on its way out
THAW_S: Final = 2.0  # what a frozen process had in its hands leaves it by then
UP_S: Final = 5.0  # a process that has served for so long has not died while starting
HEARD_S: Final = 4.0  # who has died so lately may still count as heard, and a word of the leader's be under way
LATE_S: Final = 0.5  # two clocks disagree about five seconds by far less


def epoch_unique(history: History) -> Iterable[str]:
    """No two holders under one epoch."""
    held: dict[int, tuple[str, str]] = {}
    for entry in history:
        if isinstance(entry, Recorded):
            mine = (entry.record.owner, entry.record.tenure)
            if held.setdefault(entry.record.epoch, mine) != mine:
                yield f"epoch {entry.record.epoch} is held by {held[entry.record.epoch]} and {mine}"


def epoch_monotone_store(history: History) -> Iterable[str]:
    """The epochs of the lease's record, and those that the store has met, never go down."""
    lease = met = 0
    for entry in history:
        if isinstance(entry, Recorded):
            if entry.record.epoch < lease:
                yield f"{entry.at_s}: the record goes from epoch {lease} to {entry.record.epoch}"
            lease = max(lease, entry.record.epoch)
        elif isinstance(entry, Wrote):
            if entry.met < met:
                yield f"{entry.at_s}: the store goes from epoch {met} to {entry.met}"
            met = max(met, entry.met)


def no_deposed_write(history: History) -> Iterable[str]:
    """Nothing is committed under an epoch lower than one that the store has met."""
    met = 0
    for entry in history:
        if isinstance(entry, Wrote):
            if entry.epoch < met:
                yield f"{entry.at_s}: {entry.plane} wrote under epoch {entry.epoch}, the store had met {met}"
            met = max(met, entry.epoch, entry.met)


def no_write_after_release(history: History) -> Iterable[str]:
    """A tenure that was released is never heard of again."""
    released: set[str] = set()
    for entry in history:
        if isinstance(entry, Recorded):
            if entry.record.tenure in released:
                yield f"{entry.at_s}: {entry.record.owner} writes after its release"
            if entry.record.state is RecordState.RELEASED:
                released.add(entry.record.tenure)


def confirmed_exclusion(history: History) -> Iterable[str]:
    """At no instant may two act as if their right to lead was proven."""
    at: dict[float, set[str]] = defaultdict(set)
    for entry in history:
        if isinstance(entry, Claim) and entry.role is LeaseRole.CONFIRMED:
            at[entry.at_s].add(entry.plane)
    for at_s, planes in at.items():
        if len(planes) > 1:
            yield f"{at_s}: {' and '.join(sorted(planes))} are both confirmed"


def agent_fence(history: History) -> Iterable[str]:
    """An agent that has obeyed an epoch names no lower one, over its restarts too, and executes nothing of one or of another owner."""
    tokens: dict[tuple[str, str], tuple[int, str]] = {}  # (agent, command) -> token
    highest: dict[str, tuple[int, str]] = {}
    for entry in history:
        if isinstance(entry, Arrived) and isinstance(entry.message, Command):
            tokens[entry.receiver, entry.message.command_id] = (entry.message.token.epoch, entry.message.token.owner)
        elif isinstance(entry, Left) and isinstance(entry.message, Inventory):
            named = (entry.message.epoch, entry.message.owner)
            if named[0] < highest.get(entry.sender, (0, ""))[0]:
                yield f"{entry.at_s}: {entry.sender} had obeyed {highest[entry.sender]} and now names {named}"
            _raise(highest, entry.sender, named)
        elif isinstance(entry, Left) and isinstance(entry.message, CommandResult) and entry.message.outcome is Outcome.DONE:
            token = tokens[entry.sender, entry.message.command_id]
            met = highest.get(entry.sender, (0, ""))
            if token[0] < met[0] or (token[0] == met[0] and met[1] and token[1] != met[1]):
                yield f"{entry.at_s}: {entry.sender} executed an order of {token} after it had obeyed {met}"
            _raise(highest, entry.sender, token)


def router_fence(history: History) -> Iterable[str]:
    """A router acts on no list of a lower epoch, nor of another owner of the same."""
    highest: dict[str, tuple[int, str]] = {}
    for entry in history:
        if isinstance(entry, Listed):
            token = (entry.stamp.token.epoch, entry.stamp.token.owner)
            met = highest.get(entry.router, (0, ""))
            if token[0] < met[0] or (token[0] == met[0] and met[1] and token[1] != met[1]):
                yield f"{entry.at_s}: {entry.router} took a list of {token} after one of {met}"
            _raise(highest, entry.router, token)


def lists_agree(history: History) -> Iterable[str]:
    """A router of its own acts on exactly the list that its leader made under that number, however it came to it: the one that the
    leader's embedded router has. A leader that has not heard from all of its nodes is completed from the list before, so not then."""
    made: dict[ListStamp, str] = {}
    settled: dict[str, ListStamp] = {}  # of what last arrived at a router
    for entry in history:
        if isinstance(entry, Arrived) and isinstance(entry.message, PushEndpoints | PushDelta):
            settled.pop(entry.receiver, None)
            if entry.message.settled:
                settled[entry.receiver] = entry.message.stamp
        elif isinstance(entry, Happened) and entry.text.startswith("kill "):
            settled.pop(entry.text.removeprefix("kill "), None)  # what it has on its disk may be older
        elif isinstance(entry, Listed) and not entry.stamp.from_standby:
            if entry.router.endswith("/router"):
                made[entry.stamp] = entry.fingerprint
            elif settled.get(entry.router) == entry.stamp and made.get(entry.stamp, entry.fingerprint) != entry.fingerprint:
                token = entry.stamp.token
                yield f"{entry.at_s}: {entry.router} acts on another list {entry.stamp.generation} of epoch {token.epoch} than its leader"


def standby_inert(history: History) -> Iterable[str]:
    """Orders and barriers come only from whoever has held the lease under that very epoch."""
    held: set[tuple[int, str]] = set()
    for entry in history:
        if isinstance(entry, Recorded):
            held.add((entry.record.epoch, entry.record.owner))
        elif isinstance(entry, Left) and isinstance(entry.message, Command | LeaderHello):
            token = (entry.message.token.epoch, entry.message.token.owner)
            if token not in held:
                yield f"{entry.at_s}: {entry.sender} ordered under {token}, which never held the lease"


def plan_after_barrier(history: History) -> Iterable[str]:
    """Nothing is started on a node before it has answered this leader's barrier."""
    answered: set[tuple[str, str, int, str]] = set()  # node, control plane, token
    for entry in history:
        if isinstance(entry, Arrived) and isinstance(entry.message, Inventory):
            answered.add((entry.sender, entry.receiver, entry.message.epoch, entry.message.owner))
        elif isinstance(entry, Left) and isinstance(entry.message, Command) and isinstance(entry.message.order, StartReplica):
            token = entry.message.token
            if (entry.receiver, entry.sender, token.epoch, token.owner) not in answered:
                yield f"{entry.at_s}: {entry.sender} starts {entry.message.order.order.id} on {entry.receiver} before its barrier"


def unconfirmed_restraint(history: History) -> Iterable[str]:
    """While its right is not proven, a leader only starts what is missing; it stops, restarts and forgets nothing."""
    roles: dict[str, LeaseRole] = {}
    thawed_s: dict[str, float] = {}
    for entry in history:
        if isinstance(entry, Claim):
            roles[entry.plane] = entry.role
        elif isinstance(entry, Happened) and entry.text.startswith("thaw "):
            thawed_s[entry.text.removeprefix("thaw ")] = entry.at_s
        elif isinstance(entry, Left) and isinstance(entry.message, Command) and not isinstance(entry.message.order, StartReplica):
            name = entry.sender.removeprefix("http://")
            # What it had in its hands when it was frozen leaves it once it is thawed; the fence is there for that.
            if roles.get(name) is LeaseRole.UNCONFIRMED and entry.at_s - thawed_s.get(name, -THAW_S) >= THAW_S:
                yield f"{entry.at_s}: {name} sent {type(entry.message.order).__name__} unconfirmed"


def no_double_placement(history: History) -> Iterable[str]:
    """No GPU holds more than it has, and where everybody can be heard no model has more replicas than asked for and a surge."""
    wanted: list[tuple[float, dict[str, int]]] = []
    for entry in history:
        if not isinstance(entry, Stood):
            continue
        if entry.memory_over:
            yield f"{entry.at_s}: {entry.memory_over}"
        if not wanted or wanted[-1][1] != entry.wanted:
            wanted.append((entry.at_s, entry.wanted))
        while len(wanted) > 1 and entry.at_s - wanted[1][0] > SETTLE_S:
            wanted.pop(0)
        for model, live in entry.live.items():
            most = max(one.get(model, 0) for _, one in wanted)
            if not entry.hidden and live > most + SURGE:
                yield f"{entry.at_s}: {live} replicas of {model} run, {most} were asked for"


def publish_before_stop(history: History) -> Iterable[str]:
    """Nothing is stopped while the leader's own router, or one that it has heard lately, still lists it."""
    lists: dict[str, frozenset[str]] = {}
    heard_s: dict[tuple[str, str], float] = {}  # (router, control plane)
    stops: dict[str, str] = {}  # replica -> who ordered its stop
    for entry in history:
        if isinstance(entry, Listed):
            lists[entry.router] = entry.ids
        elif isinstance(entry, Arrived) and isinstance(entry.message, RouterReport):
            heard_s[entry.sender, entry.receiver] = entry.at_s
        elif isinstance(entry, Left) and isinstance(entry.message, Command) and isinstance(entry.message.order, StopReplica):
            stops[entry.message.order.replica] = entry.sender
        elif isinstance(entry, Engine) and entry.what == "stopped" and entry.replica in stops:
            plane = stops[entry.replica]
            own = f"{plane.removeprefix('http://')}/router"
            for router, ids in lists.items():
                follows = router == own or entry.at_s - heard_s.get((router, plane), -ROUTER_SILENT_S) < ROUTER_SILENT_S - LATE_S
                if follows and entry.replica in ids:
                    yield f"{entry.at_s}: {entry.replica} is stopped while {router} lists it"


def settings_linear(history: History) -> Iterable[str]:
    """The versions of the settings are 1, 2, 3 ..., each edited from the one before it: nobody's edit is lost without a word."""
    newest = 0
    for entry in history:
        if isinstance(entry, Stored):
            if (entry.version, entry.parent) != (newest + 1, newest):
                yield f"{entry.at_s}: after version {newest} comes {entry.version}, edited from {entry.parent}"
            newest = entry.version
        elif isinstance(entry, Edited) and entry.version != entry.base + 1:
            yield f"{entry.at_s}: an edit that began from version {entry.base} became {entry.version}"


def one_import(history: History) -> Iterable[str]:
    """Of however many first starts exactly one imports version 1."""
    firsts = [entry for entry in history if isinstance(entry, Stored) and entry.version == 1]
    if len(firsts) > 1:
        yield f"version 1 is imported at {' and '.join(str(entry.at_s) for entry in firsts)}"


def never_unloadable(history: History) -> Iterable[str]:
    """No process acts on a version that its machine refuses."""
    refused: set[tuple[str, str]] = set()
    for entry in history:
        if isinstance(entry, Refuses):
            refused.add((entry.plane, entry.sha256))
        elif isinstance(entry, InForce) and (entry.plane, entry.sha256) in refused:
            yield f"{entry.at_s}: {entry.plane} acts on version {entry.live}, which does not load there"


def no_torn(history: History) -> Iterable[str]:
    """What is in force is, to the letter, what was stored, and a machine's file as somebody has written it as a whole."""
    stored: dict[int, str] = {}
    files: set[tuple[str, str]] = set()
    for entry in history:
        if isinstance(entry, Stored):
            stored[entry.version] = entry.sha256
        elif isinstance(entry, FileSaved):
            files.add((entry.plane, entry.sha256))
        elif isinstance(entry, InForce):
            if entry.live and entry.live in stored and stored[entry.live] != entry.sha256:
                yield f"{entry.at_s}: {entry.plane} acts on a version {entry.live} that nobody has written"
            if (entry.plane, entry.file_sha256) not in files:
                yield f"{entry.at_s}: {entry.plane} acts on a file that nobody has written"


def nothing_before_durable(history: History) -> Iterable[str]:
    """Nothing is in force anywhere, nor in a router's policy, that the store had not taken before."""
    versions: set[int] = set()
    markers: set[int] = set()
    for entry in history:
        if isinstance(entry, Stored):
            versions.add(entry.version)
            markers.add(entry.marker)
        elif isinstance(entry, InForce) and entry.live and entry.live not in versions:
            yield f"{entry.at_s}: {entry.plane} acts on version {entry.live}, which is not stored"
        elif isinstance(entry, Obeys) and versions and entry.marker not in markers:
            yield f"{entry.at_s}: {entry.router} obeys a policy of no version that is stored"


def max_one_down(history: History) -> Iterable[str]:
    """From the beginning of a restart that settings asked for until that process is well again, no other one begins; a process
    that does not come back is waited for as long as `rollout.standby_timeout_s` says."""
    down: dict[str, float] = {}  # since when
    up: dict[str, float] = {}
    for entry in history:
        if isinstance(entry, Serves):
            up[entry.plane] = entry.at_s
        elif isinstance(entry, Gone):
            up_s = up.pop(entry.plane, None)
            if up_s is not None and up_s > down.get(entry.plane, up_s) and entry.at_s - up_s >= UP_S - LATE_S:
                down.pop(entry.plane, None)  # it was well again, and this has another cause
        elif isinstance(entry, Restarts):
            for other, since_s in down.items():
                well = other in up and up[other] > since_s and entry.at_s - up[other] >= UP_S - LATE_S
                if other != entry.plane and not well and entry.at_s - since_s < TIMEOUT_S - LATE_S:
                    yield f"{entry.at_s}: {entry.plane} restarts; {other} does since {since_s} and is not well again"
                elif well:
                    down[other] = float("-inf")
            down[entry.plane] = entry.at_s


def leader_last(history: History) -> Iterable[str]:
    """Nobody restarts while it leads and others are there; and where one leads with the version that others restart into, it has
    shown for `rollout.leader_delay_s` that it can."""
    leads: dict[str, tuple[int, float]] = {}  # control plane -> (its epoch, since when it is confirmed)
    runs: dict[str, int] = {}
    into: dict[int, set[str]] = defaultdict(set)
    for entry in history:
        if isinstance(entry, Claim):
            if entry.role is not LeaseRole.CONFIRMED:
                if entry.role is not LeaseRole.UNCONFIRMED:
                    leads.pop(entry.plane, None)
            elif leads.get(entry.plane, (0, 0.0))[0] != entry.epoch:
                leads[entry.plane] = (entry.epoch, entry.at_s)
        elif isinstance(entry, InForce):
            runs[entry.plane] = entry.applied
        elif isinstance(entry, Gone):
            leads.pop(entry.plane, None)
        elif isinstance(entry, Restarts):
            if entry.leads and entry.others:
                yield f"{entry.at_s}: {entry.plane} restarts while it leads, and {', '.join(entry.others)} could"
            for leader, (_, since_s) in leads.items():
                first = runs.get(leader) == entry.version and leader in into[entry.version]
                if first and leader != entry.plane and entry.at_s - since_s < DELAY_S - LATE_S:
                    yield f"{entry.at_s}: {entry.plane} restarts into {entry.version}, with which {leader} leads only since {since_s}"
            into[entry.version].add(entry.plane)


def canary_stops(history: History) -> Iterable[str]:
    """With a version with which a process has ended by its own fault nobody else is restarted."""
    crashed: dict[int, tuple[float, str]] = {}
    for entry in history:
        if isinstance(entry, Crashed) and entry.version:
            crashed.setdefault(entry.version, (entry.at_s, entry.plane))
        elif isinstance(entry, Restarts) and entry.version in crashed:
            at_s, plane = crashed[entry.version]
            if plane != entry.plane and entry.at_s - at_s > HEARD_S:
                yield f"{entry.at_s}: {entry.plane} restarts into {entry.version}, with which {plane} crashed at {at_s}"


INVARIANTS: Final[dict[str, Callable[[History], Iterable[str]]]] = {
    "EpochUnique": epoch_unique,
    "EpochMonotoneStore": epoch_monotone_store,
    "NoDeposedWrite": no_deposed_write,
    "NoWriteAfterRelease": no_write_after_release,
    "ConfirmedExclusion": confirmed_exclusion,
    "AgentFence": agent_fence,
    "RouterFence": router_fence,
    "ListsAgree": lists_agree,
    "StandbyInert": standby_inert,
    "PlanAfterBarrier": plan_after_barrier,
    "UnconfirmedRestraint": unconfirmed_restraint,
    "NoDoublePlacement": no_double_placement,
    "PublishBeforeStop": publish_before_stop,
    "SettingsLinear": settings_linear,
    "OneImport": one_import,
    "NeverUnloadable": never_unloadable,
    "NoTorn": no_torn,
    "NothingBeforeDurable": nothing_before_durable,
    "MaxOneDown": max_one_down,
    "LeaderLast": leader_last,
    "CanaryStops": canary_stops,
}


def broken(history: History) -> dict[str, list[str]]:
    """By name, the first few of what is wrong."""
    found = {}
    for name, check in INVARIANTS.items():
        wrong = []
        for text in check(history):
            wrong.append(text)
            if len(wrong) == 3:
                break
        if wrong:
            found[name] = wrong
    return found


def _raise(highest: dict[str, tuple[int, str]], who: str, token: tuple[int, str]) -> None:
    if token[0] > highest.get(who, (0, ""))[0]:
        highest[who] = token
