"""Carries scenarios out: every service in turn, round after round, so that what else the machine does falls on all of them alike."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import attrs
import psutil

from benchmarks.measure import median, pss_mib
from benchmarks.router.scenarios import Group, Scenario, Variant
from benchmarks.router.services import Service, running, version
from benchmarks.router.tools import Figures, Missing, engine, load, tree


@attrs.frozen
class Results:
    """Each scenario's figures by service, a round at a time; `absent` says why a service was not measured, `versions` which it was."""

    figures: dict[str, dict[str, list[Figures]]] = attrs.field(factory=dict)
    absent: dict[str, str] = attrs.field(factory=dict)
    versions: dict[str, str] = attrs.field(factory=dict)

    def values(self, scenario: Scenario, name: str, figure: Callable[[Figures], float]) -> list[float]:
        """One figure of a service in each round; empty when it was not measured."""
        return [figure(one) for one in self.figures.get(scenario.name, {}).get(name, ())]

    def median(self, scenario: Scenario, name: str, figure: Callable[[Figures], float]) -> float | None:
        found = self.values(scenario, name, figure)
        return median(found) if found else None

    def ratio(self, scenario: Scenario, name: str, peer: str, figure: Callable[[Figures], float]) -> float | None:
        """The median of each round's ratio: what slows a whole round down stands on both sides of it."""
        if not self._both(scenario, name, peer):
            return None
        pairs = zip(self.values(scenario, name, figure), self.values(scenario, peer, figure), strict=True)
        ratios = [ours / theirs for ours, theirs in pairs if theirs]
        return median(ratios) if ratios else None

    def above(self, scenario: Scenario, name: str, peer: str, figure: Callable[[Figures], float]) -> float | None:
        """The median of each round's difference."""
        if not self._both(scenario, name, peer):
            return None
        pairs = zip(self.values(scenario, name, figure), self.values(scenario, peer, figure), strict=True)
        return median([ours - theirs for ours, theirs in pairs])

    def _both(self, scenario: Scenario, name: str, peer: str) -> bool:
        found = self.figures.get(scenario.name, {})
        return bool(found.get(name)) and bool(found.get(peer))


def cpu_per_request_us(one: Figures) -> float:
    return one.cpu_s * 1e6 / max(1, one.requests)


def cpu_per_chunk_us(one: Figures) -> float:
    return one.cpu_s * 1e6 / max(1, one.chunks)


def requests_per_s(one: Figures) -> float:
    return one.requests / one.seconds


def chunks_per_s(one: Figures) -> float:
    return one.chunks / one.seconds


def measure(group: Group, rounds: int, quick: bool, results: Results) -> None:
    """Runs the group's scenarios and adds their figures to `results`."""
    with tempfile.TemporaryDirectory(prefix="llmgw-bench-") as name, contextlib.ExitStack() as held:
        folder = Path(name)
        one_engine = held.enter_context(
            engine(addresses=max(variant.engines for variant in group.variants), content_type=group.content_type)
        )
        services: list[tuple[Variant, Service]] = []
        for variant in group.variants:
            place, urls = folder / variant.name.replace(" ", "-"), one_engine.urls[: variant.engines]
            try:
                service = held.enter_context(running(variant.service, place, urls, group.body_max, variant.name))
                services.append((variant, service))
                if found_version := version(variant.service):
                    results.versions[variant.service] = found_version
            except (Missing, RuntimeError) as err:
                leave_out(results, variant.name, str(err))
        for scenario in group.scenarios:
            found = results.figures.setdefault(scenario.name, {})
            for number in range(rounds):
                for variant, service in tuple(services):
                    if variant.only and scenario.name not in variant.only:
                        continue
                    try:
                        figures = once(service, scenario, quick)
                    except RuntimeError as err:  # it is out of this scenario, with the rounds that it had, and of those that follow
                        found.pop(service.name, None)
                        services.remove((variant, service))
                        leave_out(results, f"{service.name} from {scenario.name} on", str(err))
                        continue
                    found.setdefault(service.name, []).append(figures)
                    say(f"{scenario.name}, round {number + 1} of {rounds}, {service.name}: {told(figures)}")


def leave_out(results: Results, what: str, why: str) -> None:
    """Notes that something was not measured, and says so at once."""
    results.absent[what] = why.splitlines()[0]  # the rest is for who runs it
    say(f"not measured: {what}: {why}")


def once(service: Service, scenario: Scenario, quick: bool) -> Figures:
    """One run. Raises RuntimeError when the service ended or its processes are no longer those that were counted."""
    if service.process is None:
        return load(service.port, *scenario.load(quick))
    try:
        pids = tree(service.process)
        figures = load(service.port, *scenario.load(quick), pids=pids)
        if tree(service.process) == pids:
            return figures
    except psutil.NoSuchProcess:
        pass
    raise RuntimeError("it ended, or changed its processes, while it was measured")


def told(one: Figures) -> str:
    if one.chunks:
        text = f"{cpu_per_chunk_us(one):.1f} µs CPU a chunk, {chunks_per_s(one):,.0f}/s, delay p99 {one.delay_us.p99 / 1000:.2f} ms"
    else:
        text = f"{cpu_per_request_us(one):.1f} µs CPU a request, {requests_per_s(one):,.0f}/s, p50 {one.latency_us.p50 / 1000:.2f} ms"
    return text + (f", {one.errors} errors, the first: {one.error}" if one.errors else "")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@attrs.frozen
class Memory:
    """Megabytes of a fresh router: idle; with 1,000 streams; after a tenth of `requests`, a third of them aborted, and after all."""

    idle: float
    streams: float
    early: float
    late: float
    requests: int
    errors: int


STREAMS_OPEN = 1000
PARTS = 10
LOOK_S = 0.5


def measure_memory(quick: bool) -> Memory:
    """Proportional set sizes of llmgw's process tree."""
    requests = 100_000 if quick else 1_000_000
    with tempfile.TemporaryDirectory(prefix="llmgw-bench-") as name, fresh(Path(name)) as service:
        idle = tree_pss_mb(service)
        during: list[float] = []
        wrong = load_beside(service, lambda: during.append(tree_pss_mb(service)), "--streams", STREAMS_OPEN, "--warmup", 2, "--seconds", 4)
        sizes = []
        for part in range(PARTS):
            figures = load(service.port, "--connections", 64, "--requests", requests // PARTS, "--abort-every", 3)
            wrong += figures.errors
            sizes.append(tree_pss_mb(service))
            say(f"memory, part {part + 1} of {PARTS}: {sizes[-1]:.1f} MB, {figures.errors} errors {figures.error}")
    return Memory(idle, max(during), sizes[0], sizes[-1], requests, wrong)


@contextlib.contextmanager
def fresh(folder: Path) -> Iterator[Service]:
    """A router by itself before an engine of its own."""
    with engine() as one, running("llmgw", folder / "llmgw", one.urls) as service:
        yield service


def load_beside(service: Service, look: Callable[[], None], *options: str | int) -> int:
    """Errors of a run of the load, while `look` is called every LOOK_S seconds."""
    with ThreadPoolExecutor(1) as pool:
        running_load = pool.submit(load, service.port, *options)
        while not wait([running_load], LOOK_S).done:
            look()
    return running_load.result().errors


def tree_pss_mb(service: Service) -> float:
    """Megabytes of the service's processes. Raises RuntimeError when it has ended."""
    assert service.process is not None
    try:
        return sum(pss_mib(psutil.Process(pid)) for pid in tree(service.process)) * 2**20 / 1e6
    except psutil.NoSuchProcess as err:
        raise RuntimeError("it ended while its memory was measured") from err
