"""The stage of most tests: made once per module, its engines set anew for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.router.fakes import OK, Stage


@pytest.fixture(scope="module")
def _module_stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    stage = Stage(tmp_path_factory.mktemp("router"))
    yield stage
    stage.close()


@pytest.fixture
def stage(_module_stage: Stage) -> Stage:
    for engine in (_module_stage.u1, _module_stage.u2):
        engine.script = [OK]
        engine.once = []
        engine.read_body = True
        engine.log.clear()
    return _module_stage
