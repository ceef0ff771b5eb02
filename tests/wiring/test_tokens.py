"""Tokens that several control planes share in one file."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from llmgw.domain.errors import Invalid
from llmgw.domain.ports import Machine
from llmgw.wiring.machine import RealDisk
from llmgw.wiring.tokens import ensure_token


class Drawing:
    """A machine with a real disk; `meanwhile` happens when it draws a token."""

    def __init__(self, digit: str, meanwhile: Callable[[], Any] = lambda: None) -> None:
        self.disk = RealDisk()
        self._digit, self._meanwhile = digit, meanwhile

    def fresh_hex(self, count: int) -> str:
        self._meanwhile()
        return self._digit * 2 * count


def drawn(digit: str, path: Path, meanwhile: Callable[[], Any] = lambda: None) -> str:
    return ensure_token(cast(Machine, Drawing(digit, meanwhile)), path, "the agents' token")


def test_a_token_is_made_once_for_its_owner_alone_and_read_back(tmp_path: Path):
    path = tmp_path / "agent-token"
    assert drawn("a", path) == drawn("b", path) == "a" * 64
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [one.name for one in tmp_path.iterdir()] == ["agent-token"]


def test_of_two_that_make_a_token_at_once_both_have_the_one_in_the_file(tmp_path: Path):
    """Each had its own, and agents and control planes with the file's were refused by the other until it was started again."""
    path = tmp_path / "agent-token"
    others: list[str] = []
    mine = drawn("a", path, lambda: others.append(drawn("b", path)) if not others else None)
    assert mine == others[0] == path.read_text().strip()


def test_a_folder_in_its_place_is_an_error_that_names_it(tmp_path: Path):
    (tmp_path / "agent-token").mkdir()
    with pytest.raises(Invalid, match=r"agent-token .* cannot be used"):
        drawn("a", tmp_path / "agent-token")
