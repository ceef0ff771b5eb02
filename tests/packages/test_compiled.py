"""The compiled data plane: what of it the packages hold, and what is said where it cannot be built (docs/decisions/0012)."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from llmgw import __version__
from tests.packages.conftest import DIST, compiled_parts
from tests.programs import skip

REPOSITORY = DIST.parent
BUILDER = REPOSITORY / "packaging" / "compiled.py"
CANNOT = 3
HELPS = "apt install gcc libc6-dev"


@pytest.fixture(scope="module")
def compiled() -> Path:
    """What was built for the packages. Skips where the builder lacks a compiler; fails where nothing was to be missing."""
    done = subprocess.run([sys.executable, BUILDER], capture_output=True, text=True, timeout=600, check=False)
    if done.returncode == CANNOT:
        skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    return REPOSITORY / "build" / "compiled"


def libraries(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.so")}


def told_version(pyz: Path, folder: Path) -> list[str]:
    environment = {"SHIV_ROOT": str(folder)}
    command = [sys.executable, "-I", "-S", pyz, "version"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=environment).stdout.splitlines()


def test_the_same_sources_compile_to_the_same_bytes_and_name_no_folder_of_the_builder(compiled: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, BUILDER, tmp_path / "again"], check=True, timeout=600, stdout=subprocess.DEVNULL)
    built = libraries(compiled)
    assert built
    assert libraries(tmp_path / "again") == built
    for name, content in built.items():
        assert str(REPOSITORY).encode() not in content, name
        assert sys.base_prefix.encode() + b"/" not in content, name


def test_the_zipapp_holds_it_beside_the_modules_it_is_made_of(compiled: Path, pyz: Path, tmp_path: Path) -> None:
    parts = compiled_parts(pyz)
    assert {name.removeprefix("site-packages/") for name in parts} == set(libraries(compiled))
    with zipfile.ZipFile(pyz) as archive:
        names = set(archive.namelist())
    modules = {name.partition(".")[0] + ".py" for name in parts if "__mypyc" not in name}
    assert modules
    assert not modules - names
    assert told_version(pyz, tmp_path) == [f"llmgw {__version__}", "data plane: compiled"]


def test_a_builder_without_a_compiler_says_so_in_one_line_and_makes_the_same_product(tmp_path: Path) -> None:
    environment = {**os.environ, "CC": "no-such-compiler"}
    alone = subprocess.run([sys.executable, BUILDER, tmp_path / "none"], capture_output=True, text=True, check=False, env=environment)
    (line,) = alone.stderr.splitlines()
    assert (alone.returncode, alone.stdout) == (CANNOT, "")
    assert line.startswith("the data plane cannot be compiled: no C compiler (no-such-compiler)")
    assert HELPS in line

    pyz = tmp_path / "plain.pyz"
    command = [sys.executable, "packaging/pyz.py", pyz]
    made = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=True, env=environment)
    (line,) = [line for line in made.stderr.splitlines() if "data plane" in line]
    assert line.startswith("the package runs its data plane interpreted, which is slower: no C compiler")
    assert compiled_parts(pyz) == set()
    assert told_version(pyz, tmp_path / "unpacked") == [f"llmgw {__version__}", "data plane: interpreted"]
