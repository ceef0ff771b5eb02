"""One real S3 server for all tests of a module; each test takes a prefix of its own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from llmgw.domain.errors import Invalid
from llmgw.replication.programs import Found, find
from llmgw.settings.object_place import ObjectPlace
from llmgw.wiring.machine import RealMachine
from tests.lease.places import seaweed_place
from tests.programs import skip
from tests.seaweed import Seaweed, no_proxy, seaweed_server

__all__ = ["no_proxy", "seaweed_server"]  # fixtures


@pytest.fixture(autouse=True)
def without_proxy(no_proxy: None) -> None:
    """For every test here."""


@pytest.fixture(scope="session")
def program() -> Found:
    try:
        return find()
    except Invalid as err:
        skip(err.message)


@pytest.fixture
def place(seaweed_server: Seaweed, tmp_path: Path, request: pytest.FixtureRequest) -> ObjectPlace:
    """A prefix that no other test has, with characters that a configuration could take for more than a name."""
    found = seaweed_place(seaweed_server, tmp_path)
    name = re.sub(r"\W+", "-", request.node.name)[:60]
    return ObjectPlace(found.bucket, f"{name}-{tmp_path.name}/a b", found.endpoint, found.region, found.credentials)


@pytest.fixture
async def machine() -> RealMachine:
    return RealMachine()
