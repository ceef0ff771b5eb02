"""A stage whose first engine may fail as often and as fast as a table has rows, and is always asked before the second."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.router.fakes import OK, Stage, staged

PREFERRED = {'id = "u2"': 'id = "u2"\npriority = 5'}
NEVER_BENCHED = "breaker_failures = 100\nretry_budget = 1.0"


@pytest.fixture(scope="module")
def _steady_stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with staged(tmp_path_factory.mktemp("steady"), route=NEVER_BENCHED, change=PREFERRED) as stage:
        yield stage


@pytest.fixture
def steady(_steady_stage: Stage) -> Stage:
    for engine in (_steady_stage.u1, _steady_stage.u2):
        engine.script = [OK]
        engine.once = []
        engine.log.clear()
    return _steady_stage
