"""The archive that `llmgw backup` writes: a tar of a manifest and its parts, each with its size and SHA-256.

    manifest.json      of which cluster, from when, and what else is in it
    store.db           the store as one file
    llmgw.toml         the machine's settings file
    tokens/NAME        what agents and control planes have for each other; not with `--no-secrets`

Written under another name and given its own once it is whole and on the platter; never over a file that is there. Read only after
every part has been held against the manifest. Knows nothing of what is in a part; reads no clock.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

import attrs

from llmgw.domain.errors import Conflict, Invalid
from llmgw.domain.files import unusable

FORMAT: Final = 1
MANIFEST: Final = "manifest.json"
STORE: Final = "store.db"
SETTINGS: Final = "llmgw.toml"
TOKENS: Final = "tokens/"
MODE: Final = 0o600  # models may carry secrets in their environment, and tokens are secrets
MANIFEST_BYTES_MAX: Final = 1024 * 1024
CONTENT_BYTES_MAX: Final = 16 * 1024 * 1024  # of a part that is read as a whole: a settings file, a token
PIECE: Final = 1024 * 1024
WHAT: Final = "the backup"
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}(?:/[A-Za-z0-9._-]{1,64})?\Z")


@attrs.frozen
class Part:
    name: str
    bytes: int
    sha256: str


@attrs.frozen
class Facts:
    """What a backup says of itself. `at_wall_s` is seconds since 1970 by the clock of the machine that made it.

    `age_s` is how old the rows were by then; None where that is not known: a copy that an earlier process had left.
    """

    cluster_id: str
    epoch: int
    schema: int
    build: str
    mode: str  # of the store: none, file, replicated
    settings_version: int
    settings_sha256: str
    at_wall_s: float
    age_s: float | None = 0.0


@attrs.frozen
class Manifest:
    facts: Facts
    parts: tuple[Part, ...]

    def part(self, name: str) -> Part | None:
        return next((one for one in self.parts if one.name == name), None)


def write_archive(target: Path, facts: Facts, contents: Mapping[str, Path | bytes]) -> Manifest:
    """Blocking. `contents` are files or bytes by the name of their part. Raises Conflict where `target` is there, Invalid, Unavailable."""
    check_target(target)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        manifest = Manifest(facts, tuple(_measured(name, content) for name, content in contents.items()))
        with _removed_on_failure(partial), open(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, MODE), "wb") as file:
            with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
                told = json.dumps(_told(manifest), indent=1).encode() + b"\n"
                tar.addfile(_member(MANIFEST, len(told), facts.at_wall_s), io.BytesIO(told))
                for part in manifest.parts:
                    with _opened(contents[part.name]) as source:
                        tar.addfile(_member(part.name, part.bytes, facts.at_wall_s), source)
            file.flush()
            os.fsync(file.fileno())
            _give_name(partial, target)
        _sync_folder(target.parent)
    except OSError as err:
        raise unusable(err, WHAT, target, "name another file") from err
    return manifest


def check_target(target: Path) -> None:
    """Raises Conflict where something is there already, Invalid where nothing can be."""
    if target.is_symlink() or target.exists():
        raise Conflict(f"{target} is there already; a backup is never written over anything", code="exists")
    if not target.parent.is_dir():
        raise Invalid(f"{target} cannot be written: its folder does not exist; make it", code="unusable_file")


class Archive:
    """An archive whose every part is what its manifest says. Built by `opened`."""

    def __init__(self, path: Path, tar: tarfile.TarFile, manifest: Manifest, members: Mapping[str, tarfile.TarInfo]) -> None:
        self.path = path
        self.manifest = manifest
        self._tar = tar
        self._members = members

    @classmethod
    @contextlib.contextmanager
    def opened(cls, path: Path) -> Iterator[Archive]:
        """Blocking: reads all of it. Raises Invalid for what is no whole archive of ours, and for a file that cannot be read."""
        try:
            file = open(_regular(path), "rb")  # noqa: SIM115 - closed below; what is done with it raises errors of its own
        except OSError as err:
            raise unusable(err, WHAT, path) from err
        with file, contextlib.ExitStack() as held:
            with _translated(path):
                tar = held.enter_context(tarfile.open(fileobj=file, mode="r:"))
                archive = cls(path, tar, *_checked(path, tar))
            yield archive

    def has(self, name: str) -> bool:
        return name in self._members

    def names(self, below: str) -> Sequence[str]:
        """Those of the parts whose names begin so, without it."""
        return sorted(name.removeprefix(below) for name in self._members if name.startswith(below))

    def content(self, name: str) -> bytes:
        """Raises Invalid for one that has changed since, or that is too large."""
        part = self._part(name)
        if part.bytes > CONTENT_BYTES_MAX:
            raise _broken(self.path, f"{name} is {part.bytes} bytes long")
        into = io.BytesIO()
        self._copy(part, into)
        return into.getvalue()

    def extract(self, name: str, into: Path) -> None:
        """As a new file (0600), on the platter. Raises Invalid, Unavailable; nothing is left at `into` then."""
        part = self._part(name)
        try:
            descriptor = os.open(into, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, MODE)
            with _removed_on_failure(into), open(descriptor, "wb") as file:
                self._copy(part, file)
                file.flush()
                os.fsync(file.fileno())
        except OSError as err:
            raise unusable(err, f"the {name} of the backup", into) from err

    def _part(self, name: str) -> Part:
        part = self.manifest.part(name)
        if part is None:
            raise _broken(self.path, f"it holds no {name}")
        return part

    def _copy(self, part: Part, into: IO[bytes]) -> None:
        try:
            found = _read(self._tar, self._members[part.name], into)
        except (tarfile.TarError, EOFError) as err:
            raise _broken(self.path, "it has changed while it was read") from err
        if found != part:
            raise _broken(self.path, f"{part.name} has changed while it was read")


# --- writing


def _measured(name: str, content: Path | bytes) -> Part:
    assert _NAME.match(name), f"{name} is no name of a part"
    digest, size = hashlib.sha256(), 0
    with _opened(content) as source:
        while piece := source.read(PIECE):
            digest.update(piece)
            size += len(piece)
    return Part(name, size, digest.hexdigest())


def _opened(content: Path | bytes) -> IO[bytes]:
    return io.BytesIO(content) if isinstance(content, bytes) else content.open("rb")


def _member(name: str, size: int, at_wall_s: float) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size, member.mode, member.mtime = size, MODE, int(at_wall_s)
    return member


def _told(manifest: Manifest) -> dict[str, Any]:
    parts = {part.name: {"bytes": part.bytes, "sha256": part.sha256} for part in manifest.parts}
    return {"format": FORMAT, **attrs.asdict(manifest.facts), "parts": parts}


def _give_name(partial: Path, target: Path) -> None:
    """Never over a file that has come meanwhile. Raises Conflict, OSError."""
    try:
        os.link(partial, target)
    except FileExistsError:
        raise Conflict(f"{target} is there already; a backup is never written over anything", code="exists") from None
    except OSError:  # a file system without links
        check_target(target)
        os.rename(partial, target)
    else:
        os.unlink(partial)


@contextlib.contextmanager
def _removed_on_failure(file: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:  # re-raised: only the half-written file is taken away
        with contextlib.suppress(OSError):
            file.unlink()
        raise


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- reading


def _regular(path: Path) -> Path:
    """A pipe would be waited for without end. Raises Invalid."""
    if path.exists() and not path.is_file():
        raise Invalid(f"{path} is no file", code="not_a_file")
    return path


@contextlib.contextmanager
def _translated(path: Path) -> Iterator[None]:
    try:
        yield
    except (tarfile.TarError, EOFError) as err:
        raise _broken(path, "it is no tar archive, or is cut") from err
    except OSError as err:
        raise unusable(err, WHAT, path) from err


def _broken(path: Path, why: str) -> Invalid:
    return Invalid(f"{path} is no whole backup of llmgw: {why}; nothing was changed", code="bad_backup")


def _checked(path: Path, tar: tarfile.TarFile) -> tuple[Manifest, dict[str, tarfile.TarInfo]]:
    first = tar.next()
    if first is None or first.name != MANIFEST or not first.isreg() or first.size > MANIFEST_BYTES_MAX:
        raise _broken(path, f"it does not begin with {MANIFEST}")
    into = io.BytesIO()
    _read(tar, first, into)
    manifest = _parsed(path, into.getvalue())
    members: dict[str, tarfile.TarInfo] = {}
    while (member := tar.next()) is not None:
        part = manifest.part(member.name)
        if part is None or not member.isreg() or member.name in members:
            raise _broken(path, f"its manifest does not name {member.name[:100]!r}, or it is there twice")
        members[member.name] = member
        found = _read(tar, member, None)
        if found != part:
            raise _broken(path, f"{member.name} is not what was written: its checksum differs")
    if missing := [part.name for part in manifest.parts if part.name not in members]:
        raise _broken(path, f"{missing[0]} is missing, which its manifest names")
    if STORE not in members:
        raise _broken(path, f"it holds no {STORE}")
    return manifest, members


def _read(tar: tarfile.TarFile, member: tarfile.TarInfo, into: IO[bytes] | None) -> Part:
    """What is there of it, which is kept in `into`."""
    source = tar.extractfile(member)
    assert source is not None, "a regular file"
    digest, size = hashlib.sha256(), 0
    while piece := source.read(PIECE):
        digest.update(piece)
        size += len(piece)
        if into is not None:
            into.write(piece)
    return Part(member.name, size, digest.hexdigest())


def _parsed(path: Path, data: bytes) -> Manifest:
    try:
        value = json.loads(data)
        number = value["format"]
        if type(number) is not int or number < 1:
            raise ValueError("no format")
        if number > FORMAT:
            raise Invalid(f"{path} was made by a newer build (its format is {number}, this build reads up to {FORMAT})", code="bad_backup")
        facts = Facts(**{field.name: value[field.name] for field in attrs.fields(Facts)})
        for field, kinds in _KINDS.items():
            found = getattr(facts, field)
            if type(found) not in kinds:
                raise ValueError(field)
        parts = tuple(_part(name, said) for name, said in value["parts"].items())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as err:
        raise _broken(path, f"its {MANIFEST} cannot be understood") from err
    return Manifest(facts, parts)


_KINDS: Final[Mapping[str, tuple[type, ...]]] = {
    "cluster_id": (str,),
    "epoch": (int,),
    "schema": (int,),
    "build": (str,),
    "mode": (str,),
    "settings_version": (int,),
    "settings_sha256": (str,),
    "at_wall_s": (float, int),
    "age_s": (float, int, type(None)),
}


def _part(name: str, said: Mapping[str, Any]) -> Part:
    if _NAME.match(name) is None or ".." in name or type(said["bytes"]) is not int or type(said["sha256"]) is not str:
        raise ValueError(name)
    return Part(name, said["bytes"], said["sha256"])
