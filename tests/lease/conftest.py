"""One real S3 server for all tests of a module that ask for it; each takes a prefix of its own."""

from __future__ import annotations

import pytest

from tests.seaweed import no_proxy, seaweed_server

__all__ = ["no_proxy", "seaweed_server"]  # fixtures


@pytest.fixture(autouse=True)
def without_proxy(no_proxy: None) -> None:
    """For every test here."""
