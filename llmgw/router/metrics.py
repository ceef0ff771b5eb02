"""What the router counts, as plain integers, and how /metrics shows it. Counting is cheap; rendering is done when asked.

Label values come only from the routing table and the policy: a client's invented model name never becomes one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Final

import attrs

from llmgw.domain.ids import EndpointId

SECONDS_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Histogram:
    """Counts per bucket, and the sum."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(SECONDS_BUCKETS) + 1)
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(SECONDS_BUCKETS, seconds)] += 1
        self.sum_s += seconds

    def cumulative(self) -> list[tuple[str, float]]:
        rows, total = [], 0
        for bound, count in zip((*SECONDS_BUCKETS, float("inf")), self.counts, strict=True):
            total += count
            rows.append(("+Inf" if bound == float("inf") else repr(bound), float(total)))
        return rows


class Metrics:
    """The router's counters since it started."""

    def __init__(self) -> None:
        self.requests: dict[tuple[str, int], int] = {}
        self.request_seconds: dict[str, Histogram] = {}
        self.ttft_seconds: dict[str, Histogram] = {}
        self.retries = 0
        self.hang_ups = 0
        self.streams_broken = 0
        self.surplus = 0  # engine connections dropped for bytes beyond an answer's end
        self.log_dropped = 0
        self.guard_hits: dict[tuple[str, str], int] = {}  # by rule and action

    def hit(self, rule: str, action: str) -> None:
        self.guard_hits[rule, action] = self.guard_hits.get((rule, action), 0) + 1

    def finished(self, model: str, status: int, total_s: float, ttft_s: float | None) -> None:
        pair = (model, status)
        self.requests[pair] = self.requests.get(pair, 0) + 1
        if not model:
            return
        histogram = self.request_seconds.get(model)
        if histogram is None:
            histogram = self.request_seconds[model] = Histogram()
        histogram.add(total_s)
        if ttft_s is not None:
            first = self.ttft_seconds.get(model)
            if first is None:
                first = self.ttft_seconds[model] = Histogram()
            first.add(ttft_s)


class EndpointFigures:
    """One endpoint's row."""

    __slots__ = ("failures", "health", "in_flight", "requests", "resting")

    def __init__(self, in_flight: int, health: int, requests: int, failures: int, resting: bool) -> None:
        self.in_flight = in_flight
        self.health = health
        self.requests = requests
        self.failures = failures
        self.resting = resting


@attrs.frozen
class Following:
    """What a router that follows control planes says of that. `sessions`: is one open with each control plane?

    `leader` is the control plane that last spoke as a leader, "" before any did. Ages count from the start of the process at most.
    """

    sessions: Mapping[str, bool]
    leader: str
    epoch: int
    leader_silent_s: float
    list_age_s: float
    by_standby: bool


def render(
    metrics: Metrics,
    endpoints: Mapping[EndpointId, EndpointFigures],
    connections: int,
    generation: int,
    following: Following | None = None,
) -> bytes:
    """The text of /metrics in Prometheus' format. `following` is None for a router that follows nobody."""
    from prometheus_client import CollectorRegistry, generate_latest  # costs 60 ms to import: only where it is asked for
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
    from prometheus_client.registry import Collector

    families: list[Metric] = []
    requests = CounterMetricFamily("llmgw_requests", "Requests answered, by status; 499: the client hung up.", labels=["model", "status"])
    for (model, status), count in metrics.requests.items():
        requests.add_metric([model, str(status)], count)
    families.append(requests)
    for name, text, table in (
        ("llmgw_request_seconds", "Seconds from a request's head to the end of its answer.", metrics.request_seconds),
        ("llmgw_ttft_seconds", "Seconds until the first content of an answer.", metrics.ttft_seconds),
    ):
        histograms = HistogramMetricFamily(name, text, labels=["model"])
        for model, histogram in table.items():
            histograms.add_metric([model], histogram.cumulative(), histogram.sum_s)
        families.append(histograms)
    inflight = GaugeMetricFamily("llmgw_inflight", "Requests that an endpoint works on now.", labels=["endpoint"])
    breaker = GaugeMetricFamily("llmgw_breaker_state", "0: in use, 1: a trial is due or running, 2: out.", labels=["endpoint"])
    resting = GaugeMetricFamily("llmgw_endpoint_resting", "1 while an endpoint rests after a 429.", labels=["endpoint"])
    sent = CounterMetricFamily("llmgw_endpoint_requests", "Requests sent to an endpoint.", labels=["endpoint"])
    failed = CounterMetricFamily("llmgw_endpoint_failures", "Requests that failed at an endpoint.", labels=["endpoint"])
    for endpoint, figures in sorted(endpoints.items()):
        inflight.add_metric([endpoint], figures.in_flight)
        breaker.add_metric([endpoint], figures.health)
        resting.add_metric([endpoint], float(figures.resting))
        sent.add_metric([endpoint], figures.requests)
        failed.add_metric([endpoint], figures.failures)
    families += [inflight, breaker, resting, sent, failed]
    families.append(GaugeMetricFamily("llmgw_connections", "Open client connections.", value=connections))
    families.append(GaugeMetricFamily("llmgw_endpoints_generation", "Generation of the endpoint list acted on.", value=generation))
    for counter, text, number in (
        ("llmgw_retries", "Requests tried again at another endpoint.", metrics.retries),
        ("llmgw_client_hang_ups", "Clients that hung up before the end of their answer.", metrics.hang_ups),
        ("llmgw_streams_broken", "Answers that broke after their first content.", metrics.streams_broken),
        ("llmgw_engine_surplus", "Engine connections dropped for bytes beyond an answer's end.", metrics.surplus),
        ("llmgw_log_lines_dropped", "Access-log lines dropped because nobody read them.", metrics.log_dropped),
    ):
        families.append(CounterMetricFamily(counter, text, value=number))

    hits = CounterMetricFamily("llmgw_guard_hits", "Requests in which a guard rule found something.", labels=["rule", "action"])
    for (rule, action), count in metrics.guard_hits.items():
        hits.add_metric([rule, action], count)
    families.append(hits)

    if following is not None:
        sessions = GaugeMetricFamily("llmgw_router_session", "1 while a session with this control plane is open.", labels=["control_plane"])
        leaders = GaugeMetricFamily("llmgw_router_leader", "1 for the control plane that last spoke as leader.", labels=["control_plane"])
        for url, is_open in following.sessions.items():
            sessions.add_metric([url], float(is_open))
            leaders.add_metric([url], float(url == following.leader))
        families += [sessions, leaders]
        for gauge, text, value in (
            ("llmgw_router_epoch", "The highest epoch met; a list of a lower one is refused.", float(following.epoch)),
            ("llmgw_router_leader_silent_seconds", "Seconds since a leader was heard.", following.leader_silent_s),
            ("llmgw_router_list_age_seconds", "Seconds since the list acted on came, or its sender confirmed it.", following.list_age_s),
            ("llmgw_router_by_standby", "1 while the leader is silent and the list is as a standby sees it.", float(following.by_standby)),
        ):
            families.append(GaugeMetricFamily(gauge, text, value=value))

    class _Snapshot(Collector):
        def collect(self) -> Iterable[Metric]:
            return families

    registry = CollectorRegistry()
    registry.register(_Snapshot())
    return bytes(generate_latest(registry))
