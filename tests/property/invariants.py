"""What must hold over every history of the world, each by its name in the design. A predicate returns what is wrong, in words.

None of them knows how a rule is made; they look at records, messages, lists and engines only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from llmgw.domain.lease import LeaseRole
from llmgw.lease.record import RecordState
from llmgw.protocol.messages import Command, CommandResult, Inventory, LeaderHello, Outcome, StartReplica, StopReplica
from llmgw.protocol.router_messages import ROUTER_SILENT_S, RouterReport
from tests.property.world import (
    Arrived,
    Claim,
    Engine,
    Entry,
    Happened,
    Left,
    Listed,
    Recorded,
    Stood,
    Wrote,
)

History = Sequence[Entry]
SURGE: Final = 1  # more of a model than asked for while it is updated or moved
SETTLE_S: Final = 60.0  # what was wanted so long ago may still be on its way out
THAW_S: Final = 2.0  # what a frozen process had in its hands leaves it by then
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


INVARIANTS: Final[dict[str, Callable[[History], Iterable[str]]]] = {
    "EpochUnique": epoch_unique,
    "EpochMonotoneStore": epoch_monotone_store,
    "NoDeposedWrite": no_deposed_write,
    "NoWriteAfterRelease": no_write_after_release,
    "ConfirmedExclusion": confirmed_exclusion,
    "AgentFence": agent_fence,
    "RouterFence": router_fence,
    "StandbyInert": standby_inert,
    "PlanAfterBarrier": plan_after_barrier,
    "UnconfirmedRestraint": unconfirmed_restraint,
    "NoDoublePlacement": no_double_placement,
    "PublishBeforeStop": publish_before_stop,
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
