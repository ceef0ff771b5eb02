"""Copies of the store: what a leader records does the same to a copy, and what cannot be followed is found out."""

from __future__ import annotations

import os
import sqlite3
import stat
from pathlib import Path

import apsw
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmgw.domain.errors import Invalid, LlmgwError
from llmgw.store import changes, migrations
from llmgw.store.changes import Diverged
from llmgw.store.connection import FileStore, Use
from llmgw.store.copies import Copy, Position, copy_whole, write_whole
from llmgw.wiring.machine import RealMachine
from tests.store.runners import in_thread


def names(con: apsw.Connection) -> list[str]:
    return [name for (name,) in con.execute("SELECT facility FROM facility_holds ORDER BY facility")]


def add(con: apsw.Connection, epoch: int, name: str) -> None:
    con.execute("INSERT INTO facility_holds VALUES (?, 'r', 0, NULL, 'a')", (name,))


def database() -> apsw.Connection:
    con = apsw.Connection(":memory:")
    con.pragma("foreign_keys", 1)
    migrations.migrate(con)
    return con


def rows_of_all(con: apsw.Connection) -> dict[str, list[tuple]]:
    tables = [name for (name,) in con.execute("SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite_%'")]
    return {table: sorted(con.execute(f"SELECT * FROM {table}"), key=repr) for table in sorted(tables)}


def test_every_table_has_a_key_so_that_none_is_left_out():
    con = database()
    for table in rows_of_all(con):
        assert any(pk for *_, pk in con.execute(f"PRAGMA table_info({table})")), table


STATEMENTS = st.sampled_from(
    [
        "INSERT OR IGNORE INTO models VALUES ('{x}', 1, '{{}}')",
        "INSERT OR IGNORE INTO model_names SELECT '{y}', name FROM models WHERE name = '{x}'",
        "UPDATE models SET revision = revision + 1 WHERE name = '{x}'",
        "DELETE FROM models WHERE name = '{x}'",
        "INSERT OR REPLACE INTO facility_holds VALUES ('{x}', '{y}', 0, NULL, 'a')",
        "INSERT INTO events (at, level, kind, object, epoch, text) VALUES (1.5, 'info', 'k', '{x}', 1, '{y}')",
        "DELETE FROM events WHERE object = '{x}'",
        "UPDATE meta SET epoch = epoch + 1",
        "INSERT OR REPLACE INTO pauses VALUES (1, '{x}', '{y}', 2.0)",
        "DELETE FROM pauses",
    ]
)
LETTERS = st.sampled_from("abc")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.tuples(STATEMENTS, LETTERS, LETTERS), min_size=1, max_size=5), max_size=12))
def test_what_transactions_have_changed_does_the_same_to_a_copy(transactions):
    leader, copy = database(), database()
    for statements in transactions:
        recording = changes.Recording(leader)
        with leader:
            for text, x, y in statements:
                leader.execute(text.format(x=x, y=y))
        made = recording.changes()
        recording.close()
        with copy:
            changes.apply(copy, [made] if made else [])
    assert rows_of_all(copy) == rows_of_all(leader)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=200))
def test_bytes_that_are_no_changes_change_nothing(junk):
    copy = database()
    before = rows_of_all(copy)
    try:
        with copy:
            changes.apply(copy, [junk])
    except (Diverged, apsw.Error):
        pass
    assert rows_of_all(copy) == before


def test_a_copy_that_is_not_what_was_changed_is_found_out():
    leader, copy = database(), database()
    add(leader, 1, "x")
    recording = changes.Recording(leader)
    leader.execute("UPDATE facility_holds SET reason = 'new'")
    made = recording.changes()
    recording.close()
    with pytest.raises(Diverged, match="facility_holds"), copy:
        changes.apply(copy, [made])


@pytest.fixture
async def source(tmp_path):
    store = await FileStore.open(tmp_path / "work.db", in_thread, Use.WORKING)
    yield store
    store.close()


@pytest.fixture
async def copy(tmp_path, source):
    made = await Copy.open(RealMachine(), tmp_path / "copies", copy_whole(source.path))
    yield made
    made.close()


async def test_a_file_that_is_read_while_it_is_replaced_is_read_to_its_end(copy, source, tmp_path):
    await source.write(add, 1, "x")

    def slow(con: apsw.Connection) -> list[str]:
        seen = names(con)
        opened.append(Path(con.filename))
        return seen

    opened: list[Path] = []
    assert await copy.read(slow) == []
    await copy.replace(copy_whole(source.path), Position(1, 1))
    assert await copy.read(slow) == ["x"]
    assert opened[0] != opened[1]
    assert not opened[0].exists()
    assert len(list((tmp_path / "copies").glob("*.db"))) == 1


async def test_a_whole_file_that_is_none_leaves_the_copy_as_it_is(copy, tmp_path):
    with pytest.raises(LlmgwError):
        await copy.replace(write_whole(b"no database at all" * 500), Position(9, 9))
    assert copy.position == Position()
    assert await copy.read(names) == []
    assert len(list((tmp_path / "copies").glob("*"))) <= 3  # the file and its log


async def test_a_dump_is_a_whole_database(copy, source, tmp_path):
    await source.write(add, 1, "x")
    await copy.replace(copy_whole(source.path), Position(1, 1))
    position, data = await copy.dump()
    (tmp_path / "dumped.db").write_bytes(data)
    assert position == Position(1, 1)
    assert sqlite3.connect(tmp_path / "dumped.db").execute("SELECT facility FROM facility_holds").fetchall() == [("x",)]


async def test_files_of_copies_are_nobody_else_s_to_read(copy, tmp_path):
    modes = {stat.S_IMODE(os.stat(file).st_mode) for file in (tmp_path / "copies").glob("*.db*")}
    assert modes == {0o600}


async def test_a_copy_of_a_newer_schema_is_read_where_its_makers_allow_it_and_follows(tmp_path, source):
    with sqlite3.connect(source.path) as con:
        con.execute("UPDATE meta SET min_writer = 99, min_reader = 1")
        con.execute("PRAGMA user_version = 99")
    copy = await Copy.open(RealMachine(), tmp_path / "copies", copy_whole(source.path))
    assert not copy.may_write
    assert await copy.read(names) == []
    leader = apsw.Connection(source.path)
    recording = changes.Recording(leader)
    add(leader, 1, "x")
    await copy.apply([recording.changes()], Position(1, 1))
    assert await copy.read(names) == ["x"]
    recording.close()
    leader.close()
    copy.close()


async def test_a_copy_that_this_build_cannot_read_is_refused_with_both_numbers(tmp_path, source):
    with sqlite3.connect(source.path) as con:
        con.execute("UPDATE meta SET min_writer = 99, min_reader = 99")
        con.execute("PRAGMA user_version = 99")
    with pytest.raises(Invalid, match=f"99.*{migrations.SCHEMA}"):
        await Copy.open(RealMachine(), tmp_path / "copies", copy_whole(source.path))
