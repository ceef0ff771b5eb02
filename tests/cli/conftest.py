"""Runs the command line in this process, with its output caught."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import pytest

from llmgw.cli.main import main
from tests.cli.fake_api import TOKEN, FakeApi, fake_api


@attrs.frozen
class Ran:
    code: int
    out: str
    err: str


Run = Callable[..., Ran]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of the test's own: no file of the machine's user is looked at."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_CONFIG_HOME", "XDG_STATE_HOME", "LLMGW_TOKEN", "LLMGW_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def run(home: Path, capfd: pytest.CaptureFixture[str]) -> Run:
    def run_main(*args: str) -> Ran:
        code = main(args)
        out, err = capfd.readouterr()
        return Ran(code, out, err)

    return run_main


@pytest.fixture
def api() -> Iterator[FakeApi]:
    with fake_api() as found:
        yield found


@pytest.fixture
def ctl(run: Run, api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`llmgw ctl …` against `api`, with its token."""
    monkeypatch.setenv("LLMGW_TOKEN", TOKEN)
    return lambda *args: run("ctl", "--server", api.url, *args)
