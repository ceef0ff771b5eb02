"""Every field case that concerns the router has a test that names it, or a reason."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator

import tests.router
from tests.router.case_ids import ALL, OTHERS, WITHOUT_TEST


def _named() -> Iterator[tuple[str, str]]:
    """(case, test) of every mark in tests/router."""
    for found in pkgutil.walk_packages(tests.router.__path__, "tests.router."):
        module = importlib.import_module(found.name)
        for name, test in inspect.getmembers(module, inspect.isfunction):
            if name.startswith("test_") and test.__module__ == found.name:
                for mark in getattr(test, "pytestmark", ()):
                    if mark.name == "case":
                        yield from ((case, f"{found.name}.{name}") for case in mark.args)


def test_every_case_of_the_router_is_tested_or_has_a_reason_why_not() -> None:
    named = {case for case, _ in _named()}
    assert ALL - named == set(WITHOUT_TEST)
    assert all(WITHOUT_TEST.values())


def test_no_test_names_a_case_that_nobody_knows() -> None:
    assert {test for case, test in _named() if case not in ALL | OTHERS} == set()
