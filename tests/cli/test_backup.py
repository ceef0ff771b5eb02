"""`llmgw backup`, `restore` and `store` on the command line: one sentence and an exit code for whatever is in the way."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from llmgw.store.connection import FileStore
from llmgw.store.meta import ensure_cluster_id
from llmgw.wiring.data_dir import claim
from tests.cli.conftest import Run
from tests.programs import free_port, skip


@pytest.fixture
def config(home: Path) -> Path:
    """A control plane that has ended; its store is of cluster c-1."""
    return machine(home / "one")


def machine(folder: Path, cluster_id: str = "c-1") -> Path:
    folder.mkdir()
    file = folder / "llmgw.toml"
    file.write_text(f'[server]\ndata_dir = "{folder}/data"\nadmin_listen = "127.0.0.1:{free_port()}"\n[store]\n')
    (folder / "data").mkdir()

    async def begin() -> None:
        store = await FileStore.open(folder / "data" / "llmgw.db", trio.to_thread.run_sync)
        await ensure_cluster_id(store, 5, cluster_id)
        store.close()

    trio.run(begin)
    return file


@pytest.fixture
def small_disk(home: Path) -> Iterator[Path]:
    folder = home / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=100k", "llmgw-test", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        skip("this user may not mount a small tmpfs")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_there_and_back(config: Path, run: Run, home: Path):
    made = run("backup", str(home / "a.tar"), "--config", str(config))
    assert (made.code, made.err) == (0, "")
    assert made.out.startswith(f"{home}/a.tar: cluster c-1, epoch 5, no settings of its own, of 2")
    back = run("restore", str(home / "a.tar"), "--config", str(config), "--yes")
    assert (back.code, back.err) == (0, "")
    assert f"restored to {home}/one/data/llmgw.db: cluster c-1, epoch 1005" in back.out
    assert f"what was there is kept: {home}/one/data/llmgw.db.before-restore-1005" in back.out
    assert run("store", "verify", "--config", str(config)).out.startswith(f"{home}/one/data/llmgw.db: whole: cluster c-1, epoch 1005")
    shown = run("store", "status", "--config", str(config))
    assert shown.code == 0
    assert "lease       released, epoch 1005" in shown.out


def test_a_new_machine_begins_with_the_archive_s_settings(config: Path, run: Run, home: Path):
    run("backup", str(home / "a.tar"), "--config", str(config))
    text = config.read_text()
    (home / "one").rename(home / "gone")
    (home / "one").mkdir()
    missing = run("restore", str(home / "a.tar"), "--config", str(config), "--yes")
    assert (missing.code, "there is no file" in missing.err) == (4, True)
    back = run("restore", str(home / "a.tar"), "--config", str(config), "--with-settings", "--yes")
    assert (back.code, back.err) == (0, "")
    assert config.read_text() == text
    again = run("restore", str(home / "a.tar"), "--config", str(config), "--with-settings", "--yes")
    assert again.code == 4
    assert "is there already: leave --with-settings out" in again.err


def test_what_is_in_the_way_is_one_sentence(config: Path, run: Run, home: Path):
    target = home / "a.tar"
    run("backup", str(target), "--config", str(config))
    cases = [
        (("backup", str(target)), 4, "a.tar is there already; a backup is never written over anything"),
        (("backup", str(home / "no" / "a.tar")), 3, "its folder does not exist; make it"),
        (("backup", ""), 2, "the path is empty"),
        (("restore", str(home / "nowhere.tar")), 3, "(the backup) cannot be used: "),
        (("restore", str(config)), 3, "is no whole backup of llmgw: it is no tar archive, or is cut; nothing was changed"),
        (("restore", str(home)), 3, "is no file"),
        (("store", "verify", "e/1-x"), 3, "which has no prefixes"),
        (("store", "adopt", "e/1-x", "--yes"), 3, "has its store in a file; `llmgw restore` takes a backup"),
        (("store", "adopt"), 2, "name either a PREFIX"),
    ]
    before = (home / "one" / "data" / "llmgw.db").read_bytes()
    for args, code, words in cases:
        ran = run(*args, "--config", str(config))
        assert (ran.code, words in ran.err) == (code, True), (args, ran)
        assert "Traceback" not in ran.err
        assert code == 2 or len(ran.err.splitlines()) == 1
    assert (home / "one" / "data" / "llmgw.db").read_bytes() == before
    assert not [file for file in home.rglob(".*") if file.name.startswith((".a.tar", ".llmgw-"))]


def test_a_backup_from_afar_needs_a_token_and_no_settings_file(run: Run, home: Path, monkeypatch: pytest.MonkeyPatch):
    target, server = str(home / "a.tar"), f"http://127.0.0.2:{free_port()}"
    assert run("backup", target, "--server", "https://ctl-1.example:8081").code == 5
    monkeypatch.setenv("LLMGW_TOKEN", "t" * 64)
    ran = run("backup", target, "--server", server)
    assert (ran.code, f"nothing answers at {server}" in ran.err) == (6, True)
    ran = run("backup", target, "--server", server, "--config", "x.toml")
    assert (ran.code, "name one of them" in ran.err) == (2, True)
    assert list(home.iterdir()) == []


def test_without_a_terminal_nothing_is_restored_unless_yes_is_said(config: Path, run: Run, home: Path):
    run("backup", str(home / "a.tar"), "--config", str(config))
    before = (home / "one" / "data" / "llmgw.db").read_bytes()
    new = home / "new.toml"
    for args in (("--config", str(config)), ("--config", str(new), "--with-settings")):
        ran = run("restore", str(home / "a.tar"), *args)
        assert (ran.code, "say --yes" in ran.err) == (2, True)
        assert "cluster c-1, epoch 5" in ran.out
    assert (home / "one" / "data" / "llmgw.db").read_bytes() == before
    assert not new.exists()


def test_another_cluster_s_store_stays(config: Path, run: Run, home: Path):
    run("backup", str(home / "a.tar"), "--config", str(config))
    other = machine(home / "two", "c-2")
    ran = run("restore", str(home / "a.tar"), "--config", str(other), "--yes")
    assert ran.code == 4
    assert "is the store of cluster c-2, and the copy is of c-1: --replace puts it there all the same" in ran.err
    assert "cluster     c-2" in run("store", "status", "--config", str(other)).out
    assert run("restore", str(home / "a.tar"), "--config", str(other), "--yes", "--replace").code == 0


def test_a_full_disk_leaves_nothing_half_done(config: Path, run: Run, home: Path, small_disk: Path):
    ran = run("backup", str(small_disk / "a.tar"), "--config", str(config))
    assert ran.code == 6
    assert "full" in ran.err
    assert len(ran.err.splitlines()) == 1
    assert not list(small_disk.iterdir())
    run("backup", str(home / "a.tar"), "--config", str(config))
    file = home / "three.toml"
    file.write_text(f'[server]\ndata_dir = "{small_disk}/data"\nadmin_listen = "127.0.0.1:{free_port()}"\n[store]\n')
    ran = run("restore", str(home / "a.tar"), "--config", str(file), "--yes")
    assert ran.code == 6
    assert "full" in ran.err
    assert not (small_disk / "data" / "llmgw.db").exists()
    assert not list((small_disk / "data").glob(".llmgw-*"))


def test_a_control_plane_that_does_not_answer_is_named(config: Path, run: Run, home: Path):
    with claim(home / "one" / "data"):
        (home / "one" / "data" / "admin-token").write_text("t" * 64)
        ran = run("backup", str(home / "a.tar"), "--config", str(config))
    assert ran.code == 6
    assert "nothing answers at http://127.0.0.1:" in ran.err
    assert not (home / "a.tar").exists()
