"""One real S3 server for all tests of a module; each test takes a prefix of its own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmgw.domain.errors import Invalid
from llmgw.replication.programs import Found, find
from llmgw.settings.object_place import ObjectPlace
from llmgw.wiring.machine import RealMachine
from tests.lease.places import seaweed_place
from tests.programs import skip
from tests.seaweed import Seaweed, seaweed


@pytest.fixture(scope="module")
def seaweed_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    with seaweed(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both clients ask a proxy of the environment, as they should; not for these servers."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")


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
