"""The files of a machine that is being set up: written whole or not at all, and owned by the service that will read them."""

from __future__ import annotations

import contextlib
import itertools
import os
import pwd
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from llmgw.domain.errors import Conflict
from llmgw.domain.files import unusable
from llmgw.settings.load import Loaded, load_bytes, load_file
from llmgw.wiring.dialling import identity_folder
from llmgw.wiring.identity_files import CA_FOLDER, JOINED_FILE

ADMIN_TOKEN_FILE: Final = "admin-token"  # as `wiring.server` has it
FILE_MODE: Final = 0o644  # a settings file holds no secret
SECRET_MODE: Final = 0o600
FOLDER_MODE: Final = 0o700
SERVICE_USER: Final = "llmgw"  # of the package's units
KEPT_AS: Final = ".before-join"


def read_file(config: Path) -> tuple[str | None, Loaded]:
    """(the text, None where there is no file; what it says). Raises Invalid."""
    if not config.exists():
        return None, load_bytes(b"", source=str(config))
    loaded = load_file(config)
    return config.read_text(encoding="utf-8"), loaded


def write_new(path: Path, text: str, *, replace: bool = False, mode: int = FILE_MODE, what: str = "the settings file") -> None:
    """Whole or not at all. Raises Conflict where it is there and not to be replaced, and what `unusable` makes of the rest."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            if replace:
                os.replace(temporary, path)
            else:
                os.link(temporary, path)  # fails where there is one
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
    except FileExistsError as err:
        raise Conflict(f"{path} is there already and is left as it is", code="file_exists") from err
    except OSError as err:
        raise unusable(err, what, path) from err


def amend(config: Path, before: str | None, after: str) -> list[str]:
    """The settings file with `after` in it, its text of `before` kept beside it. What was done, in lines."""
    if before is None:
        write_new(config, after)
        return [f"wrote {config}"]
    if after == before:
        return []
    kept = _keep(config, before)
    write_new(config, after, replace=True)
    return [f"amended {config}; as it was: {kept}"]


def _keep(config: Path, text: str) -> Path:
    """A copy of what a file said; those of earlier times stay."""
    for number in itertools.count(1):
        kept = config.with_name(config.name + KEPT_AS + (f".{number}" if number > 1 else ""))
        if not kept.exists():
            write_new(kept, text)
            return kept
        if kept.is_file() and kept.read_text(encoding="utf-8", errors="replace") == text:
            return kept
    raise AssertionError("there is a number that is free")


def check_writable(folder: Path, what: str) -> None:
    """Can files be made there, or in what it would be made in? Raises Invalid, Unavailable."""
    there = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())
    trial = there / f".llmgw-trial.{os.getpid()}"
    try:
        os.close(os.open(trial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        os.unlink(trial)
    except OSError as err:
        raise unusable(err, what, folder) from err


def make_folder(folder: Path) -> None:
    """Raises Invalid, Unavailable."""
    try:
        folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    except OSError as err:
        raise unusable(err, "the data directory", folder) from err


@contextlib.contextmanager
def given_to_service(folder: Path, ca: Path | None = None) -> Iterator[None]:
    """What root makes in `folder`, and in that of the CA, belongs to whoever owns it, or to the package's user where it is made now."""
    owner: tuple[int, int] | None = None
    if os.geteuid() == 0:
        if folder.exists():
            found = folder.stat()
            owner = (found.st_uid, found.st_gid)
        else:
            with contextlib.suppress(KeyError):
                user = pwd.getpwnam(SERVICE_USER)
                owner = (user.pw_uid, user.pw_gid)
    try:
        yield
    finally:
        _give(folder, ca, owner)


def _give(folder: Path, ca: Path | None, owner: tuple[int, int] | None) -> None:
    if owner is not None and owner[0] != 0 and folder.exists():
        made = [folder, folder / ADMIN_TOKEN_FILE, folder / JOINED_FILE]
        for inner in (identity_folder(folder), folder / CA_FOLDER, *([ca] if ca is not None else [])):
            made += [inner, *inner.glob("*")]
        for path in made:
            if path.exists():
                os.chown(path, *owner, follow_symlinks=False)
