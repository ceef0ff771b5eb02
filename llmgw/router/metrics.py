"""What the router counts, as plain integers, and how /metrics shows it. Counting is cheap; rendering is done when asked.

Label values come only from the routing table and the policy: a client's invented model name never becomes one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import attrs

from llmgw.domain.ids import EndpointId
from llmgw.router.engine_load import EngineLoad
from llmgw.router.usage import Tokens

if TYPE_CHECKING:
    from prometheus_client.core import Metric

METRICS_HEADERS: Final = [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")]  # of the answer that holds them
# What we add ourselves is far below what an engine takes.
OVERHEAD_BUCKETS: Final[tuple[float, ...]] = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
)
SECONDS_BUCKETS: Final[tuple[float, ...]] = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Histogram:
    """Counts per bucket, and the sum. `bounds` are the buckets' upper ends in seconds."""

    __slots__ = ("bounds", "counts", "sum_s")

    def __init__(self, bounds: tuple[float, ...] = SECONDS_BUCKETS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum_s += seconds

    def cumulative(self) -> list[tuple[str, float]]:
        rows, total = [], 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            rows.append(("+Inf" if bound == float("inf") else repr(bound), float(total)))
        return rows


class Metrics:
    """The router's counters since it started."""

    def __init__(self) -> None:
        self.requests: dict[tuple[str, int], int] = {}
        self.request_seconds: dict[str, Histogram] = {}
        self.ttft_seconds: dict[str, Histogram] = {}
        self.itl_seconds: dict[str, Histogram] = {}
        self.queue_seconds: dict[str, Histogram] = {}
        self.overhead_seconds: dict[str, Histogram] = {}
        self.retries = 0
        self.hang_ups = 0
        self.streams_broken = 0
        self.surplus = 0  # engine connections dropped for bytes beyond an answer's end
        self.log_dropped = 0  # as the log's writer has counted them
        self.guard_hits: dict[tuple[str, str], int] = {}  # by rule and action
        self.tokens: dict[str, list[int]] = {}  # prompt, cached and completion by model, in the engines' words
        self.usage_unknown: dict[str, int] = {}  # by model: answers without such a word

    def used(self, model: str, tokens: Tokens | None, *, unknown: bool) -> None:
        """One answer that a client got."""
        if tokens is not None:
            sums = self.tokens.get(model)
            if sums is None:
                sums = self.tokens[model] = [0, 0, 0]
            sums[0] += tokens.prompt
            sums[1] += tokens.cached
            sums[2] += tokens.completion
        if unknown:
            self.usage_unknown[model] = self.usage_unknown.get(model, 0) + 1

    def hit(self, rule: str, action: str) -> None:
        self.guard_hits[rule, action] = self.guard_hits.get((rule, action), 0) + 1

    def itl(self, model: str) -> Histogram:
        """Where a stream of the model counts its gaps."""
        histogram = self.itl_seconds.get(model)
        if histogram is None:
            histogram = self.itl_seconds[model] = Histogram()
        return histogram

    def asked(self, model: str, overhead_s: float) -> None:
        """A request has gone to an engine, after so long in our own hands."""
        histogram = self.overhead_seconds.get(model)
        if histogram is None:
            histogram = self.overhead_seconds[model] = Histogram(OVERHEAD_BUCKETS)
        histogram.add(overhead_s)

    def waited(self, model: str, seconds: float) -> None:
        """A request has stopped waiting for a place, for whatever reason."""
        histogram = self.queue_seconds.get(model)
        if histogram is None:
            histogram = self.queue_seconds[model] = Histogram()
        histogram.add(seconds)

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
    """One endpoint's row. `polled`: its engine is asked for its load; `load` is what it told, None where that is not known now."""

    __slots__ = ("failures", "health", "in_flight", "load", "polled", "requests", "resting")

    def __init__(
        self, in_flight: int, health: int, requests: int, failures: int, resting: bool, polled: bool = False, load: EngineLoad | None = None
    ) -> None:
        self.in_flight = in_flight
        self.health = health
        self.requests = requests
        self.failures = failures
        self.resting = resting
        self.polled = polled
        self.load = load


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


def counted(
    metrics: Metrics,
    endpoints: Mapping[EndpointId, EndpointFigures],
    connections: int,
    generation: int,
    waiting: Mapping[str, int] = MappingProxyType({}),
) -> list[Metric]:
    """What one worker has counted, and what it sees now. `waiting`: by model."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily  # 60 ms: only where it is asked for

    families: list[Metric] = []
    requests = CounterMetricFamily("llmgw_requests", "Requests answered, by status; 499: the client hung up.", labels=["model", "status"])
    for (model, status), count in metrics.requests.items():
        requests.add_metric([model, str(status)], count)
    families.append(requests)
    for name, text, table in (
        ("llmgw_request_seconds", "Seconds from a request's head to the end of its answer.", metrics.request_seconds),
        ("llmgw_ttft_seconds", "Seconds until the first content of an answer.", metrics.ttft_seconds),
        (
            "llmgw_itl_seconds",
            "Seconds between two pieces of a stream, each of one token or of several.",
            metrics.itl_seconds,
        ),
        (
            "llmgw_router_overhead_seconds",
            "Seconds that a request was in the router's own hands before it went to an engine, its wait for a place apart.",
            metrics.overhead_seconds,
        ),
        ("llmgw_queue_seconds", "Seconds that requests waited for a place, whatever came of them.", metrics.queue_seconds),
    ):
        histograms = HistogramMetricFamily(name, text, labels=["model"])
        for model, histogram in table.items():
            histograms.add_metric([model], histogram.cumulative(), histogram.sum_s)
        families.append(histograms)
    queue = GaugeMetricFamily("llmgw_queue", "Requests that wait for a place at an endpoint of the model.", labels=["model"])
    for model, count in waiting.items():
        queue.add_metric([model], count)
    families.append(queue)
    inflight = GaugeMetricFamily("llmgw_inflight", "Requests that an endpoint works on now.", labels=["endpoint"])
    breaker = GaugeMetricFamily("llmgw_breaker_state", "0: in use, 1: a trial is due or running, 2: out.", labels=["endpoint"])
    resting = GaugeMetricFamily("llmgw_endpoint_resting", "1 while an endpoint rests after a 429.", labels=["endpoint"])
    sent = CounterMetricFamily("llmgw_endpoint_requests", "Requests sent to an endpoint.", labels=["endpoint"])
    failed = CounterMetricFamily("llmgw_endpoint_failures", "Requests that failed at an endpoint.", labels=["endpoint"])
    known = GaugeMetricFamily("llmgw_endpoint_load_known", "1 while the load that an engine told is fresh.", labels=["endpoint"])
    running = GaugeMetricFamily("llmgw_endpoint_running", "Requests an engine works on, as it says itself.", labels=["endpoint"])
    queued = GaugeMetricFamily("llmgw_endpoint_waiting", "Requests that wait inside an engine, as it says itself.", labels=["endpoint"])
    for endpoint, figures in sorted(endpoints.items()):
        if figures.polled:
            known.add_metric([endpoint], float(figures.load is not None))
        if figures.load is not None:
            running.add_metric([endpoint], figures.load.running)
            queued.add_metric([endpoint], figures.load.waiting)
        inflight.add_metric([endpoint], figures.in_flight)
        breaker.add_metric([endpoint], figures.health)
        resting.add_metric([endpoint], float(figures.resting))
        sent.add_metric([endpoint], figures.requests)
        failed.add_metric([endpoint], figures.failures)
    families += [inflight, breaker, resting, sent, failed, known, running, queued]
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

    tokens = CounterMetricFamily(
        "llmgw_tokens",
        "Tokens of answers as engines counted them: prompt (cached ones among them), cached, completion.",
        labels=["kind", "model"],
    )
    for model, sums in metrics.tokens.items():
        for kind, number in zip(("prompt", "cached", "completion"), sums, strict=True):
            tokens.add_metric([kind, model], number)
    unknown = CounterMetricFamily("llmgw_usage_unknown", "Answers whose engine did not say how many tokens they took.", labels=["model"])
    for model, count in metrics.usage_unknown.items():
        unknown.add_metric([model], count)
    families += [tokens, unknown]
    return families


def accounted(lost: int) -> list[Metric]:
    """What a router says that accounts to a control plane."""
    from prometheus_client.core import CounterMetricFamily

    text = "Requests that are in no usage report, because too much waited to be stored."
    return [CounterMetricFamily("llmgw_usage_lost", text, value=lost)]


def followed(following: Following) -> list[Metric]:
    """What a router says of those that it follows."""
    from prometheus_client.core import GaugeMetricFamily

    sessions = GaugeMetricFamily("llmgw_router_session", "1 while a session with this control plane is open.", labels=["control_plane"])
    leaders = GaugeMetricFamily("llmgw_router_leader", "1 for the control plane that last spoke as leader.", labels=["control_plane"])
    for url, is_open in following.sessions.items():
        sessions.add_metric([url], float(is_open))
        leaders.add_metric([url], float(url == following.leader))
    families: list[Metric] = [sessions, leaders]
    for gauge, text, value in (
        ("llmgw_router_epoch", "The highest epoch met; a list of a lower one is refused.", float(following.epoch)),
        ("llmgw_router_leader_silent_seconds", "Seconds since a leader was heard.", following.leader_silent_s),
        ("llmgw_router_list_age_seconds", "Seconds since the list acted on came, or its sender confirmed it.", following.list_age_s),
        ("llmgw_router_by_standby", "1 while the leader is silent and the list is as a standby sees it.", float(following.by_standby)),
    ):
        families.append(GaugeMetricFamily(gauge, text, value=value))
    return families


def staffed(serving: int, restarts: int) -> list[Metric]:
    """What the parent of several workers says of them."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    return [
        GaugeMetricFamily("llmgw_workers", "Worker processes that serve now; only with several.", value=serving),
        CounterMetricFamily("llmgw_worker_restarts", "Workers that died and were started again; only with several.", value=restarts),
    ]
