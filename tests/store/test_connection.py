"""Units of work, the epoch check, and what the world does to the file."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import apsw
import pytest
import trio

from llmgw.domain.errors import Broken, Conflict, Invalid, StaleEpoch, Unavailable
from llmgw.domain.event import Event
from llmgw.domain.files import STORAGE_UNAVAILABLE
from llmgw.lease.file import LeaseFile
from llmgw.store import connection, events, meta
from llmgw.store.connection import MEMORY, FileStore, check_library
from tests.programs import skip
from tests.store.runners import in_thread, inline


def bump(con: apsw.Connection, epoch: int) -> int:
    """A read, then a write of what was read: loses counts wherever two of them can interleave."""
    before = con.execute("SELECT models_revision FROM meta").get
    con.execute("UPDATE meta SET models_revision = ?", (before + 1,))
    return before + 1


@pytest.fixture
async def store(tmp_path):
    opened = await FileStore.open(tmp_path / "llmgw.db", in_thread)
    yield opened
    opened.close()


async def test_twenty_tasks_that_read_and_then_write_lose_nothing_and_fail_never(store):
    async def worker():
        for _ in range(5):
            await store.write(bump, 1)

    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(worker)
    assert (await meta.load(store)).models_revision == 100


async def test_twenty_threads_with_a_store_each_lose_nothing_on_one_file(tmp_path):
    path = tmp_path / "llmgw.db"
    (await FileStore.open(path, in_thread)).close()
    failures: list[BaseException] = []

    def thread() -> None:
        async def main() -> None:
            own = await FileStore.open(path, inline)
            for _ in range(3):
                await own.write(bump, 1)
            own.close()

        try:
            trio.run(main)
        except BaseException as err:
            failures.append(err)

    threads = [threading.Thread(target=thread) for _ in range(20)]
    for each in threads:
        each.start()
    for each in threads:
        await trio.to_thread.run_sync(each.join)
    assert failures == []
    check = await FileStore.open(path, in_thread)
    assert (await meta.load(check)).models_revision == 60
    check.close()


async def test_a_write_below_the_highest_epoch_met_is_refused_and_changes_nothing(store):
    await store.claim_epoch(7, "ctl-b")
    with pytest.raises(StaleEpoch) as refused:
        await store.write(bump, 6)
    assert (refused.value.epoch, refused.value.owner) == (7, "ctl-b")
    assert (await meta.load(store)).models_revision == 0
    assert await store.write(bump, 7) == 1


async def test_a_write_of_a_higher_epoch_fences_off_the_lower_ones(store):
    await store.write(bump, 9)
    with pytest.raises(StaleEpoch):
        await store.write(bump, 8)


async def test_of_two_that_claim_one_epoch_the_first_has_it_and_lower_ones_are_refused(tmp_path):
    first = await FileStore.open(tmp_path / "llmgw.db", in_thread)
    second = await FileStore.open(tmp_path / "llmgw.db", in_thread)
    await first.claim_epoch(3, "ctl-1")
    await first.claim_epoch(3, "ctl-1")
    for epoch in (3, 2):
        with pytest.raises(StaleEpoch) as refused:
            await second.claim_epoch(epoch, "ctl-2")
        assert (refused.value.epoch, refused.value.owner) == (3, "ctl-1")
    await second.claim_epoch(100, "ctl-2")
    with pytest.raises(StaleEpoch):
        await first.claim_epoch(3, "ctl-1")
    first.close()
    second.close()


async def test_raise_epoch_moves_only_upward(store):
    assert await store.write(meta.raise_epoch, 5, "ctl-a") == 5
    with pytest.raises(StaleEpoch):
        await store.write(meta.raise_epoch, 4, "ctl-b")
    assert (await meta.load(store)).owner == "ctl-a"


async def test_a_unit_that_raises_leaves_nothing_behind(store):
    def half(con: apsw.Connection, epoch: int) -> None:
        bump(con, epoch)
        raise Conflict("no")

    with pytest.raises(Conflict):
        await store.write(half, 1)
    facts = await meta.load(store)
    assert (facts.models_revision, facts.epoch) == (0, 0)
    assert await store.write(bump, 1) == 1


async def test_a_cancel_during_a_write_waits_for_the_outcome_and_the_row_is_there(store):
    began, may_end = threading.Event(), threading.Event()
    answers = []

    def slow(con: apsw.Connection, epoch: int) -> int:
        began.set()
        assert may_end.wait(10)
        return bump(con, epoch)

    async def caller(task_status=trio.TASK_STATUS_IGNORED):
        with trio.CancelScope() as scope:
            task_status.started(scope)
            answers.append(await store.write(slow, 1))

    async with trio.open_nursery() as nursery:
        scope = await nursery.start(caller)
        await trio.to_thread.run_sync(began.wait)
        scope.cancel()
        may_end.set()
    assert answers == [1]
    assert (await meta.load(store)).models_revision == 1


async def test_a_cancel_before_its_turn_writes_nothing(store):
    may_end = threading.Event()

    def slow(con: apsw.Connection, epoch: int) -> None:
        assert may_end.wait(10)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.write, slow, 1)
        await trio.testing.wait_all_tasks_blocked(0.01)
        with trio.CancelScope() as scope:
            scope.cancel()
            await store.write(bump, 1)
        may_end.set()
    assert scope.cancelled_caught
    assert (await meta.load(store)).models_revision == 0


async def test_a_read_sees_one_instant_while_another_task_writes(store):
    reading, written = threading.Event(), threading.Event()

    def twice(con: apsw.Connection) -> tuple[int, int]:
        first = con.execute("SELECT models_revision FROM meta").get
        reading.set()
        assert written.wait(10)
        return first, con.execute("SELECT models_revision FROM meta").get

    async def write():
        await trio.to_thread.run_sync(reading.wait)
        await store.write(bump, 1)
        written.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(write)
        assert await store.read(twice) == (0, 0)


async def test_a_read_cannot_write(store):
    with pytest.raises(Unavailable) as refused:
        await store.read(lambda con: con.execute("UPDATE meta SET epoch = 99").fetchall())
    assert "UPDATE" not in str(refused.value)
    assert (await meta.load(store)).epoch == 0


async def test_more_readers_than_connections_all_get_their_turn(store):
    answers = []

    async def reader():
        answers.append((await meta.load(store)).epoch)

    async with trio.open_nursery() as nursery:
        for _ in range(30):
            nursery.start_soon(reader)
    assert answers == [0] * 30


async def test_a_mistake_of_ours_is_told_as_broken_and_without_sql(store):
    with pytest.raises(Broken) as told:
        await store.read(lambda con: con.execute("SELECT nothing FROM nowhere").fetchall())
    assert "nowhere" not in str(told.value)


async def test_double_quoted_texts_are_columns_and_foreign_keys_are_on(store):
    def facts(con: apsw.Connection) -> tuple[object, ...]:
        return con.pragma("foreign_keys"), con.pragma("synchronous"), con.pragma("journal_mode"), con.pragma("busy_timeout")

    assert await store.read(facts) == (1, 2, "wal", connection.BUSY_TIMEOUT_MS)
    with pytest.raises(Broken):
        await store.read(lambda con: con.execute('SELECT "mistyped"').fetchall())


async def test_a_store_in_memory_runs_inline_and_shares_one_connection():
    store = await FileStore.open(MEMORY, inline)
    assert await store.write(bump, 1) == 1
    assert (await meta.load(store)).models_revision == 1
    assert (store.mode, store.durability) == ("none", "none")
    store.close()


async def test_a_closed_store_says_so(store):
    store.close()
    store.close()
    for call in (lambda: meta.load(store), lambda: store.write(bump, 1)):
        with pytest.raises(Unavailable, match="closed"):
            await call()


async def test_the_files_are_readable_by_their_owner_alone(store, tmp_path):
    modes = {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {0o600}


# --- what the world does


async def expect_refused(path: Path, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words) as refused:
        await FileStore.open(path, in_thread)
    assert "SELECT" not in str(refused.value)
    assert "pragma" not in str(refused.value).lower()


async def test_a_file_that_is_no_database_is_refused_and_kept_as_it_is(tmp_path):
    path = tmp_path / "llmgw.db"
    path.write_bytes(b"these are my notes, not a database\n" * 300)
    await expect_refused(path, Invalid, "not a database of llmgw")
    assert path.read_bytes().startswith(b"these are my notes")


async def test_another_programs_database_is_refused_and_kept_as_it_is(tmp_path):
    path = tmp_path / "photos.db"
    other = apsw.Connection(str(path))
    other.execute("CREATE TABLE photos (name TEXT)")
    other.close()
    await expect_refused(path, Invalid, "another program")
    again = apsw.Connection(str(path))
    assert again.execute("SELECT name FROM sqlite_schema").fetchall() == [("photos",)]
    again.close()


def crash_with(path: Path, *statements: str) -> None:
    """Another program that is killed in the middle: its log, or its journal, stays beside the file."""
    code = "import os, sys, apsw\nc = apsw.Connection(sys.argv[1])\nfor one in sys.argv[2:]: c.execute(one)\nos._exit(0)"
    subprocess.run([sys.executable, "-c", code, str(path), *statements], check=True)


ROWS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n WHERE x < 3000) INSERT INTO photos SELECT x || 'a photo' FROM n"


@pytest.mark.parametrize(
    "statements",
    [
        ("CREATE TABLE photos (name TEXT)",),
        ("PRAGMA journal_mode = wal", "CREATE TABLE photos (name TEXT)", ROWS),
        # The cache is so small that changed pages are written before the end: a journal that must be rolled back.
        ("CREATE TABLE photos (name TEXT)", ROWS, "PRAGMA cache_size = 2", "BEGIN", "UPDATE photos SET name = 'x'"),
    ],
    ids=["at rest", "with a log", "in the middle of a transaction"],
)
@pytest.mark.parametrize("opened", ["store", "lease"])
async def test_not_a_byte_of_another_programs_database_is_changed(tmp_path, statements: tuple[str, ...], opened: str):
    """Its log was turned on before it was asked whose it is."""
    path = tmp_path / "photos.db"
    crash_with(path, *statements)

    def state() -> dict[str, str]:
        # The index of a log is shared memory: every reader marks its place in it.
        return {file.name: sha256(file.read_bytes()).hexdigest() for file in tmp_path.iterdir() if not file.name.endswith("-shm")}

    before = state()
    if opened == "store":
        await expect_refused(path, Invalid, "another program")
    else:
        with pytest.raises(Invalid, match="another program"):
            LeaseFile(path).read("control-plane")
    assert state() == before


async def test_what_is_no_file_and_a_missing_folder_are_told_apart(tmp_path):
    await expect_refused(tmp_path, Invalid, "is a folder")
    os.mkfifo(tmp_path / "pipe")
    await expect_refused(tmp_path / "pipe", Invalid, "a device or a pipe")
    for side in ("wal", "shm", "journal"):
        (tmp_path / f"{side}.db-{side}").mkdir()
        await expect_refused(tmp_path / f"{side}.db", Invalid, f"{side}.db-{side} is a folder")
    await expect_refused(tmp_path / "none" / "llmgw.db", Unavailable, "does not exist")


async def test_a_file_moved_away_is_noticed_and_no_new_one_appears(store, tmp_path):
    await store.write(bump, 1)
    path = tmp_path / "llmgw.db"
    path.rename(tmp_path / "elsewhere.db")
    for call in (lambda: meta.load(store), lambda: store.write(bump, 1)):
        with pytest.raises(Unavailable, match="moved, replaced or deleted") as told:
            await call()
        assert told.value.code == STORAGE_UNAVAILABLE
    assert not path.exists()
    (tmp_path / "elsewhere.db").rename(path)
    assert await store.write(bump, 1) == 2  # put back: nothing of what was refused is there


async def test_a_file_replaced_by_another_is_noticed(store, tmp_path):
    path = Path(store.path)
    shutil.copy(path, tmp_path / "copy.db")
    (tmp_path / "copy.db").rename(path)
    with pytest.raises(Unavailable, match="replaced"):
        await store.write(bump, 1)


async def test_a_write_ahead_log_deleted_under_the_store_is_noticed_before_a_write_is_acknowledged(store, tmp_path):
    (tmp_path / "llmgw.db-wal").unlink()
    with pytest.raises(Unavailable, match="replaced or deleted"):
        await store.write(bump, 1)


async def test_a_file_locked_by_another_process_for_too_long_is_unavailable(store, monkeypatch):
    other = apsw.Connection(store.path)
    other.execute("BEGIN IMMEDIATE")
    store._writer.set_busy_timeout(10)
    with pytest.raises(Unavailable, match="locked") as told:
        await store.write(bump, 1)
    assert told.value.retry_after_s is not None
    other.execute("ROLLBACK")
    other.close()
    assert await store.write(bump, 1) == 1


def test_an_sqlite_that_is_too_old_is_named_with_the_one_that_is_needed():
    check_library("3.51.3")
    check_library("3.100.0")
    with pytest.raises(Invalid, match=r"3\.51\.2 is too old .* 3\.51\.3"):
        check_library("3.51.2")


def child(code: str, *arguments: str, setup: Callable[[], None] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments], capture_output=True, text=True, timeout=60, preexec_fn=setup, check=False
    )


QUOTA = """
    import resource, signal, sys, trio
    from llmgw.domain.errors import Unavailable
    from llmgw.domain.event import Event
    from llmgw.store import events, meta
    from llmgw.store.connection import FileStore

    async def main():
        async def run(work):
            return await trio.to_thread.run_sync(work)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        store = await FileStore.open(sys.argv[1], run)
        await events.append(store, 1, [Event("k", "o", "first", 0.0)])
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
        refused = 0
        for number in range(200):
            try:
                await events.append(store, 1, [Event("k", "o", "x" * 8000, 0.0)])
            except Unavailable as err:
                assert err.code == "storage_unavailable", err.code
                assert "INSERT" not in str(err)
                refused += 1
                if refused == 3:
                    break
        assert refused == 3
        stored = await events.after(store, 0, 1000)
        assert [event.seq for event in stored] == list(range(1, len(stored) + 1))
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        (last,) = await events.append(store, 1, [Event("k", "o", "room again", 0.0)])
        assert last.seq == len(stored) + 1
        store.close()
        print("told", len(stored))

    trio.run(main)
"""


def test_a_disk_quota_is_told_as_storage_unavailable_and_is_over_when_room_is_back(tmp_path):
    ended = child(QUOTA, str(tmp_path / "llmgw.db"))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("told")


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = shutil.which("mount") is not None and (
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "llmgw-test", str(folder)], capture_output=True, check=False).returncode
        == 0
    )
    if not mounted:
        skip("this user may not mount a small tmpfs")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], capture_output=True, check=True)


async def test_a_full_disk_refuses_writes_and_serves_reads_until_there_is_room(small_disk):
    store = await FileStore.open(small_disk / "llmgw.db", in_thread)
    await store.write(bump, 1)
    filler = small_disk / "filler"
    with pytest.raises(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)
    with pytest.raises(Unavailable) as told:
        for number in range(50):
            await events.append(store, 1, [Event("k", "o", "x" * 8000, float(number))])
    assert told.value.code == STORAGE_UNAVAILABLE
    assert "the disk" in store.trouble
    await store.write(lambda connection, epoch: None, 1)  # a commit of nothing, which a full disk takes
    assert store.trouble
    assert (await meta.load(store)).models_revision == 1
    with pytest.raises(Unavailable):
        for _ in range(50):
            await store.prove_writable()
    filler.unlink()
    await store.prove_writable()
    assert not store.trouble
    assert await store.write(bump, 1) == 2
    store.close()


async def test_a_start_on_a_full_disk_is_refused_by_a_real_write(small_disk):
    with pytest.raises(OSError), (small_disk / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)
    await expect_refused(small_disk / "llmgw.db", Unavailable, "storage unavailable")
    (small_disk / "filler").unlink()
    store = await FileStore.open(small_disk / "llmgw.db", in_thread)
    (small_disk / "filler").touch()
    with pytest.raises(OSError), (small_disk / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)
    store.close()
    await expect_refused(small_disk / "llmgw.db", Unavailable, "storage unavailable")


AS_NOBODY = """
    import os, sys, trio
    from llmgw.domain.errors import Unavailable
    from llmgw.store.connection import FileStore
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)

    async def run(work):
        return work()

    async def main():
        try:
            await FileStore.open(sys.argv[1], run)
        except Unavailable as err:
            print(err.code, str(err))

    trio.run(main)
"""


@pytest.mark.parametrize("there", ["a new file", "an old file"])
def test_a_folder_that_may_not_be_written_is_told_in_one_sentence(tmp_path, there):
    folder = tmp_path / "data"
    folder.mkdir()
    if there == "an old file":
        trio.run(_make, folder / "llmgw.db")
        (folder / "llmgw.db").chmod(0o444)
    for part in (folder, *[parent for parent in folder.parents if parent.is_relative_to("/tmp") and parent != Path("/tmp")]):
        part.chmod(0o555 if part == folder else 0o755)
    ended = child(AS_NOBODY, str(folder / "llmgw.db"))
    folder.chmod(0o755)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("storage_unavailable "), ended.stdout
    assert len(ended.stdout.splitlines()) == 1


async def _make(path: Path) -> None:
    (await FileStore.open(path, in_thread)).close()


WRITE_FOR_EVER = """
    import sys, trio
    from llmgw.domain.event import Event
    from llmgw.store import events
    from llmgw.store.connection import FileStore

    async def run(work):
        return work()

    async def main():
        store = await FileStore.open(sys.argv[1], run)
        while True:
            (event,) = await events.append(store, 1, [Event("k", "o", "t", 0.0)])
            print(event.seq, flush=True)

    trio.run(main)
"""


async def test_every_write_acknowledged_before_a_kill_is_there_after_it(tmp_path):
    path = tmp_path / "llmgw.db"
    writer = subprocess.Popen([sys.executable, "-c", textwrap.dedent(WRITE_FOR_EVER), str(path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    acknowledged = 0
    for line in writer.stdout:
        acknowledged = int(line)
        if acknowledged == 30:
            os.kill(writer.pid, signal.SIGKILL)
    writer.wait()
    writer.stdout.close()
    store = await FileStore.open(path, in_thread)
    stored = await events.after(store, 0, 1000)
    assert len(stored) >= acknowledged >= 30
    store.close()
