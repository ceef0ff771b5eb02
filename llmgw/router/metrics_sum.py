"""Several workers' metrics as one router's: sums, what of a dead worker's stays, and the text. Pure.

A counter never goes down because a worker died: what it had counted is kept. Endpoints come and go, so rows of one that is on no
list any more are not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from llmgw.router.worker_messages import Family, Sample

if TYPE_CHECKING:
    from prometheus_client.core import Metric

COUNTED: Final = frozenset({"counter", "histogram"})  # what only rises, and so outlives the worker that counted it


def _worst(values: Iterable[float]) -> float:
    return max(values)


def _least(values: Iterable[float]) -> float:
    return min(values)


# Gauges over workers. What is not named here is a sum.
GAUGES: Final[Mapping[str, Callable[[Iterable[float]], float]]] = {
    "llmgw_inflight": sum,
    "llmgw_connections": sum,
    "llmgw_breaker_state": _worst,
    "llmgw_endpoint_resting": _worst,
    "llmgw_endpoints_generation": _least,
    "llmgw_endpoint_load_known": _worst,  # each worker asks every engine, and hears the same
    "llmgw_endpoint_running": _worst,
    "llmgw_endpoint_waiting": _worst,
    "llmgw_queue": sum,
}


def plain(metrics: Iterable[Metric]) -> list[Family]:
    """Metrics as values that can be sent."""
    return [
        Family(
            metric.name,
            metric.documentation,
            metric.type,
            [(sample.name, tuple(sample.labels.items()), float(sample.value)) for sample in metric.samples],
        )
        for metric in metrics
    ]


def summed(parts: Sequence[Sequence[Family]]) -> list[Family]:
    """All of them as one, in the order in which things first appear."""
    heads: dict[str, Family] = {}
    values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], list[float]]] = {}
    for part in parts:
        for family in part:
            heads.setdefault(family.name, family)
            rows = values.setdefault(family.name, {})
            for name, labels, value in family.samples:
                rows.setdefault((name, labels), []).append(value)
    return [Family(name, head.text, head.kind, _rows(head, values[name])) for name, head in heads.items()]


def _rows(head: Family, rows: Mapping[tuple[str, tuple[tuple[str, str], ...]], list[float]]) -> list[Sample]:
    together = sum if head.kind in COUNTED else GAUGES.get(head.name, sum)
    return [(name, labels, float(together(found))) for (name, labels), found in rows.items()]


def outliving(families: Iterable[Family]) -> list[Family]:
    """What stays of a worker that is gone."""
    return [family for family in families if family.kind in COUNTED]


def for_endpoints(families: Iterable[Family], known: Collection[str]) -> list[Family]:
    """Without rows of endpoints that are not `known`."""
    return [
        Family(
            family.name,
            family.text,
            family.kind,
            [sample for sample in family.samples if all(label != "endpoint" or value in known for label, value in sample[1])],
        )
        for family in families
    ]


def text_of(families: Iterable[Family]) -> bytes:
    """Prometheus' format."""
    from prometheus_client import CollectorRegistry, generate_latest  # costs 60 ms to import: only where it is asked for
    from prometheus_client.core import Metric
    from prometheus_client.registry import Collector

    metrics = []
    for family in families:
        metric = Metric(family.name, family.text, family.kind)
        for name, labels, value in family.samples:
            metric.add_sample(name, dict(labels), value)
        metrics.append(metric)

    class _Summed(Collector):
        def collect(self) -> Iterable[Metric]:
            return metrics

    registry = CollectorRegistry()
    registry.register(_Summed())
    return bytes(generate_latest(registry))
