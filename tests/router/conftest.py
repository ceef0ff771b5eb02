"""The stage of most tests: made once per module, its engines set anew for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.router.fakes import CHAT, CHAT2, OK, Stage, post, until


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The cases of cases.md that a test is for stand in its id, so that `-k B074` runs them."""
    cases = [case for mark in metafunc.definition.iter_markers("case") for case in mark.args]
    if cases:
        metafunc.fixturenames.append("case")
        metafunc.parametrize("case", [None], ids=["+".join(cases)])


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
    # A test before may have left an endpoint out of use: it comes back by its one trial.
    until(lambda: _module_stage.router.ask(post(CHAT)).status == 200, "the first engine is in use")
    until(lambda: _both_in_use(_module_stage), "the second engine is in use")
    for engine in (_module_stage.u1, _module_stage.u2):
        engine.log.clear()
    return _module_stage


def _both_in_use(stage: Stage) -> bool:
    if stage.router.metric_of("llmgw_breaker_state", 'endpoint="u2"') == 0:
        return True
    stage.router.ask(post(CHAT2))  # the trial, once it is due
    return False
