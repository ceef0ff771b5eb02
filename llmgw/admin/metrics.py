"""What `/metrics` says of the control plane. Labels name models, states and routes: never a user, a token or a key."""

from __future__ import annotations

from collections import Counter as CounterOf
from collections.abc import Iterator
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from llmgw import __version__
from llmgw.control.controller import Controller
from llmgw.domain.node import NodeState
from llmgw.domain.replica import ReplicaState
from llmgw.domain.settings_version import RolloutPhase
from llmgw.store.copies import CopiedStore

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """Read from the owners at each scrape; only requests are counted here."""

    def __init__(self, controller: Controller) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Cluster(controller))
        self._requests = Counter(
            "llmgw_admin_requests", "Requests of the admin API by route and status.", ("method", "route", "status"), registry=self._registry
        )

    def count(self, method: str, route: str, status: int) -> None:
        self._requests.labels(method, route, str(status)).inc()

    def text(self) -> str:
        return generate_latest(self._registry).decode()


class _Cluster(Collector):
    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def collect(self) -> Iterator[Any]:
        controller = self._controller
        observed = controller.observe()
        replicas = controller.replicas()
        yield _gauge("llmgw_build_info", "This build; always 1.", {(__version__,): 1}, "build")
        yield _gauge("llmgw_leader", "1 while this control plane leads.", {(): float(controller.leadership.is_leader)})
        leads = controller.leadership
        yield _gauge("llmgw_lease_epoch", "The epoch that this control plane holds; 0 while it holds none.", {(): float(leads.epoch)})
        left_s = leads.seconds_left(controller.machine.now_s())
        yield _gauge("llmgw_lease_seconds_left", "Until leadership is no longer confirmed unless renewed; 0 on a standby.", {(): left_s})
        yield _counter("llmgw_lease_transitions", "How often this process has begun to lead.", leads.transitions)
        standbys = float(len(controller.peers.healthy())) if leads.is_leader else 0.0
        yield _gauge("llmgw_standbys", "Control planes that could take over from this leader now.", {(): standbys})
        yield _gauge("llmgw_models", "Models in the catalog.", {(): float(len(controller.live.current.models))})
        wanted: dict[tuple[str, ...], float] = {(spec.name,): float(spec.replicas.count) for spec in controller.live.current.models}
        yield _gauge("llmgw_model_replicas_wanted", "Replicas asked for.", wanted, "model")
        ready = CounterOf(replica.model for replica in replicas if replica.state is ReplicaState.READY and replica.report.in_rotation)
        yield _gauge(
            "llmgw_model_replicas_ready", "Replicas that are ready and in rotation.", {key: float(ready[key[0]]) for key in wanted}, "model"
        )
        states = CounterOf(replica.state for replica in replicas)
        shown: dict[tuple[str, ...], float] = {(state.value,): float(states[state]) for state in ReplicaState}
        yield _gauge("llmgw_replicas", "Replicas by state, as last reported.", shown, "state")
        nodes = CounterOf(node.state for node in observed.nodes)
        yield _gauge("llmgw_nodes", "Nodes by state.", {(state.value,): float(nodes[state]) for state in NodeState}, "state")
        yield _gauge("llmgw_endpoints", "Endpoints in the published list.", {(): float(len(controller.publisher.current.endpoints))})
        yield _gauge("llmgw_endpoints_generation", "Generation of the published list.", {(): float(controller.publisher.generation)})
        yield _gauge("llmgw_routers", "Routers that follow this control plane now.", {(): float(len(controller.routers.connected()))})
        in_force, poller = controller.in_force, controller.settings_poller
        yield _gauge(
            "llmgw_settings_version",
            "The settings version whose live keys are in force here; 0 without a store.",
            {(): float(in_force.live)},
        )
        yield _gauge(
            "llmgw_settings_desired_version", "The newest settings version that is not held, as seen here.", {(): float(poller.desired)}
        )
        refused = float(in_force.refused > 0 and in_force.refused == poller.desired)
        yield _gauge("llmgw_settings_refused", "1 while this control plane does not take the desired version.", {(): refused})
        frozen = float(poller.row.phase is RolloutPhase.FROZEN)
        yield _gauge("llmgw_rollout_frozen", "1 while the roll-out of settings stands still because it failed.", {(): frozen})
        yield _gauge("llmgw_paused", "1 while somebody has paused the cluster.", {(): float(controller.paused() is not None)})
        yield from _replica(controller)
        yield _counter("llmgw_plans", "Plans made since the start.", controller.reconciler.plans)
        yield _counter("llmgw_events_lost", "Events that could not be stored in time.", controller.events.dropped)


def _replica(controller: Controller) -> Iterator[Any]:
    """Of a replicated store; all 0 with another one."""
    store, now_s = controller.store, controller.machine.now_s()
    copied = store if isinstance(store, CopiedStore) else None
    report = None if copied is None or not controller.leadership.is_leader else copied.replica_report
    alive = report is not None and report.alive
    yield _gauge("llmgw_replica_alive", "1 while this leader's Litestream runs; 0 on a standby.", {(): float(alive)})
    lag = 0.0 if report is None else float(report.lag)
    yield _gauge("llmgw_replica_lag_transactions", "Transactions of this leader that are not known to be in the replica.", {(): lag})
    pending = 0.0 if copied is None else float(copied.pending)
    yield _gauge("llmgw_replica_pending", "Writes of this leader that are stored and not known to be durable.", {(): pending})
    age_s = 0.0 if report is None else now_s - (report.success_s if report.success_s is not None else report.began_s)
    yield _gauge("llmgw_replica_success_age_seconds", "Since all of this leader's writes were known to be in the replica.", {(): age_s})
    copy_age_s = None if copied is None else copied.age_s()
    yield _gauge(
        "llmgw_replica_copy_age_seconds",
        "How old what this control plane reads of the store may be; left out where that is not known.",
        {(): 0.0} if copied is None else {} if copy_age_s is None else {(): copy_age_s},
    )
    restarts = 0.0 if report is None else float(report.restarts)
    yield _counter("llmgw_replica_restarts", "How often Litestream was started again in this term.", restarts)


def _gauge(name: str, text: str, values: dict[tuple[str, ...], float], *labels: str) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text)
    family.add_metric((), value)
    return family
