"""One real S3 server for all tests of a module that ask for it; each takes a prefix of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.seaweed import Seaweed, seaweed


@pytest.fixture(scope="module")
def seaweed_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    with seaweed(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The object store's client asks a proxy of the environment, as it should; not for these servers."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
