"""The lock files pin everything with hashes, and hold nothing of the machine that wrote them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent.parent
LOCKS = {"requirements-base.lock": (), "requirements.lock": ("build", "demo"), "requirements-dev.lock": ("build", "demo", "dev")}


def pins(name: str) -> dict[str, str]:
    text = "\n".join(line for line in (ROOT / name).read_text(encoding="utf-8").split("\n") if not line.startswith("#"))
    found = {}
    for entry in text.replace("\\\n", " ").split("\n"):
        if not entry.strip():
            continue
        match = re.fullmatch(r'([A-Za-z0-9._-]+)==([^ ;]+)(?: ?; platform_machine == "x86_64")?(( +--hash=sha256:[0-9a-f]{64})+) *', entry)
        assert match, entry
        found[canonicalize_name(match.group(1))] = match.group(2)
    return found


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_holds_pins_with_hashes_and_no_address(name: str):
    assert pins(name)
    text = (ROOT / name).read_text(encoding="utf-8")
    assert not re.search(r"://|file:|--index-url|--find-links|--extra-index|--trusted-host", text)


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_holds_every_dependency_above_its_floor(name: str):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *(line for extra in LOCKS[name] for line in project["optional-dependencies"][extra])]
    found = pins(name)
    for requirement in map(Requirement, wanted):
        assert requirement.specifier.contains(found[canonicalize_name(requirement.name)]), requirement


def test_the_locks_agree():
    base, demo, whole = (pins(name) for name in LOCKS)
    assert base.items() <= demo.items() <= whole.items()


def test_what_is_shipped_holds_no_tools():
    assert not pins("requirements-base.lock").keys() & {"setuptools", "wheel", "pip", "shiv", "pytest", "xllamacpp"}
