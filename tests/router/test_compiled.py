"""What `make test-compiled` runs is compiled: else the tests beside this one would pass as they do without it, and prove nothing."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys

import pytest

from tests.programs import compiled_builder


@pytest.mark.skipif("LLMGW_TESTS_COMPILED" not in os.environ, reason="`make test-compiled` runs it")
def test_every_module_of_the_list_is_compiled_here_and_in_what_tests_start() -> None:
    for name in compiled_builder().MODULES:
        assert str(importlib.import_module(f"llmgw.router.{name}").__file__).endswith(".so"), name
    told = subprocess.run([sys.executable, "-m", "llmgw", "version"], capture_output=True, text=True, timeout=60, check=True).stdout
    assert told.splitlines()[1] == "data plane: compiled"
