"""Writes docs/reference/metrics.md from what the roles really render; a test holds the page against it.

`python -m llmgw.wiring.metrics_page [FILE]`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import trio
from prometheus_client.parser import text_string_to_metric_families

from llmgw.admin.metrics import Metrics as AdminMetrics
from llmgw.control.controller import Controller, Objects
from llmgw.control.leadership import Candidacy
from llmgw.control.settings_in_force import SettingsInForce
from llmgw.domain.ids import ClusterId, EndpointId, OwnerId
from llmgw.domain.model import Catalog, ModelSpec, Profile
from llmgw.router.engine_load import EngineLoad
from llmgw.router.metrics import EndpointFigures, Following, accounted, counted, followed, staffed
from llmgw.router.metrics import Metrics as RouterMetrics
from llmgw.router.metrics_sum import plain, text_of
from llmgw.router.usage import Tokens
from llmgw.settings.load import Loaded
from llmgw.settings.schema import Settings
from llmgw.sim.machine import SimMachine
from llmgw.store.connection import MEMORY, FileStore

PAGE: Final = Path("docs/reference/metrics.md")
HEAD: Final = """# Metrics

Generated from what the roles render; do not edit. `GET /metrics` in Prometheus' text format: on the router's port what the router
counts, on the admin port what the control plane knows. Open on loopback; elsewhere it asks for the token of `[metrics] token`. Label
values come from the catalog and the settings: no user, key or invented model name becomes one.
"""


def page() -> str:
    """The page's text."""
    return f"{HEAD}\n## Router\n\n{_table(_router_text())}\n\n## Control plane\n\n{_table(trio.run(_admin_text))}\n"


def _table(text: str) -> str:
    lines = ["| metric | type | labels | what |", "|---|---|---|---|"]
    for family in text_string_to_metric_families(text):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = sorted({label for sample in family.samples for label in sample.labels} - {"le"})
        lines.append(f"| `{name}` | {family.type} | {', '.join(f'`{label}`' for label in labels) or '—'} | {family.documentation} |")
    return "\n".join(_without_created(lines))


def _without_created(lines: Iterable[str]) -> list[str]:
    return [line for line in lines if "_created`" not in line]


def _router_text() -> str:
    metrics = RouterMetrics()
    metrics.finished("model", 200, 0.1, 0.05)
    metrics.hit("rule", "block")
    metrics.used("model", Tokens(1, 0, 1), unknown=True)
    following = Following({"http://127.0.0.1:8081": True}, "", 0, 0.0, 0.0, False)
    metrics.waited("model", 0.1)
    metrics.asked("model", 0.001)
    metrics.itl("model").add(0.1)
    endpoint = EndpointFigures(0, 0, 0, 0, False, polled=True, load=EngineLoad(0, 0, 0, 0.0))
    counts = counted(metrics, {EndpointId("endpoint"): endpoint}, 0, 0, {"model": 0})
    return text_of(plain([*counts, *followed(following), *accounted(0), *staffed(0, 0)])).decode()


async def _admin_text() -> str:
    machine = SimMachine(1)
    store = await FileStore.open(MEMORY, machine.run_sync)
    model = ModelSpec("model", (Profile("p", "command", command=("x",), gpus=0),))
    controller = Controller(
        machine,
        store,
        SettingsInForce(Loaded(Settings())),
        Objects(Catalog((model,))),
        candidacy=Candidacy.sole(ClusterId("c"), OwnerId("o"), Path("/")),
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(controller.run)
        metrics = AdminMetrics(controller)
        metrics.count("GET", "/api/v1/status", 200)
        text = metrics.text()
        nursery.cancel_scope.cancel()
    store.close()
    return text


if __name__ == "__main__":
    (Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE).write_text(page(), encoding="utf-8")
