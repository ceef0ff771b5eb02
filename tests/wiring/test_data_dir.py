"""What stands in a data directory and cannot be used, and a disk that is full: one sentence with the file, what to do, and an exit code."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio

from llmgw.domain.errors import EXIT_INVALID, EXIT_UNAVAILABLE, Invalid, Unavailable
from llmgw.domain.files import words
from llmgw.router.listener import public_tls
from llmgw.settings.load import load_file
from llmgw.wiring.data_dir import claim
from llmgw.wiring.machine import READ_BYTES_MAX, RealDisk, RealMachine
from llmgw.wiring.tokens import ensure_token
from tests.programs import free_port, skip

Prepare = Callable[[Path], object]
END_LIMIT_S = 60.0


def start(role: str, folder: Path, config: Path) -> tuple[int, str]:
    """The exit code and last line of a role that cannot start on this data directory."""
    config.write_text(
        f"""
[server]
data_dir = "{folder}"
admin_listen = "127.0.0.1:{free_port()}"
[store]
[router]
listen = "127.0.0.1:{free_port()}"
[agent]
data_dir = "{folder}"
control_planes = ["http://127.0.0.1:1"]
"""
    )
    args = [role, "--config", str(config)]
    if role == "dev":
        args += ["--no-engine", "--port", "0", "--admin-port", "0", "--data-dir", str(folder)]
    environment = {**os.environ, "XDG_STATE_HOME": str(config.parent / "state")}
    command = [sys.executable, "-m", "llmgw", *args]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=END_LIMIT_S, check=False, env=environment)
    assert "Traceback" not in ended.stderr
    told = [line for line in ended.stderr.splitlines() if line.startswith("llmgw: ")]
    assert len(told) == 1, ended.stderr
    return ended.returncode, told[0].removeprefix("llmgw: ")


def folder_at(name: str) -> Prepare:
    return lambda data_dir: (data_dir / name).mkdir()


def file_at(name: str, data: bytes) -> Prepare:
    return lambda data_dir: (data_dir / name).write_bytes(data)


_FOLDER = "cannot be used: a folder is in its place"


@pytest.mark.parametrize(
    ("role", "name", "prepare", "told"),
    [
        ("server", "epoch", folder_at("epoch"), f"(the file of the last epoch) {_FOLDER}; move it away if the store is still the old one"),
        ("server", "epoch", file_at("epoch", b"junk"), "does not hold the last epoch, a whole number; move it away if the store is"),
        ("server", "epoch", file_at("epoch", b""), "does not hold the last epoch"),
        ("server", "epoch", file_at("epoch", b"9" * 30), "does not hold the last epoch"),
        ("server", "admin-token", folder_at("admin-token"), f"(the file of the admin token) {_FOLDER}; remove it, and a new one is made"),
        ("server", "agent-token", file_at("agent-token", b"\xff"), "the agents' token and does not hold one"),
        ("server", "lock", folder_at("lock"), f") {_FOLDER}; move it away"),
        ("server", "lease.db", folder_at("lease.db"), "lease.db is not a file"),
        ("server", "llmgw.db", file_at("llmgw.db", b"junk" * 2000), "is not a database of llmgw, or is encrypted or damaged; move it away"),
        ("dev", "agent", file_at("agent", b""), "(the data directory) cannot be used: a file is in its place; move it away"),
        ("agent", "fence.json", folder_at("fence.json"), f"highest epoch) {_FOLDER}; if this node is to join anew, move it away"),
        ("agent", "fence.json", file_at("fence.json", b""), "cannot be understood, and without it this agent cannot tell which leader"),
        ("agent", "node-id", folder_at("node-id"), f"(the file of this node's id) {_FOLDER}; move it away to give this node a new one"),
        ("agent", "replicas", file_at("replicas", b""), "(the folder of replicas) cannot be used: a file is in its place; move it away"),
    ],
)
@pytest.mark.slow
def test_what_cannot_be_used_is_named_with_what_helps(tmp_path: Path, role: str, name: str, prepare: Prepare, told: str) -> None:
    data_dir = tmp_path / "data"
    data_dir.mkdir()
    prepare(data_dir)
    code, line = start(role, data_dir, tmp_path / "llmgw.toml")
    assert (code, str(data_dir / name) in line, told in line) == (EXIT_INVALID, True, True), line


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "llmgw-test", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        skip("this user may not mount a small tmpfs")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], capture_output=True, check=True)


def fill(disk: Path, free: int) -> None:
    """All of the disk but `free` bytes."""
    filler = disk / "filler"
    with pytest.raises(OSError, match="No space"), filler.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)
    os.truncate(filler, filler.stat().st_size - free)


@pytest.mark.parametrize(
    ("role", "free", "name"),
    [
        ("server", 0, "lock"),
        ("agent", 0, "lock"),
        ("agent", 4096, "node-id"),
        ("server", 8192, "llmgw.db"),
    ],
)
@pytest.mark.slow
def test_a_full_disk_at_the_start_names_the_file_and_is_unavailable(
    small_disk: Path, tmp_path: Path, role: str, free: int, name: str
) -> None:
    data_dir = small_disk / "data"
    data_dir.mkdir()
    fill(small_disk, free)
    code, line = start(role, data_dir, tmp_path / "llmgw.toml")
    assert code == EXIT_UNAVAILABLE
    assert str(data_dir / name) in line
    assert "the disk is full" in line


def test_a_write_that_fails_names_the_file_that_was_meant(small_disk: Path) -> None:
    fill(small_disk, 0)
    with pytest.raises(OSError, match="No space") as full:
        RealDisk().write(small_disk / "state.json", b"x" * 100)
    (small_disk / "folder").mkdir()
    (small_disk / "filler").unlink()
    with pytest.raises(IsADirectoryError) as folder:
        RealDisk().write(small_disk / "folder", b"x")
    assert [err.value.filename for err in (full, folder)] == [str(small_disk / "state.json"), str(small_disk / "folder")]
    assert sorted(entry.name for entry in small_disk.iterdir()) == ["folder"]


def test_what_the_system_said_carries_no_numbers_of_pythons() -> None:
    reset = ConnectionResetError(104, "Connection reset by peer")
    broken = trio.BrokenResourceError("socket connection broken: [Errno 104] Connection reset by peer")
    broken.__cause__ = reset
    assert words(reset) == words(broken) == "Connection reset by peer"
    assert words(IsADirectoryError(21, "Is a directory", "/x")) == "/x: Is a directory"
    assert words(IsADirectoryError(21, "Is a directory", 12)) == "Is a directory"


@pytest.mark.parametrize("read", [RealDisk().read, load_file])
def test_a_folder_in_a_files_place_is_named_and_keeps_no_descriptor_open(tmp_path: Path, read: Callable[[Path], object]) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises((IsADirectoryError, Invalid)) as caught:
        read(tmp_path)
    said = words(caught.value) if isinstance(caught.value, OSError) else caught.value.message
    assert str(tmp_path) in said
    assert said.endswith(": Is a directory")
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_folder_of_data_that_cannot_be_one_is_told_apart(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, why in ((tmp_path / "file", "a file is in its place"), (tmp_path / "file" / "x", "a part of its path is a file")):
        with pytest.raises(Invalid, match=why), claim(path):
            pass


@pytest.mark.parametrize("data", [b"", b" \n"])
def test_an_empty_token_file_is_told_as_what_it_is_and_that_it_may_go(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "admin-token"
    file.write_bytes(data)
    file.chmod(0o600)

    async def main() -> str:
        return ensure_token(RealMachine(), file, "the admin token")

    with pytest.raises(Invalid) as told:
        trio.run(main)
    assert told.value.message == f"{file} is the file of the admin token and is empty; remove it, and a new one is made at the next start"
    file.unlink()
    made = trio.run(main)
    assert file.read_text().strip() == made


def test_a_full_disk_keeps_a_token_from_being_made_and_that_is_no_fault_of_the_file(small_disk: Path) -> None:
    fill(small_disk, 0)

    async def main() -> str:
        return ensure_token(RealMachine(), small_disk / "admin-token", "the admin token")

    with pytest.raises(Unavailable, match=r"admin-token \(the file of the admin token\) cannot be used: the disk is full; make room on it"):
        trio.run(main)


def test_a_certificate_that_cannot_be_used_names_the_file_and_what_is_wrong_with_it(tmp_path: Path) -> None:
    certificate, key, other, locked, junk = (str(tmp_path / f"{name}.pem") for name in ("cert", "key", "other", "locked", "junk"))
    if shutil.which("openssl") is None:
        skip("openssl is not installed")
    new = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-subj", "/CN=x"]
    subprocess.run([*new, "-out", certificate, "-keyout", key], check=True, capture_output=True, timeout=60)
    subprocess.run([*new, "-out", junk, "-keyout", other], check=True, capture_output=True, timeout=60)
    encrypt = ["openssl", "pkey", "-in", key, "-aes256", "-passout", "pass:abcd", "-out", locked]
    subprocess.run(encrypt, check=True, capture_output=True, timeout=60)
    Path(junk).write_text("junk")
    none = str(tmp_path / "none.pem")
    for pair, told in (
        ((none, key), f"the certificate {none} cannot be read: No such file or directory"),
        ((certificate, str(tmp_path)), f"the key {tmp_path} cannot be read: Is a directory"),
        ((junk, key), f"the certificate {junk} holds no certificate in PEM form"),
        ((certificate, junk), f"the key {junk} holds no key in PEM form"),
        ((certificate, other), f"the key {other} is not that of the certificate {certificate}"),
        ((certificate, locked), f"the key {locked} is encrypted; write it without a password"),
    ):
        with pytest.raises(Invalid) as caught:
            public_tls(*pair)
        assert caught.value.message == told
    public_tls(certificate, key)


@pytest.mark.parametrize("what", ["pipe", "device", "link to a device"])
def test_what_is_no_file_is_told_and_not_waited_for(tmp_path: Path, what: str):
    """A pipe in the place of a control plane's file kept its whole process waiting, and a device filled its memory."""
    path = tmp_path / "llmgw.toml"
    if what == "pipe":
        os.mkfifo(path)
    elif what == "device":
        path = Path("/dev/zero")
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(OSError, match="no regular file"):
        RealDisk().read(path)
    with pytest.raises(Invalid):
        load_file(path)


def test_a_file_beyond_all_measure_is_not_read(tmp_path: Path):
    with (tmp_path / "big").open("wb") as file:
        file.truncate(READ_BYTES_MAX + 1)
    with pytest.raises(OSError, match="too large"):
        RealDisk().read(tmp_path / "big")
