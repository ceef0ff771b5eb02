"""The last line of a role's log."""

from __future__ import annotations

import pytest
import structlog
from structlog.testing import capture_logs

from llmgw.domain.errors import Unavailable
from llmgw.wiring.runs import run_role


def test_a_role_that_has_ended_says_so_last():
    async def main() -> None:
        structlog.get_logger("llmgw").info("stopping")

    with capture_logs() as logs:
        run_role(main)
    assert [entry["event"] for entry in logs] == ["stopping", "stopped"]


def test_one_that_could_not_run_has_its_error_for_a_last_word():
    async def main() -> None:
        raise Unavailable("the disk is full")

    with capture_logs() as logs, pytest.raises(Unavailable):
        run_role(main)
    assert logs == []
