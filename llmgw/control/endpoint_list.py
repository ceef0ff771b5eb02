"""From what is observed to what routers are told: ready replicas as endpoints, and why each other model has none. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from llmgw.control.observed import Observed, ObservedReplica
from llmgw.domain.endpoint import Absence, AbsenceReason, Endpoint, EndpointList
from llmgw.domain.ids import EndpointId, ReplicaId
from llmgw.domain.model import Catalog, ModelSpec, Profile
from llmgw.domain.placed import Filter
from llmgw.domain.plan import Reason, Wait
from llmgw.domain.replica import ReplicaState

_COMING = frozenset({ReplicaState.PENDING, ReplicaState.STARTING, ReplicaState.LOADING})


Made = dict[ReplicaId, tuple[ObservedReplica, ModelSpec, Endpoint]]


def build_list(
    catalog: Catalog,
    choices: Mapping[str, str],
    observed: Observed,
    reasons: Mapping[str, Reason],
    static: tuple[Endpoint, ...] = (),
    secret: Callable[[str], str] = lambda name: "",
    made: Made | None = None,
) -> EndpointList:
    """The list. `reasons` are the last plan's, by object; `static` are a file's endpoints, published beside the replicas;
    `secret(name)` gives the key that a profile names in the environment ("" where it names none). `made` remembers the endpoints
    of the list before, so that unchanged replicas keep theirs.
    """
    closing = {closing.replica for closing in observed.closings}
    by_model: dict[str, list[ObservedReplica]] = {}
    for replica in observed.replicas:
        by_model.setdefault(replica.model, []).append(replica)
    endpoints: list[Endpoint] = list(static)
    absences: list[Absence] = []
    for model in catalog.models:
        chosen = model.preferred(choices.get(model.name))
        of_model = by_model.get(model.name, [])
        mine = [_kept(model, replica, made) for replica in of_model if _routable(replica, closing)]
        if chosen.engine == "openai":
            mine.append(_outside(model, chosen, secret))
        endpoints += mine
        if not mine:
            absences.append(_absence(model, of_model, closing, reasons))
    if made is not None and len(made) > 2 * len(endpoints) + 100:  # those of replicas that are gone
        alive = {replica.id for replica in observed.replicas}
        for gone in made.keys() - alive:
            del made[gone]
    endpoints.sort(key=lambda endpoint: endpoint.id)  # absences are in their models' order: both as `protocol.list_delta` needs them
    return EndpointList(tuple(endpoints), tuple(absences))


def _routable(replica: ObservedReplica, closing: set[ReplicaId]) -> bool:
    report = replica.report
    if replica.id in closing or not report.url or not report.in_rotation:
        return False
    # The node is silent, but that alone stops no engine: routers find out by themselves what does not answer.
    return replica.state is ReplicaState.READY or (replica.state is ReplicaState.LOST and report.state is ReplicaState.READY)


def _kept(model: ModelSpec, replica: ObservedReplica, made: Made | None) -> Endpoint:
    if made is None:
        return _endpoint(model, replica)
    before = made.get(replica.id)
    if before is not None and before[0] is replica and before[1] is model:
        return before[2]
    endpoint = _endpoint(model, replica)
    if before is not None and before[2] == endpoint:
        endpoint = before[2]  # a new report of the same address
    made[replica.id] = (replica, model, endpoint)
    return endpoint


def _endpoint(model: ModelSpec, replica: ObservedReplica) -> Endpoint:
    report = replica.report
    order = report.order
    current = model.profile(order.profile.name) or order.profile  # weight and priority follow the catalog without a restart
    return Endpoint(
        id=EndpointId(replica.id),
        url=report.url.rstrip("/"),
        models=(model.name,),
        aliases=dict.fromkeys(model.aliases, model.name),
        engine=order.profile.engine,
        pool=model.pool,
        weight=current.weight,
        priority=current.priority,
        key=report.key,
    )


def _outside(model: ModelSpec, profile: Profile, secret: Callable[[str], str]) -> Endpoint:
    """An address that somebody else runs."""
    return Endpoint(
        id=EndpointId(f"{model.name}/{profile.name}"),
        url=profile.url.rstrip("/"),
        models=(model.name,),
        aliases=dict.fromkeys(model.aliases, model.name),
        names={model.name: profile.checkpoint} if profile.checkpoint else {},
        engine="openai",
        pool=model.pool,
        weight=profile.weight,
        priority=profile.priority,
        key=secret(profile.api_key_env) if profile.api_key_env else "",
    )


def _absence(model: ModelSpec, replicas: list[ObservedReplica], closing: set[ReplicaId], reasons: Mapping[str, Reason]) -> Absence:
    reason = reasons.get(f"model/{model.name}")
    text = reason.text if reason else ""
    rejections = reason.rejections if reason else ()
    coming = [replica for replica in replicas if replica.id not in closing and replica.state in _COMING]
    if coming:
        why, text = AbsenceReason.LOADING, f"{len(coming)} of {model.replicas.count} replicas are {coming[0].state.value}"
    elif any(replica.state is ReplicaState.LOST for replica in replicas):
        why, text = AbsenceReason.UNREACHABLE, "its replicas' nodes are silent"
    elif any(replica.id in closing or replica.state is ReplicaState.DRAINING for replica in replicas):
        why, text = AbsenceReason.DRAINING, "its replicas are on their way out"
    elif any(not replica.report.in_rotation for replica in replicas):
        why, text = (
            AbsenceReason.UNREACHABLE,
            f"its replicas do not answer: {next(r.report.reason for r in replicas if not r.report.in_rotation)}",
        )
    elif rejections and all(rejection.filter is Filter.HOLD for rejection in rejections):
        why = AbsenceReason.HELD
    elif reason is not None and reason.wait is not None:
        why = AbsenceReason.WAITING if reason.wait is Wait.TURN else AbsenceReason.LOADING
    else:
        why = AbsenceReason.NO_CAPACITY
    return Absence(model.names, why, text)
