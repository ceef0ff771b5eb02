"""What the API shows of models, replicas, nodes and events: plain data from the owners' values. Pure.

Secrets never pass: an engine's key is not shown, and the values of a model's environment are for those who may edit it.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

from llmgw.control.node_watch import EACH_MAX, some
from llmgw.control.observed import ObservedNode, ObservedReplica
from llmgw.domain.endpoint import EndpointList
from llmgw.domain.event import Event
from llmgw.domain.holds import Hold
from llmgw.domain.ids import NodeId
from llmgw.domain.model import ModelSpec
from llmgw.domain.node import NodeState
from llmgw.domain.plan import Reason, Wait
from llmgw.domain.replica import ReplicaState
from llmgw.settings.objects import model_to_table
from llmgw.store.nodes import StoredNode

HIDDEN: Final = "***"
_COMING: Final = frozenset({ReplicaState.PENDING, ReplicaState.STARTING, ReplicaState.LOADING})


def time_text(wall_s: float) -> str:
    """Wall time as RFC 3339 in UTC, to the millisecond."""
    try:
        moment = datetime.datetime.fromtimestamp(wall_s, datetime.UTC)
    except (OverflowError, ValueError, OSError):  # a clock that is centuries off
        moment = datetime.datetime.fromtimestamp(0, datetime.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def replica_view(replica: ObservedReplica, node: str, wall_s: float) -> dict[str, Any]:
    report, order = replica.report, replica.report.order
    return {
        "id": replica.id,
        "model": replica.model,
        "profile": order.profile.name,
        "engine": order.profile.engine,
        "node": node,
        "gpus": [str(device) for device in order.devices],
        "state": replica.state.value,
        "reason": report.reason,
        "since": time_text(wall_s - report.age_s),
        "age_s": round(report.age_s, 3),
        "url": report.url,
        "pid": report.pid or None,
        "attempt": report.attempt,
        "tries": report.tries,
        "tries_max": order.restart.attempts,
        "failure": report.failure,
        "generation": order.generation,
        "in_rotation": report.in_rotation and replica.state is ReplicaState.READY,
        "running": report.running,
        "memory_mib": report.memory_mib,
        "exit_code": report.exit_code,
    }


def model_view(
    spec: ModelSpec,
    revision: int,
    chosen: str | None,
    replicas: Iterable[ObservedReplica],
    endpoints: EndpointList,
    reason: Reason | None,
) -> dict[str, Any]:
    """What is asked for, what is ready, and one word with its reason for the difference."""
    profile = spec.preferred(chosen)
    own = [replica for replica in replicas if replica.model == spec.name]
    wanted = spec.replicas.count
    if profile.engine == "openai":
        wanted = 1
        ready = sum(spec.name in endpoint.models for endpoint in endpoints.endpoints)
    else:
        ready = sum(replica.state is ReplicaState.READY and replica.report.in_rotation for replica in own)
    absence = next((absence for absence in endpoints.absences if spec.name in absence.names), None)
    told = reason.text if reason is not None else absence.text if absence is not None else ""
    if not told and ready < wanted:
        told = next((text for replica in own if (text := replica.report.trouble or replica.report.reason)), "")
    state = _model_state(own, wanted, ready, "" if absence is None else absence.reason.value)
    return {
        "name": spec.name,
        "aliases": list(spec.aliases),
        "kind": spec.kind.value,
        "pool": spec.pool,
        "profile": profile.name,
        "engine": profile.engine,
        "chosen": chosen,
        "replicas_min": spec.replicas.min,
        "replicas_max": spec.replicas.max,
        "replicas_wanted": wanted,
        "ready": ready,
        "state": state,
        "reason": told if state != "ready" or reason is not None else "",
        "revision": revision,
    }


def _model_state(own: list[ObservedReplica], wanted: int, ready: int, absence: str) -> str:
    if not wanted and not ready:
        return "stopped"
    if ready >= wanted:
        return "ready"
    if ready:
        return "degraded"
    if any(replica.state in _COMING for replica in own):
        return "loading"
    if any(replica.state is ReplicaState.FAILED for replica in own):
        return "failed"
    return absence or "pending"


def model_table(spec: ModelSpec, *, secrets: bool) -> dict[str, Any]:
    """The `[[model]]` table; without `secrets` the values of its environment are hidden."""
    table = model_to_table(spec)
    if not secrets:
        for profile in table["profile"]:
            if "env" in profile:
                profile["env"] = dict.fromkeys(profile["env"], HIDDEN)
    return table


def node_view(
    node: ObservedNode, stored: StoredNode | None, replicas: Iterable[ObservedReplica], now_s: float, wall_s: float
) -> dict[str, Any]:
    facts = node.facts
    own = [replica for replica in replicas if replica.node == node.id]
    return {
        "name": facts.name,
        "id": node.id,
        "state": node.state.value,
        "facility": facts.facility,
        "address": facts.address,
        "labels": dict(sorted(facts.labels.items())),
        "own_labels": {} if stored is None else dict(sorted(stored.labels.items())),
        "cordoned": node.cordoned,
        "draining": node.draining,
        "drain_left_s": None if node.drain_left_s is None else round(max(0.0, node.drain_left_s), 1),
        "connected": node.connected,
        "heard_age_s": round((now_s - node.heard_s), 3),
        "last_seen": time_text(wall_s - (now_s - node.heard_s)),
        "clock_ahead_s": round(node.clock_ahead_s, 1),
        "build": facts.build,
        "cpus": facts.cpus,
        "memory_mib": facts.memory_mib,
        "disk_free_mib": facts.disk_free_mib,
        "gpus": sum(device.kind.value == "gpu" for device in facts.devices),
        "devices": [
            {
                "id": device.id,
                "index": device.index,
                "kind": device.kind.value,
                "name": device.name,
                "total_mib": device.total_mib,
                "used_mib": device.used_mib,
                "ours_mib": device.ours_mib,
                "known": device.known,
            }
            for device in facts.devices
        ],
        "engines": [{"name": engine.name, "version": engine.version} for engine in facts.engines],
        "replicas": sum(replica.state not in (ReplicaState.STOPPED, ReplicaState.FAILED) for replica in own),
    }


def node_names(nodes: Iterable[ObservedNode]) -> Mapping[NodeId, str]:
    return {node.id: node.name for node in nodes}


def hold_view(hold: Hold, wall_s: float) -> dict[str, Any]:
    return {
        "facility": hold.facility,
        "reason": hold.reason,
        "drain": hold.drain,
        "until": None if hold.until_wall_s is None else time_text(hold.until_wall_s),
        "author": hold.author,
        "active": hold.active(wall_s),
    }


def event_view(event: Event) -> dict[str, Any]:
    return {
        "seq": event.seq,
        "at": time_text(event.at),
        "kind": event.kind,
        "object": event.object,
        "epoch": event.epoch,
        "text": event.text,
        "level": event.level.value,
    }


def problems(
    models: Iterable[Mapping[str, Any]],
    nodes: Iterable[ObservedNode],
    replicas: Iterable[ObservedReplica],
    now_s: float,
    reasons: Mapping[str, Reason] = MappingProxyType({}),
) -> list[str]:
    """What needs a person, a sentence each. `reasons` are the last plan's, by object."""
    found = []
    unwell = [
        replica for replica in replicas if replica.state is ReplicaState.FAILED or (replica.state in _COMING and replica.report.trouble)
    ]
    told = set()  # models whose line says which replica failed, and how
    for model in models:
        reason = reasons.get(f"model/{model['name']}")
        if reason is not None and reason.wait is Wait.TURN:
            continue
        if model["state"] not in ("ready", "stopped", "loading"):
            why = f": {model['reason']}" if model["reason"] else ""
            found.append(f"model {model['name']}: {model['ready']} of {model['replicas_wanted']} ready, {model['state']}{why}")
            if any(replica.id in why for replica in unwell if replica.state is ReplicaState.FAILED and replica.model == model["name"]):
                told.add(model["name"])
    lost = sorted((node.name, now_s - node.heard_s) for node in nodes if node.state is NodeState.LOST)
    if len(lost) <= EACH_MAX:
        found += [f"node {name} is lost: silent for {silent_s:.0f} s" for name, silent_s in lost]
    else:
        least_s = min(silent_s for _, silent_s in lost)
        found.append(f"{len(lost)} nodes are lost: silent for {least_s:.0f} s or longer: {some([name for name, _ in lost])}")
    for replica in unwell:
        report = replica.report
        if replica.state is not ReplicaState.FAILED:
            found.append(f"replica {replica.id} keeps failing: {report.trouble}")
        elif replica.model not in told:
            found.append(f"replica {replica.id} failed: {report.failure or report.reason or 'no reason was given'}")
    return found
