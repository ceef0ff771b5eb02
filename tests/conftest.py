"""Prints, after a run, how many seeded schedules it has gone through: a suite that shrank by mistake would look just as green.

And what tests have measured, as a table.
"""

from __future__ import annotations

from collections import Counter

import pytest

SCHEDULES = "schedules of "  # a test notes them: record_property(f"{SCHEDULES}the lease", 20_000)
FIGURE = "figure "  # likewise: record_property(f"{FIGURE}leader killed", "0.2 s")


@pytest.fixture(autouse=True)
def commands_set_up_no_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is run in the tests' own process: loggers keep what they are given, and later tests would capture nothing."""
    monkeypatch.setattr("llmgw.wiring.runs.configure_logs", lambda settings: None)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    counts: Counter[str] = Counter()
    figures: dict[str, str] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", "") == "call":
                for name, value in report.user_properties:
                    if name.startswith(SCHEDULES):
                        counts[name] += value
                    elif name.startswith(FIGURE):
                        figures[name.removeprefix(FIGURE)] = str(value)
    for name, count in sorted(counts.items()):
        terminalreporter.write_line(f"{count:,} {name}")
    width = max(map(len, figures), default=0)
    for name, value in figures.items():
        terminalreporter.write_line(f"{name:{width}}  {value}")
