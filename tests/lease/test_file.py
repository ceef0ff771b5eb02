"""`lease.db` and `lease.lock` on a real disk: files that are not what they should be, and what only real processes show."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import apsw
import attrs
import pytest

from llmgw.domain.errors import Invalid, Unavailable
from llmgw.lease import file
from llmgw.lease.file import LEASE_FILE, LOCK_FILE, SCHEMA, FileLeases, LeaseFile, LockFile, boot_id
from llmgw.lease.record import ROLE, LeaseRecord
from llmgw.lease.store import Lost, Unknown
from tests.lease.machines import ThreadMachine
from tests.lease.records import later, record

LIMIT_S = 60  # generous: a process that hangs fails the test instead of the suite


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / LEASE_FILE


@pytest.fixture
def leases(path: Path) -> Iterator[LeaseFile]:
    opened = LeaseFile(path)
    yield opened
    opened.close()


@pytest.fixture
def written(leases: LeaseFile) -> LeaseRecord:
    one = record()
    leases.replace(ROLE, None, one)
    return one


def by_hand(path: Path) -> apsw.Connection:
    """Of the same library: two in one process do not see each other's locks."""
    return apsw.Connection(str(path))


def write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def read(path: Path) -> bytes:
    return path.read_bytes()


# --- files that are not what they should be


def test_the_file_is_made_private_and_synced_in_full(leases: LeaseFile, written: LeaseRecord, path: Path):
    assert path.stat().st_mode & 0o777 == 0o600
    with contextlib.closing(by_hand(path)) as connection:
        assert connection.pragma("journal_mode") == "wal"


def test_a_file_of_a_newer_build_is_refused_with_both_schemas_named(leases: LeaseFile, written: LeaseRecord, path: Path):
    leases.close()
    with contextlib.closing(by_hand(path)) as connection:
        connection.execute(f"PRAGMA user_version = {SCHEMA + 3}")
    with pytest.raises(Invalid, match=rf"schema {SCHEMA + 3}, this build knows up to {SCHEMA}") as refused:
        LeaseFile(path).read(ROLE)
    assert refused.value.code == "schema_newer"


def test_another_programs_database_is_refused_and_left_as_it_is(path: Path):
    with contextlib.closing(by_hand(path)) as connection:
        connection.execute("CREATE TABLE theirs(a)")
    with pytest.raises(Invalid, match="another program's database"):
        LeaseFile(path).read(ROLE)
    with contextlib.closing(by_hand(path)) as connection:
        assert connection.execute("SELECT name FROM sqlite_schema").fetchall() == [("theirs",)]


@pytest.mark.parametrize("content", [b"junk" * 2048, b"SQLite format 3\0" + b"\xff" * 8176], ids=["no database", "a damaged one"])
async def test_a_damaged_file_is_a_clear_error_at_the_start(path: Path, content: bytes):
    write(path, content)
    opened = FileLeases(ThreadMachine(), path)
    with pytest.raises(Unavailable, match=r"lease\.db is damaged: .*move it away") as refused:
        await opened.check()
    assert refused.value.code == "lease_unavailable"
    assert read(path) == content


def test_a_record_that_was_edited_by_hand_is_neither_taken_nor_overwritten(leases: LeaseFile, written: LeaseRecord, path: Path):
    with contextlib.closing(by_hand(path)) as connection:
        connection.execute("UPDATE lease SET record = ?", (b'{"epoch": 0}',))
    with pytest.raises(Unknown, match="epoch: must be at least 1") as trouble:
        leases.read(ROLE)
    assert trouble.value.fault
    with pytest.raises(Unknown):
        leases.replace(ROLE, written, later(written))


def test_a_record_that_was_deleted_by_hand_is_absent(leases: LeaseFile, written: LeaseRecord, path: Path):
    with contextlib.closing(by_hand(path)) as connection:
        connection.execute("DELETE FROM lease")
    assert leases.read(ROLE) is None
    with pytest.raises(Lost) as lost:
        leases.replace(ROLE, written, later(written))
    assert lost.value.current is None


def test_a_lock_that_another_process_holds_for_long_is_no_answer(leases: LeaseFile, written: LeaseRecord, path: Path):
    with contextlib.closing(by_hand(path)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        with pytest.raises(Unknown, match="locked by another process") as trouble:
            leases.replace(ROLE, written, later(written))
        assert not trouble.value.local_disk
        with pytest.raises(Unknown):  # a holder could not renew: what stands there unchanged says nothing
            leases.read(ROLE)
        connection.execute("ROLLBACK")
    assert leases.read(ROLE) == written
    leases.replace(ROLE, written, later(written))


def test_what_stands_under_the_name_counts_when_the_file_was_moved_away(leases: LeaseFile, written: LeaseRecord, path: Path):
    for name in (path.name, f"{path.name}-wal", f"{path.name}-shm"):
        os.rename(path.with_name(name), path.with_name(f"old-{name}"))
    with pytest.raises(Lost):
        leases.replace(ROLE, written, later(written))
    other = LeaseFile(path)
    other.replace(ROLE, None, new := record(owner="b-1"))
    assert leases.read(ROLE) == new
    other.close()


def test_a_file_that_was_deleted_and_came_back_is_the_same_again(leases: LeaseFile, written: LeaseRecord, path: Path):
    leases.close()
    saved = path.read_bytes()
    path.unlink()
    assert leases.read(ROLE) is None
    leases.close()
    path.write_bytes(saved)
    assert leases.read(ROLE) == written


def test_a_link_is_followed_to_the_file_itself(leases: LeaseFile, written: LeaseRecord, path: Path, tmp_path: Path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "link.db").symlink_to(path)
    linked = LeaseFile(tmp_path / "elsewhere" / "link.db")
    assert linked.read(ROLE) == written
    linked.replace(ROLE, written, two := later(written))
    assert leases.read(ROLE) == two
    assert sorted(os.listdir(tmp_path / "elsewhere")) == ["link.db"]
    linked.close()


def test_a_network_file_system_is_refused_by_name(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(file, "network_file_system", lambda folder: "nfs4")
    with pytest.raises(Invalid, match="nfs4") as refused:
        LeaseFile(path)
    assert refused.value.code == "network_file_system"


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["a pipe", "a folder"])
def test_a_path_that_is_no_file_is_refused(path: Path, make: object):
    assert callable(make)
    make(path)
    with pytest.raises(Invalid, match="is not a file"):
        LeaseFile(path).read(ROLE)


def test_a_folder_that_is_missing_is_the_disks_fault(tmp_path: Path):
    with pytest.raises(Unknown) as trouble:
        LeaseFile(tmp_path / "gone" / LEASE_FILE).read(ROLE)
    assert trouble.value.local_disk


def test_a_write_that_the_disk_does_not_take_is_the_disks_fault_and_heals(leases: LeaseFile, written: LeaseRecord, path: Path):
    """Not the real full disk, which needs a mount: SQLite's own bound on the file's pages gives the same answer."""
    big = later(written, base="b" * 60_000)
    leases.read(ROLE)
    connection = leases._connection
    assert connection is not None
    connection.pragma("max_page_count", 2)
    with pytest.raises(Unknown, match="FullError") as trouble:
        leases.replace(ROLE, written, big)
    assert trouble.value.local_disk
    leases.replace(ROLE, written, big)
    assert leases.read(ROLE) == big


def test_the_boot_id_is_that_of_this_run_of_the_machine():
    assert boot_id() == boot_id()
    assert len(boot_id()) == 36


# --- the holder's lock


def test_one_open_file_has_the_lock_and_another_does_not(tmp_path: Path):
    first, second = LockFile(tmp_path / LOCK_FILE), LockFile(tmp_path / LOCK_FILE)
    assert first.take("a", None)
    assert first.take("a again", None), "renamed"
    assert not second.take("b", None)
    first.let_go()
    assert not second.take("b", "a"), "its last holder had another name"
    assert second.take("b", "a again")
    second.let_go()
    second.let_go()


def test_a_lock_file_that_was_deleted_by_hand_keeps_nobody_out_and_is_made_anew(tmp_path: Path):
    first, second = LockFile(tmp_path / LOCK_FILE), LockFile(tmp_path / LOCK_FILE)
    assert first.take("a", None)
    (tmp_path / LOCK_FILE).unlink()
    assert second.take("b", None)
    assert not first.take("a", None)
    second.let_go()
    assert first.take("a", "b")
    first.let_go()


# --- real processes

HOLDER = """
import subprocess, sys
from pathlib import Path
from llmgw.lease.file import LockFile
lock = LockFile(Path(sys.argv[1]))
assert lock.take("holder", None)
child = subprocess.Popen(["sleep", "600"], close_fds=False)
print(child.pid, flush=True)
sys.stdin.read()
"""


@attrs.frozen
class Holder:
    process: subprocess.Popen[str]
    child: int


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Holder]:
    """A process that has the lock, with a child that was given every descriptor that is not closed on exec."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / LOCK_FILE)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    found = Holder(process, int(process.stdout.readline()))
    yield found
    os.kill(found.child, signal.SIGKILL)
    process.kill()
    process.communicate(timeout=LIMIT_S)


def test_the_lock_of_a_killed_process_is_free_though_its_child_lives(tmp_path: Path, holder: Holder):
    lock = LockFile(tmp_path / LOCK_FILE)
    assert not lock.take("other", "holder")
    holder.process.send_signal(signal.SIGKILL)
    holder.process.wait(LIMIT_S)
    os.kill(holder.child, 0)  # it lives
    assert lock.take("other", "holder")
    lock.let_go()


def test_a_stopped_process_keeps_its_lock(tmp_path: Path, holder: Holder):
    lock = LockFile(tmp_path / LOCK_FILE)
    holder.process.send_signal(signal.SIGSTOP)
    state = ""
    while state != "T":  # stopped, as the kernel says
        state = Path(f"/proc/{holder.process.pid}/stat").read_text().rpartition(")")[2].split()[0]
    assert not lock.take("other", "holder")
    holder.process.send_signal(signal.SIGCONT)
    assert not lock.take("other", "holder")


RACER = """
import sys
from pathlib import Path
import attrs
from llmgw.lease.file import LeaseFile
from llmgw.lease.store import Lost, Unknown
leases, me, taken, current = LeaseFile(Path(sys.argv[1])), sys.argv[2], 0, None
while taken < 50:
    try:
        current = current or leases.read("control-plane")
        new = attrs.evolve(current, epoch=current.epoch + 1, seq=current.seq + 1, owner=me, write_id=f"{me}-{taken}")
        leases.replace("control-plane", current, new)
        current, taken = new, taken + 1
    except Lost as err:
        current = err.current
    except Unknown:  # kept waiting for too long; nothing was written, or it is read back
        current = None
print(taken)
"""


def test_processes_that_race_never_take_the_same_epoch(leases: LeaseFile, written: LeaseRecord, path: Path):
    racers = [
        subprocess.Popen([sys.executable, "-c", RACER, str(path), f"p{number}"], stdout=subprocess.PIPE, text=True) for number in range(3)
    ]
    taken = [int(racer.communicate(timeout=LIMIT_S)[0]) for racer in racers]
    found = leases.read(ROLE)
    assert found is not None
    assert (found.epoch, found.seq) == (1 + sum(taken), 1 + sum(taken)), "each write that was taken is one step"


def test_a_process_that_is_killed_while_it_writes_leaves_a_whole_record(leases: LeaseFile, written: LeaseRecord, path: Path):
    writer = subprocess.Popen([sys.executable, "-c", RACER, str(path), "w"], stdout=subprocess.PIPE, text=True)
    while (found := leases.read(ROLE)) is None or found.epoch < 20:
        assert writer.poll() is None
    writer.send_signal(signal.SIGKILL)
    writer.communicate(timeout=LIMIT_S)
    found = leases.read(ROLE)
    assert found is not None
    leases.replace(ROLE, found, later(found, owner="b-1", epoch=found.epoch + 1))
    with contextlib.closing(by_hand(path)) as connection:
        assert connection.pragma("integrity_check") == "ok"
