"""Steps of the schema: killed in the middle, run by two at once, and files of other builds (case B189; of T45 the store)."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import apsw
import pytest

from llmgw.domain.errors import Invalid, Unavailable
from llmgw.store import meta, migrations
from llmgw.store.connection import FileStore
from llmgw.store.migrations import APPLICATION_ID, SCHEMA, STEPS, Step, migrate, version
from tests.store.runners import in_thread

NEXT = Step(
    SCHEMA + 1,
    min_reader=1,
    min_writer=SCHEMA + 1,
    sql="""
    CREATE TABLE first_half (x INTEGER) STRICT;
    INSERT INTO first_half VALUES (1), (2), (3);
    ALTER TABLE engine_choices ADD COLUMN author TEXT NOT NULL DEFAULT '';
    CREATE TABLE second_half (y INTEGER) STRICT;
    """,
)
UNREADABLE = Step(SCHEMA + 1, min_reader=SCHEMA + 1, min_writer=SCHEMA + 1, sql="CREATE TABLE new_world (x INTEGER) STRICT;")

KILLED = """
    import os, signal, sys
    import apsw
    from llmgw.store import migrations
    from llmgw.store.migrations import STEPS, Step

    left = int(sys.argv[2])

    def trace(cursor, sql, bindings):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return True

    connection = apsw.Connection(sys.argv[1])
    connection.pragma("journal_mode", "wal")
    connection.exec_trace = trace
    migrations.migrate(connection, (*STEPS, Step(*eval(sys.argv[3]))))
    connection.exec_trace = None
    print("done")
"""


def test_a_kill_at_any_statement_of_any_step_leaves_a_file_that_the_next_start_completes(tmp_path):
    path = tmp_path / "llmgw.db"
    step = repr((NEXT.version, NEXT.min_reader, NEXT.min_writer, NEXT.sql))
    kills = 0
    for statement in (1, 3, 5, 9, 17, 23, 27, 30, 33):
        for suffix in ("", "-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        ended = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(KILLED), str(path), str(statement), step], capture_output=True, text=True, check=False
        )
        kills += ended.returncode == -9
        again = apsw.Connection(str(path))
        before = version(again)
        tables = {name for (name,) in again.execute("SELECT name FROM sqlite_schema WHERE type = 'table'").fetchall()}
        assert ("models" in tables) == (before >= 1)
        assert ("cluster_settings" in tables) == (before >= 2)
        assert ("first_half" in tables) == ("second_half" in tables) == (before > SCHEMA)
        migrate(again, (*STEPS, NEXT))
        assert version(again) == SCHEMA + 1
        assert again.execute("SELECT count(*) FROM first_half").get == 3
        assert again.pragma("integrity_check") == "ok"
        again.close()
    assert kills >= 6


async def test_a_file_that_a_newer_build_left_readable_may_be_followed_but_not_written(tmp_path):
    path = tmp_path / "llmgw.db"
    (await FileStore.open(path, in_thread)).close()
    newer = apsw.Connection(str(path))
    migrate(newer, (*STEPS, NEXT))
    newer.close()
    store = await FileStore.open(path, in_thread)
    assert (store.schema, store.may_write) == (SCHEMA + 1, False)
    with pytest.raises(Unavailable, match=rf"schema {SCHEMA + 1}.*schema {SCHEMA}"):
        await store.claim_epoch(1, "ctl-1")
    store.close()


@pytest.mark.parametrize("step", [NEXT, UNREADABLE], ids=["for readers", "for nobody"])
async def test_a_newer_build_may_take_the_right_to_write_from_one_that_runs(tmp_path, step: Step):
    """It was read once, when the file was opened."""
    path = tmp_path / "llmgw.db"
    store = await FileStore.open(path, in_thread)
    await store.claim_epoch(1, "ctl-1")
    newer = apsw.Connection(str(path))
    migrate(newer, (*STEPS, step))
    newer.close()
    with pytest.raises(Unavailable, match=rf"schema {SCHEMA + 1}.*schema {SCHEMA}") as refused:
        await store.claim_epoch(2, "ctl-1")
    assert (refused.value.code, store.may_write, store.trouble) == ("schema_newer", False, "")
    if step is NEXT:
        assert (await meta.load(store)).epoch == 1
    else:
        with pytest.raises(Unavailable, match="cannot read"):
            await meta.load(store)
    store.close()


async def test_a_standby_that_only_reads_learns_of_a_newer_build(tmp_path):
    path = tmp_path / "llmgw.db"
    store = await FileStore.open(path, in_thread)
    newer = apsw.Connection(str(path))
    migrate(newer, (*STEPS, NEXT))
    newer.close()
    await meta.load(store)
    assert (store.schema, store.may_write) == (SCHEMA + 1, False)
    store.close()


async def test_a_file_that_is_too_new_is_refused_with_both_numbers(tmp_path):
    path = tmp_path / "llmgw.db"
    newer = apsw.Connection(str(path))
    migrate(newer, (*STEPS, UNREADABLE))
    newer.close()
    with pytest.raises(Invalid, match=rf"schema {SCHEMA + 1} .* knows schema {SCHEMA}") as refused:
        await FileStore.open(path, in_thread)
    assert refused.value.code == "schema_newer"
    again = apsw.Connection(str(path))
    assert version(again) == SCHEMA + 1
    again.close()


def test_a_second_run_changes_nothing():
    connection = apsw.Connection(":memory:")
    migrate(connection)
    before = connection.total_changes()
    migrate(connection)
    assert connection.total_changes() == before
    assert connection.pragma("application_id") == APPLICATION_ID


def test_a_step_that_fails_is_undone_as_a_whole():
    connection = apsw.Connection(":memory:")
    migrate(connection)
    broken = Step(SCHEMA + 1, 1, 1, "CREATE TABLE first_half (x INTEGER) STRICT; INSERT INTO nowhere VALUES (1);")
    with pytest.raises(apsw.SQLError):
        migrate(connection, (*STEPS, broken))
    assert version(connection) == SCHEMA
    assert connection.execute("SELECT count(*) FROM sqlite_schema WHERE name = 'first_half'").get == 0


def test_the_steps_are_numbered_without_a_gap_and_each_allows_its_own_build():
    assert [step.version for step in STEPS] == list(range(1, SCHEMA + 1))
    assert all(step.min_reader <= step.version and step.min_writer <= step.version for step in STEPS)
    assert STEPS[-1].version == migrations.SCHEMA
