"""`/status`, and at the root what monitors ask: the process, whether it can serve, and its metrics."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final

import attrs

from llmgw import __version__
from llmgw.admin.api.leader import leader_view
from llmgw.admin.api.models import list_models
from llmgw.admin.api.settings import problems as settings_problems
from llmgw.admin.api.settings import summary
from llmgw.admin.calls import Call, Reply, Route
from llmgw.admin.metrics import CONTENT_TYPE, Metrics
from llmgw.admin.views import problems
from llmgw.control.controller import Controller
from llmgw.control.sessions import CLOCK_WRONG_S
from llmgw.lease.outage import Part
from llmgw.store.copies import CopiedStore

COPY_OLD_S: Final = 90.0  # three times as long as the replica is left unread while nobody leads (reference D.5)
ROUTERS_BACK_S: Final = 5.0  # chosen: after a start, routers that followed before are back by then
PROBLEMS_MAX: Final = 100  # that are named; whoever has more looks at the lists


def routes(controller: Controller, metrics: Metrics, draining: Callable[[], bool]) -> tuple[Route, ...]:
    async def status(call: Call) -> Reply:
        return Reply(status_view(controller))

    def beside_the_leader(told: Reply) -> Reply:
        return Reply(joined_view(controller, json.loads(told.text or "")))

    async def health(call: Call) -> Reply:
        return Reply({"status": "ok", "build": __version__})

    async def ready(call: Call) -> Reply:
        reasons = unready(controller, draining())
        return Reply({"ready": not reasons, "reasons": reasons}, 503 if reasons else 200, {"Retry-After": "1"} if reasons else {})

    async def show_metrics(call: Call) -> Reply:
        return Reply(text=metrics.text(), content_type=CONTENT_TYPE)

    return (
        Route("GET", "/api/v1/status", status, "The whole cluster at a glance, and what needs a person", late=True, local=False,
              beside=beside_the_leader),
        Route("GET", "/health", health, "The process runs", None),
        Route("GET", "/ready", ready, "This control plane leads or follows, has planned, and can write; else 503 with reasons", None),
        Route("GET", "/metrics", show_metrics, "Metrics as text; open on loopback, a token elsewhere", None),
    )  # fmt: skip


def joined_view(controller: Controller, leaders: Mapping[str, Any]) -> dict[str, Any]:
    """A standby's: of the cluster what the leader knows, who has heard every node, and of itself what it knows."""
    found = list(dict.fromkeys([*leaders["problems"], *own_problems(controller)]))
    return {
        **status_view(controller),
        **{name: leaders[name] for name in ("models", "replicas", "nodes")},
        "problems": found[:PROBLEMS_MAX],
        "problems_more": leaders["problems_more"] + max(0, len(found) - PROBLEMS_MAX),
    }


def own_problems(controller: Controller) -> list[str]:
    """What is wrong with this control plane itself."""
    found = []
    if controller.store.trouble:
        found.append(f"the store takes no writes, and orders are refused: {controller.store.trouble}")
    leads, why = controller.leadership, _lease_why(controller)
    if isinstance(controller.store, CopiedStore):
        found += _replica_problems(controller.store, leads.is_leader)
    if not leads.is_leader and not controller.peers.leader_address():
        found.append("no control plane is known to lead: nothing is placed, healed or changed")
    elif leads.is_leader and not leads.confirmed(controller.machine.now_s()):
        found.append(f"the lease's store does not answer: what was asked for is kept up, and nothing can be changed{why}")
    elif not leads.is_leader and leads.store_silent:
        found.append(f"the lease's store does not answer this standby: whoever leads goes on, and nothing can be changed{why}")
    if controller.rollouts.up_s >= ROUTERS_BACK_S and not (controller.routers.connected() or controller.settings.router.embedded):
        found.append("no router follows this control plane, which runs none itself (router.embedded is false)")
    found += settings_problems(controller)
    if controller.events.dropped:
        found.append(f"{controller.events.dropped} events could not be stored and were lost")
    return found


def _lease_why(controller: Controller) -> str:
    why = controller.outage.why(Part.LEASE)
    return f" ({why})" if why else ""


def _replica_problems(store: CopiedStore, leads: bool) -> list[str]:
    """Of a store that is replicated: what keeps writes from the replica, and how far behind a standby is."""
    if leads:
        report = store.replica_report
        if store.trouble or report is None or not report.trouble:
            return []
        return [f"what is written does not reach the replica, and writes are refused: {report.trouble}"]
    age_s = store.age_s()
    if age_s is None:
        return ["this standby shows what an earlier process left of the store: neither a leader nor the replica has told it more"]
    if age_s > COPY_OLD_S:
        return [f"what this standby shows of the store is {age_s:.0f} s old: neither a leader nor the replica tells it more"]
    return []


def status_view(controller: Controller) -> dict[str, Any]:
    """A summary that stays small however large the cluster is: counts by state. `problems_more` are those beyond the named ones."""
    observed = controller.observe()
    replicas = controller.replicas()
    models = list_models(controller)
    following = controller.routers.connected()
    found = problems(models, observed.nodes, replicas, observed.now_s, controller.reconciler.reasons)
    found += [
        f"node {node.name}: its clock is {abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'} this machine's"
        for node in observed.nodes
        if abs(ahead_s := node.clock_ahead_s) > CLOCK_WRONG_S
    ]
    found = [*own_problems(controller), *found]
    return {
        "cluster_id": controller.leadership.cluster_id,
        "leader": leader_view(controller),
        "build": __version__,
        "store": {
            "mode": "none" if controller.file else controller.store.mode,
            "durability": controller.store.durability,
            "schema": controller.store.schema,
            "place": controller.store.place,
            "age_s": None if (age_s := controller.store.age_s()) is None else round(age_s, 1),
        },
        "settings": summary(controller),
        "models": dict(sorted(Counter(model["state"] for model in models).items())),
        "replicas": dict(sorted(Counter(replica.state.value for replica in replicas).items())),
        "nodes": dict(sorted(Counter(node.state.value for node in observed.nodes).items())),
        "router": {
            "embedded": controller.settings.router.embedded,
            "generation": controller.publisher.generation,
            "endpoints": len(controller.publisher.current.endpoints),
            "following": [attrs.asdict(one) for one in following],
        },
        "problems": found[:PROBLEMS_MAX],
        "problems_more": max(0, len(found) - PROBLEMS_MAX),
    }


def unready(controller: Controller, draining: bool) -> list[str]:
    """Why this control plane cannot do its work now, a sentence each."""
    reasons = []
    if draining:
        reasons.append("this control plane is stopping")
    leads = controller.leadership
    if not leads.is_leader and not controller.peers.leader_address():
        reasons.append("no control plane is known to lead")
    elif leads.store_silent and not leads.confirmed(controller.machine.now_s()):
        reasons.append("the lease's store does not answer, so nothing can be changed")
    elif leads.is_leader and not controller.reconciler.plans:
        reasons.append("the first plan has not been made yet")
    if not controller.store.may_write:
        reasons.append("the store was changed by a newer build, this one may only read it")
    elif controller.store.trouble:
        reasons.append(f"the store takes no writes: {controller.store.trouble}")
    return reasons
