"""What the tests of our packages need: root, debootstrap, lintian, systemd's checkers, and the packages that `make` built."""

from __future__ import annotations

import os
import shutil
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmgw import __version__
from tests.packages.roots import Root, fresh_root
from tests.programs import skip

DIST = Path(__file__).parent.parent.parent / "dist"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("packages")
            item.add_marker("slow")


def need(*programs: str) -> None:
    """Skips where a program is missing, with the reason; fails where everything was promised to be there."""
    missing = [program for program in programs if shutil.which(program) is None]
    if os.getuid() != 0:
        missing.append("root's rights")
    if missing:
        skip(f"missing here: {', '.join(missing)}")


def compiled_parts(pyz: Path) -> set[str]:
    """The libraries of ours that the zipapp holds: none where its builder had no compiler."""
    with zipfile.ZipFile(pyz) as archive:
        return {name for name in archive.namelist() if name.startswith("site-packages/llmgw/") and name.endswith(".so")}


def version_text(pyz: Path) -> str:
    """What `llmgw version` prints of the zipapp, and of the deb that was made of it."""
    return f"llmgw {__version__}\ndata plane: {'compiled' if compiled_parts(pyz) else 'interpreted'}\n"


@pytest.fixture(scope="session")
def pyz() -> Path:
    path = DIST / "llmgw.pyz"
    assert path.exists(), "run `make test-packages`, which builds the packages first"
    return path


@pytest.fixture(scope="session")
def deb() -> Path:
    found = sorted(DIST.glob("llmgw_*.deb"), key=lambda path: path.stat().st_mtime)
    assert found, "run `make test-packages`, which builds the packages first"
    return found[-1]


@pytest.fixture
def root() -> Iterator[Root]:
    need("debootstrap", "unshare", "nsenter", "chroot", "tar")
    if subprocess.run(["unshare", "--mount", "--pid", "--net", "--fork", "true"], capture_output=True, check=False).returncode:
        skip("this machine lets nobody make name spaces of their own")
    with fresh_root() as one:
        yield one
