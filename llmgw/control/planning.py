"""What to do next: desired against observed, holds respected, with the reason for each choice. Pure and total.

`plan_replicas` never logs, sleeps, reads a clock or draws an id: fresh ids are passed in. Carrying out a plan and planning
again leaves nothing to do; with nothing newly asked or lost, no ready replica moves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import attrs

from llmgw.control.observed import Closing, Desired, Observed, ObservedNode, ObservedReplica
from llmgw.control.placement import PASSED_MAX, Ledger, Place
from llmgw.domain.ids import NodeId, ReplicaId, replica_id
from llmgw.domain.model import ModelSpec, Profile
from llmgw.domain.node import NodeState
from llmgw.domain.placed import Placement, Rejection
from llmgw.domain.plan import Action, Forget, Plan, Reason, Start, Stop, Wait, Withdraw
from llmgw.domain.replica import ReplicaOrder, ReplicaState

LOOK_AGAIN_S: Final = 1.0  # with something under way; the reconciler's own tick bounds it from above when nothing is
IDLE_LOOK_AGAIN_S: Final = 10.0
CLOSING_LOOK_AGAIN_S: Final = 0.1  # a stop waits for the routers' last request there; looking is cheap, waiting is a GPU idle

_S = ReplicaState
_COMING: Final = frozenset({_S.PENDING, _S.STARTING, _S.LOADING})
_LIVE: Final = _COMING | {_S.READY}
_OVER: Final = frozenset({_S.STOPPED, _S.FAILED})


@attrs.define
class _Draft:
    """A plan in the making; local to one call of `plan_replicas`."""

    fresh: Iterator[str]
    starts_left: int
    blocked: str  # why nothing may be started anywhere now, or ""
    actions: list[Action] = attrs.Factory(list)
    reasons: list[Reason] = attrs.Factory(list)
    under_way: bool = False
    desired: Desired = attrs.field(kw_only=True)
    observed: Observed = attrs.field(kw_only=True)
    _ledger: Ledger | None = None

    @property
    def ledger(self) -> Ledger:
        """Made when something is to be placed: most plans place nothing."""
        if self._ledger is None:
            self._ledger = Ledger(self.desired, self.observed)
        return self._ledger

    def say(self, of: str, text: str, rejections: tuple[Rejection, ...] = (), *, wait: Wait | None = None) -> None:
        self.reasons.append(Reason(of, text, rejections, wait))


def plan_replicas(desired: Desired, observed: Observed, fresh_ids: Iterator[str]) -> Plan:
    """The plan. `fresh_ids` yields 8 hex digits per replica that may be started; it must not run out."""
    live = sum(replica.state in _COMING for replica in observed.replicas)
    draft = _Draft(
        desired=desired,
        observed=observed,
        fresh=fresh_ids,
        starts_left=max(0, desired.settings.starts_max - live),
        blocked=barrier(desired.settings.grace_s, observed),
    )
    closing = {closing.replica: closing for closing in observed.closings}
    nodes = {node.id: node for node in observed.nodes}
    by_model: dict[str, list[ObservedReplica]] = {}
    for replica in sorted(observed.replicas, key=lambda replica: replica.id):
        by_model.setdefault(replica.model, []).append(replica)

    _finish_closings(draft, by_model, closing, nodes)
    if desired.paused is not None:
        return _paused_plan(draft, desired, observed, by_model, closing, nodes)
    for name in sorted(by_model.keys() - {model.name for model in desired.catalog.models}):
        _tear_down(draft, name, by_model[name], closing, nodes, desired)
    for model in desired.catalog.models:
        of_model = by_model.get(model.name, [])
        if not _is_settled(model, of_model, closing, nodes, desired):
            _plan_model(draft, model, of_model, closing, nodes, desired, observed)
    busy = draft.under_way or bool(draft.actions or observed.refusals) or bool(draft.blocked)
    again_s = CLOSING_LOOK_AGAIN_S if observed.closings else LOOK_AGAIN_S if busy else IDLE_LOOK_AGAIN_S
    return Plan(tuple(draft.actions), tuple(draft.reasons), again_s)


def _paused_plan(
    draft: _Draft,
    desired: Desired,
    observed: Observed,
    by_model: dict[str, list[ObservedReplica]],
    closing: dict[ReplicaId, Closing],
    nodes: dict[NodeId, ObservedNode],
) -> Plan:
    """What was withdrawn before the pause is drained and stopped; nothing else is begun. Agents restart in place by themselves."""
    text = f"{desired.paused}; nothing is placed, moved or scaled until `llmgw ctl resume`"
    for name in sorted(by_model.keys() - {model.name for model in desired.catalog.models}):
        draft.say(f"model/{name}", text)
    for model in desired.catalog.models:
        if not _is_settled(model, by_model.get(model.name, []), closing, nodes, desired):
            draft.say(f"model/{model.name}", text)
    again_s = CLOSING_LOOK_AGAIN_S if observed.closings else IDLE_LOOK_AGAIN_S
    return Plan(tuple(draft.actions), tuple(draft.reasons), again_s)


def _is_settled(
    model: ModelSpec,
    replicas: Sequence[ObservedReplica],
    closing: dict[ReplicaId, Closing],
    nodes: dict[NodeId, ObservedNode],
    desired: Desired,
) -> bool:
    """The common case, told apart quickly: as many ready replicas of the preferred profile as wanted, and none to move."""
    if len(replicas) != model.replicas.count or not replicas:
        return False
    profile = model.preferred(desired.choices.get(model.name))
    drained = {hold.facility for hold in desired.holds if hold.drain}
    digest = profile.digest()
    for replica in replicas:
        if replica.state is not _S.READY or replica.ordered_to_drain or replica.id in closing:
            return False
        node = nodes.get(replica.node)
        if node is None or node.draining or (drained and node.facts.facility in drained):
            return False
        running = replica.report.order.profile
        if running is not profile and running.digest() != digest:
            return False
    return profile.engine != "openai"


def barrier(grace_s: float, observed: Observed) -> str:
    """Whom this leader still waits for, in words; "" when it knows what runs.

    Before a node that is known from earlier has answered, what may run there does not count as missing.
    """
    waiting = sorted(
        node.name for node in observed.nodes if node.state is NodeState.UNKNOWN and observed.now_s - node.awaited_since_s < grace_s
    )
    if not waiting:
        return ""
    return f"waiting up to {grace_s:.0f} s for the inventory of {', '.join(waiting[:5])}{' …' if len(waiting) > 5 else ''}"


def _heard(nodes: dict[NodeId, ObservedNode], replica: ObservedReplica) -> bool:
    """Can the replica's agent be told anything now? Before the barrier nothing is stopped there either."""
    node = nodes.get(replica.node)
    return node is not None and node.state is NodeState.READY and node.connected


def _finish_closings(
    draft: _Draft,
    by_model: dict[str, list[ObservedReplica]],
    closing: dict[ReplicaId, Closing],
    nodes: dict[NodeId, ObservedNode],
) -> None:
    """Stop what has let go or run out of time; drop the records of what has ended on request."""
    for replicas in by_model.values():
        for replica in replicas:
            leaving = closing.get(replica.id)
            if replica.state is _S.STOPPED:
                if _heard(nodes, replica):
                    draft.actions.append(Forget(replica.node, replica.id, "it has stopped"))
                continue
            if leaving is None or leaving.stop_sent or not _heard(nodes, replica) or replica.state is _S.LOST:
                continue
            running = replica.report.running or 0
            # Also one that is not ready waits until no router lists it: what is started on its port next is another's.
            broken = leaving.withdrawn and replica.state is not _S.READY
            if (leaving.let_go and running == 0) or leaving.left_s <= 0 or broken:
                how = (
                    "drained"
                    if leaving.let_go and running == 0
                    else "its deadline has passed"
                    if leaving.left_s <= 0
                    else "it was not ready"
                )
                draft.actions.append(Stop(replica.node, replica.id, f"{leaving.why}; {how}", replica.report.order.stop_grace_s))


def _tear_down(
    draft: _Draft,
    name: str,
    replicas: Sequence[ObservedReplica],
    closing: dict[ReplicaId, Closing],
    nodes: dict[NodeId, ObservedNode],
    desired: Desired,
) -> None:
    """The model has left the catalog: its replicas go, and the records of its failures with them."""
    for replica in replicas:
        if replica.state is _S.FAILED and _heard(nodes, replica):
            draft.actions.append(Forget(replica.node, replica.id, "its model left the catalog"))
        elif replica.id not in closing and replica.state not in _OVER and replica.state is not _S.LOST and _heard(nodes, replica):
            _withdraw(draft, replica, "its model left the catalog", desired)
        draft.say(f"replica/{replica.id}", f"leaving: model {name!r} is not in the catalog")


def _withdraw(draft: _Draft, replica: ObservedReplica, why: str, desired: Desired) -> None:
    draft.actions.append(Withdraw(replica.node, replica.id, why, desired.settings.drain_deadline_s))


def _plan_model(
    draft: _Draft,
    model: ModelSpec,
    replicas: Sequence[ObservedReplica],
    closing: dict[ReplicaId, Closing],
    nodes: dict[NodeId, ObservedNode],
    desired: Desired,
    observed: Observed,
) -> None:
    profile = model.preferred(desired.choices.get(model.name))
    of_model = f"model/{model.name}"
    if profile.engine == "openai":
        for replica in replicas:
            if replica.id not in closing and replica.state in _LIVE and _heard(nodes, replica):
                _withdraw(draft, replica, f"profile {profile.name!r} is an address that somebody else runs", desired)
        draft.say(of_model, f"served at {profile.url} by profile {profile.name!r}")
        return
    digests = {candidate.digest() for candidate in model.profiles}
    for replica in replicas:  # evidence of a failure closes (profile, node) for as long as the profile is what failed
        if replica.state is _S.FAILED and replica.report.order.profile.digest() not in digests and _heard(nodes, replica):
            draft.actions.append(Forget(replica.node, replica.id, "its profile has changed"))

    live = [replica for replica in replicas if replica.id not in closing and replica.state in _LIVE]
    leaving = [replica for replica in live if _node_is_left(replica, nodes, desired)]
    if not any(replica.id in closing for replica in replicas):  # operator's orders are carried out one at a time
        leaving += [replica for replica in live if replica.ordered_to_drain and replica not in leaving][:1]
    staying = [replica for replica in live if replica not in leaving]
    usable = _usable_digests(model, profile, replicas, observed)
    current = [replica for replica in staying if replica.report.order.profile.digest() in usable]
    outdated = [replica for replica in staying if replica not in current]
    wanted = model.replicas.count
    for replica in leaving:
        draft.say(f"replica/{replica.id}", "it is to leave")
    if any(replica.state in _COMING for replica in live):
        draft.under_way = True

    _start_missing(
        draft,
        model,
        profile,
        wanted - len(current) - len(outdated),
        f"{wanted} wanted, {len(staying)} running or starting",
        replicas,
        desired,
    )
    if outdated:
        _update(draft, model, profile, current, outdated, replicas, nodes, desired)
    surplus = len(staying) - wanted
    if surplus > 0 and not outdated:
        for replica in sorted(staying, key=_least_worth_keeping)[:surplus]:
            if _heard(nodes, replica):
                _withdraw(draft, replica, f"{wanted} wanted, {len(staying)} running or starting", desired)
    _let_leave(draft, model, leaving, staying, nodes, desired)
    if wanted == 0:
        draft.say(of_model, "0 replicas wanted")


def _usable_digests(model: ModelSpec, profile: Profile, replicas: Sequence[ObservedReplica], observed: Observed) -> frozenset[str]:
    """The preferred profile; where there is evidence that it fails, also those that the plan falls back to.

    A fallback is an observed fact: without such evidence a replica of another profile is outdated.
    """
    digest = profile.digest()
    failed = any(replica.state is _S.FAILED and replica.report.order.profile.digest() == digest for replica in replicas)
    refused = any((refusal.model, refusal.digest) == (model.name, digest) for refusal in observed.refusals)
    if not (failed or refused):
        return frozenset({digest})
    return frozenset(other.digest() for other in _by_preference(model, profile))


def _node_is_left(replica: ObservedReplica, nodes: dict[NodeId, ObservedNode], desired: Desired) -> bool:
    """Is the replica's node, or its facility, being drained?"""
    node = nodes.get(replica.node)
    if node is None:
        return False
    return node.draining or any(hold.drain and hold.facility == node.facts.facility for hold in desired.holds)


def _least_worth_keeping(replica: ObservedReplica) -> tuple[bool, bool, float, str]:
    """Whatever is not ready goes first, then what is out of rotation, then the youngest."""
    report = replica.report
    return (replica.state is _S.READY, report.in_rotation, -replica.since_s if replica.state is _S.READY else 0.0, replica.id)


def explain_replica(replica: ObservedReplica, node: ObservedNode | None, said: str = "") -> Reason:
    """Where a replica is and with what, what the last plan `said` of it, how its attempts go, and why it was placed there.

    The why is the order's own: of the plan that placed it, whoever made that plan.
    """
    order = replica.report.order
    devices = ", ".join(order.devices)
    where = f"{replica.state.value} on {node.name if node else replica.node}, profile {order.profile.name!r}"
    parts = [f"{where}, {order.memory_mib} MiB on {devices}, port {order.port}"]
    if said and said != order.placement.text:
        parts.append(said)
    if replica.report.reason:
        parts.append(replica.report.reason)
    if replica.report.trouble and replica.state in _COMING:
        parts.append(replica.report.trouble)
    parts.append(f"placed here because: {order.placement.text}" if order.placement.text else "the build that placed it kept no reason")
    return Reason(f"replica/{replica.id}", "; ".join(parts), order.placement.passed)


def explain_model(model: ModelSpec, replicas: Sequence[ObservedReplica]) -> Reason:
    """Why a model is as it is where the plan changes nothing about it: what it still waits for, if anything."""
    ready = [replica for replica in replicas if replica.state is _S.READY and replica.report.in_rotation]
    text = f"{len(ready)} of {model.replicas.count} replicas ready"
    waits = [f"{replica.id} is {_as_it_is(replica)}" for replica in sorted(replicas, key=lambda one: one.id) if replica not in ready]
    if not waits:
        return Reason(
            f"model/{model.name}", f"{text}; {'nothing is to be done' if len(ready) >= model.replicas.count else 'not planned yet'}"
        )
    more = f"; and {len(waits) - WAITS_MAX} more" if len(waits) > WAITS_MAX else ""
    return Reason(f"model/{model.name}", f"{text}; {'; '.join(waits[:WAITS_MAX])}{more}")


WAITS_MAX: Final = 3  # replicas that one line names


def _as_it_is(replica: ObservedReplica) -> str:
    report = replica.report
    state = "out of rotation" if replica.state is _S.READY else replica.state.value
    why = report.failure or report.reason if replica.state is _S.FAILED else report.trouble or report.reason
    return f"{state} ({why})" if why else state


def _start_missing(
    draft: _Draft,
    model: ModelSpec,
    profile: Profile,
    missing: int,
    why: str,
    replicas: Sequence[ObservedReplica],
    desired: Desired,
    avoid_surge: bool = False,
) -> int:
    """Start up to `missing` replicas; returns how many were started. Says why not, for the rest."""
    started = 0
    while started < missing:
        if draft.blocked:
            draft.say(f"model/{model.name}", draft.blocked, wait=Wait.INVENTORY)
            draft.under_way = True
            break
        if draft.starts_left <= 0:
            text = f"waiting for its turn: as many replicas are starting as may at once ({desired.settings.starts_max})"
            draft.say(f"model/{model.name}", text, wait=Wait.TURN)
            draft.under_way = True
            break
        place = None
        rejections: tuple[Rejection, ...] = ()
        chosen = profile
        for candidate in _by_preference(model, profile):
            place, found = draft.ledger.place(model, candidate)
            rejections += found
            chosen = candidate
            if place is not None:
                break
            # Another profile is a fallback for what failed, not for a node that is full for the moment.
            if not any(rejection.filter.value == "closed" for rejection in found):
                break
        if place is None:
            if not avoid_surge:
                draft.say(f"model/{model.name}", f"{why}; no node takes one more: {summary(rejections)}", rejections)
            break
        passed = (*rejections, *place.placement.passed)  # of a profile that was preferred and failed everywhere, then of this one
        placement = Placement(f"{why}; {place.placement.text}", passed[:PASSED_MAX])
        order = _order(model, chosen, place, placement, next(draft.fresh), desired)
        draft.ledger.enter(place.node, order)
        draft.actions.append(Start(place.node, order, why))
        draft.say(f"replica/{order.id}", placement.text, placement.passed)
        draft.starts_left -= 1
        started += 1
    return started


SUMMARY_MAX: Final = 2  # different causes that one line names; `explain` has them all


def summary(rejections: Sequence[Rejection]) -> str:
    """Why no node takes one more, in one line: each cause once, with how many nodes share it."""
    if not rejections:
        return "no node is known"
    causes: dict[str, list[Rejection]] = {}
    for rejection in rejections:
        causes.setdefault(rejection.cause or rejection.text, []).append(rejection)
    shown = sorted(causes.items(), key=lambda cause: (-len(cause[1]), cause[0]))
    texts = [f"{same[0].node}: {same[0].text}" if len(same) == 1 else f"{len(same)} nodes: {cause}" for cause, same in shown[:SUMMARY_MAX]]
    more = len(shown) - SUMMARY_MAX
    return "; ".join(texts) + (f"; and {more} more" if more > 0 else "")


def _by_preference(model: ModelSpec, profile: Profile) -> tuple[Profile, ...]:
    rest = sorted(
        (
            other
            for other in model.profiles
            if other.name != profile.name and other.engine != "openai" and other.priority > profile.priority
        ),
        key=lambda other: (other.priority, other.name),
    )
    return (profile, *rest)


def _order(model: ModelSpec, profile: Profile, place: Place, placement: Placement, fresh: str, desired: Desired) -> ReplicaOrder:
    settings = desired.settings
    limits: dict[str, float] = {}
    if (load := settings.load_limits_s.get(profile.engine)) is not None:
        limits["load_limit_s"] = load
    if (progress := settings.progress_limits_s.get(profile.engine)) is not None:
        limits["progress_limit_s"] = progress
    return ReplicaOrder(
        id=replica_id(model.name, fresh),
        model=model.name,
        names=model.names,
        kind=model.kind,
        profile=profile,
        devices=place.devices,
        port=place.port,
        memory_mib=place.memory_mib,
        generation=desired.catalog.generation,
        restart=settings.restart,
        engine_command=settings.engine_commands.get(profile.engine, ()),
        placement=placement,
        **limits,
    )


def _update(
    draft: _Draft,
    model: ModelSpec,
    profile: Profile,
    current: Sequence[ObservedReplica],
    outdated: Sequence[ObservedReplica],
    replicas: Sequence[ObservedReplica],
    nodes: dict[NodeId, ObservedNode],
    desired: Desired,
) -> None:
    """A changed profile: surge by one if there is room, else swap one at a time; stop at the first failure."""
    of_model = f"model/{model.name}"
    wanted = model.replicas.count
    digest = profile.digest()
    failed = [r for r in replicas if r.state is _S.FAILED and r.report.order.profile.digest() == digest]
    ready = [r for r in (*current, *outdated) if r.state is _S.READY]
    total = len(current) + len(outdated)
    if failed:
        end = failed[0].report.failure or failed[0].report.reason
        draft.say(of_model, f"the update has stopped: {failed[0].id} failed with the new profile: {end}")
        return
    not_ready = [r for r in outdated if r.state is not _S.READY]
    if not_ready:  # it serves nobody, so it need not wait for its successor
        _withdraw_if_heard(draft, not_ready[0], "its profile has changed", nodes, desired)
        return
    if len(ready) > wanted:  # the surge has arrived, or fewer are wanted than before
        victim = min(outdated, key=_least_worth_keeping)
        _withdraw_if_heard(draft, victim, "its profile has changed, and enough replicas are ready without it", nodes, desired)
        return
    if any(r.state in _COMING for r in current):
        draft.under_way = True
        draft.say(of_model, "updating: waiting for the new replica to become ready")
        return
    if any(closing_replica.state is _S.DRAINING for closing_replica in replicas):
        draft.under_way = True
        draft.say(of_model, "updating: waiting for the old replica to be gone")
        return
    if _start_missing(draft, model, profile, 1, "its profile has changed", replicas, desired, avoid_surge=True):
        return
    if not draft.blocked and draft.starts_left > 0 and len(ready) == total:
        # No room beside it. With every other replica ready, one at a time is swapped: that one place is empty for a while.
        victim = min(outdated, key=_least_worth_keeping)
        _withdraw_if_heard(draft, victim, "its profile has changed, and there is no room for a new one beside it", nodes, desired)


def _withdraw_if_heard(draft: _Draft, replica: ObservedReplica, why: str, nodes: dict[NodeId, ObservedNode], desired: Desired) -> None:
    if _heard(nodes, replica):
        _withdraw(draft, replica, why, desired)


def _let_leave(
    draft: _Draft,
    model: ModelSpec,
    leaving: Sequence[ObservedReplica],
    staying: Sequence[ObservedReplica],
    nodes: dict[NodeId, ObservedNode],
    desired: Desired,
) -> None:
    """Replicas on a draining node or facility go once others can do their work, or when the deadline has passed."""
    ready_elsewhere = sum(replica.state is _S.READY for replica in staying)
    coming = any(replica.state in _COMING for replica in staying) or any(
        isinstance(action, Start) and action.order.model == model.name for action in draft.actions
    )
    room = max(0, ready_elsewhere + len(leaving) - model.replicas.count)
    for replica in sorted(leaving, key=_least_worth_keeping):
        node = nodes[replica.node]
        overdue = node.drain_left_s is not None and node.drain_left_s <= 0
        why = "an operator asked for it to go" if replica.ordered_to_drain else f"node {node.name} is being drained"
        if replica.state is not _S.READY or overdue or room > 0:
            room -= 1
            _withdraw_if_heard(draft, replica, why, nodes, desired)
        elif not coming and not draft.blocked and (ready_elsewhere + len(leaving) > 1 or replica.ordered_to_drain):
            # Nothing will come elsewhere. A node's drain does not take a model's last ready replica; an order for this one does.
            leaving = leaving[1:]
            _withdraw_if_heard(draft, replica, f"{why}; no room elsewhere", nodes, desired)
        else:
            draft.under_way = True
            draft.say(
                f"replica/{replica.id}",
                f"stays for now: {why}, but "
                + ("its replacement is not ready yet" if coming else "it is the model's last ready replica and no other node takes it"),
            )
