"""Tokens that stand in files (0600): made once, read back at each start."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import structlog

from llmgw.domain.errors import Invalid, LlmgwError
from llmgw.domain.files import unusable
from llmgw.domain.ports import Machine

TOKEN_BYTES: Final = 32  # 256 bits (operations.md 4)
TOKEN_LENGTH_MIN: Final = 16  # shorter ones, put there by hand, are refused
REMOVE_IT: Final = "remove it, and a new one is made at the next start"
FOLLOW_S: Final = 1.0
BAD_TOKEN_FILE: Final = "bad_token_file"
log = structlog.get_logger("llmgw.tokens")


def ensure_token(machine: Machine, path: Path, whose: str) -> str:
    """The token in this file, made when there is none. `whose` says what it is for: "the admin token".

    Raises Invalid for one that is unusable and Unavailable for a full disk, naming the file.
    """
    try:
        data = machine.disk.read(path)
        if data is None:
            _make(machine, path)
            data = path.read_bytes()
        if stat.S_IMODE(os.stat(path).st_mode) & 0o077:
            log.warning("a token file can be read by others; its mode is set to 0600", file=str(path))
            os.chmod(path, 0o600)
    except OSError as err:
        raise unusable(err, f"the file of {whose}", path, REMOVE_IT) from err
    return parse_token(data, path, whose, REMOVE_IT)


async def follow_token(machine: Machine, path: Path, taken: Callable[[str], Awaitable[None]]) -> None:
    """Until cancelled: `taken` is told each other token that comes to stand in the file. Whoever may write there is its owner."""
    known = await machine.run_sync(lambda: machine.disk.read(path))
    while True:
        await machine.sleep_until(machine.now_s() + FOLLOW_S)
        try:
            data = await machine.run_sync(lambda: machine.disk.read(path))
            if data is None or data == known:
                continue
            token = parse_token(data, path, "the admin token", REMOVE_IT)
            await taken(token)
        except (OSError, LlmgwError) as err:  # half written, say: looked at again
            log.debug("the file of a token cannot be taken", file=str(path), why=str(err))
        else:
            known = data
            log.info("the admin token of the file is another one, and is valid from now on", file=str(path))


def _make(machine: Machine, path: Path) -> None:
    write_once(machine, path, f"{machine.fresh_hex(TOKEN_BYTES)}\n".encode())


def write_once(machine: Machine, path: Path, data: bytes) -> None:
    """A file (0600) that is there already stays as it is: of two that start at once one makes it, and both read it back. Raises OSError."""
    mine = path.with_name(f".{path.name}.{machine.fresh_hex(TOKEN_BYTES)}")
    machine.disk.write(mine, data)
    try:
        with contextlib.suppress(FileExistsError):
            os.link(mine, path)
    finally:
        os.unlink(mine)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def parse_token(data: bytes, path: Path, whose: str, remedy: str) -> str:
    """The token that a file's bytes hold. Raises Invalid, which says `remedy`."""
    if not data.strip():
        raise Invalid(f"{path} is the file of {whose} and is empty; {remedy}", code=BAD_TOKEN_FILE)
    token = data.decode("ascii", "replace").strip()
    if len(token) < TOKEN_LENGTH_MIN or not token.isprintable() or " " in token or "\ufffd" in token:
        raise Invalid(
            f"{path} is the file of {whose} and does not hold one (a line of at least {TOKEN_LENGTH_MIN} characters); {remedy}",
            code=BAD_TOKEN_FILE,
        )
    return token
