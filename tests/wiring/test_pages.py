"""The generated page of metrics is what the roles render."""

from __future__ import annotations

from pathlib import Path

from llmgw.wiring.metrics_page import page

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"


def test_the_page_of_metrics_in_the_repository_is_the_one_that_the_roles_render() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `make reference`"
