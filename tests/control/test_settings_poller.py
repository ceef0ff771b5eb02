"""The watch over the store's document and the machine's file: when something counts, what is tried first, and what stays."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import attrs
import pytest
import trio

from llmgw.control import settings_boot
from llmgw.control.settings_boot import Failure, Marks
from llmgw.control.settings_poller import AGAIN_S, PAGE, POLL_S, FileWatch, boot, poll_file
from llmgw.domain.errors import Invalid, Unavailable
from llmgw.domain.settings_version import Held, Pause, PlaneSettings, RolloutRow
from llmgw.settings.load import load_text
from llmgw.sim.machine import SimDisk, SimMachine
from llmgw.store import settings as rows
from llmgw.wiring.machine import RealDisk
from tests.control.settings_world import ANN, FILE, FOLDER, SettingsWorld, load, what

OLD, NEW = b"[route]\nretries = 1\n", b"[route]\nretries = 2\n[events]\nkeep_days = 7\n"


class WatchedFile:
    """A file on a simulated machine, and a watch that looks each second."""

    def __init__(self, data: bytes | None = OLD) -> None:
        self.machine = SimMachine(1)
        self.put(data)
        self.watch = FileWatch(self.machine, FILE)

    def put(self, data: bytes | None) -> None:
        if data is None:
            self.machine.disk.files.pop(FILE, None)
        else:
            self.machine.disk.files[FILE] = data

    async def look(self) -> bytes | None:
        await self.machine.sleep_until(self.machine.now_s() + POLL_S)
        return self.watch.changed()


# --- when a file counts


async def test_a_file_counts_when_it_hashes_the_same_twice_and_only_once(autojump_clock):
    file = WatchedFile()
    file.put(NEW)
    assert [await file.look() for _ in range(4)] == [None, NEW, None, None]


async def test_a_half_written_file_is_never_read_wherever_it_is_torn(autojump_clock):
    for length in range(len(NEW)):
        file = WatchedFile()
        file.put(NEW[:length])
        assert await file.look() is None
        file.put(NEW)
        assert [await file.look(), await file.look(), await file.look()] == [None, NEW, None]


async def test_a_file_that_is_written_for_a_long_time_counts_when_it_is_whole(autojump_clock):
    file = WatchedFile()
    for length in range(1, len(NEW), 3):
        file.put(NEW[:length])
        assert await file.look() is None
    file.put(NEW)
    assert [await file.look(), await file.look()] == [None, NEW]


@pytest.mark.parametrize("gone", [None, b""])
async def test_a_file_that_is_empty_or_away_says_nothing_and_the_same_text_after_it_is_no_change(autojump_clock, gone: bytes | None):
    file = WatchedFile()
    file.put(gone)
    assert [await file.look() for _ in range(3)] == [None, None, None]
    file.put(OLD)
    assert [await file.look() for _ in range(3)] == [None, None, None]
    file.put(gone)
    await file.look()
    file.put(NEW)
    assert [await file.look(), await file.look()] == [None, NEW]


async def test_a_file_that_came_back_to_what_is_in_force_between_two_looks_is_no_change(autojump_clock):
    file = WatchedFile()
    file.put(NEW)
    await file.look()
    file.put(OLD)
    assert [await file.look() for _ in range(3)] == [None, None, None]


async def test_a_file_that_was_not_there_at_the_start_counts_when_it_comes(autojump_clock):
    file = WatchedFile(None)
    file.put(NEW)
    assert [await file.look(), await file.look()] == [None, NEW]


async def test_a_file_that_changed_between_its_reading_and_the_watch_counts(autojump_clock):
    machine = SimMachine(1)
    machine.disk.files[FILE] = NEW
    watch = FileWatch(machine, FILE, in_force=OLD)
    found = []
    for _ in range(2):
        await machine.sleep_until(machine.now_s() + POLL_S)
        found.append(watch.changed())
    assert found == [None, NEW]


async def test_asked_again_and_again_it_looks_once_a_second_all_the_same(autojump_clock):
    file = WatchedFile()
    file.put(NEW[:5])
    assert await file.look() is None
    for _ in range(50):  # nudges: the same torn text, hashed twice, must not count
        assert file.watch.changed() is None
    file.put(NEW)
    assert [await file.look(), await file.look()] == [None, NEW]


# B155: what editors, package managers and orchestrators do to a file, on a real disk


@pytest.fixture
def watched(tmp_path: Path):
    machine = SimMachine(1)
    machine.disk = RealDisk()
    return machine, tmp_path / "llmgw.toml"


async def looks(machine: SimMachine, watch: FileWatch) -> list[bytes | None]:
    found = []
    for _ in range(3):
        await machine.sleep_until(machine.now_s() + POLL_S)
        found.append(watch.changed())
    return found


async def test_b155_a_file_replaced_by_rename_written_in_place_or_swapped_behind_a_link_counts_each_time(
    autojump_clock, watched, tmp_path: Path
):
    """mostlygeek/llama-swap#671: a watch on the inode missed all but the write in place."""
    machine, path = watched
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1" / "f").write_bytes(OLD)
    os.symlink(tmp_path / "v1", tmp_path / "current")
    os.symlink(tmp_path / "current" / "f", path)
    watch = FileWatch(machine, path)
    (tmp_path / "v2").mkdir()
    (tmp_path / "v2" / "f").write_bytes(NEW)
    os.symlink(tmp_path / "v2", tmp_path / "next")
    os.replace(tmp_path / "next", tmp_path / "current")  # as a mounted config map does
    assert await looks(machine, watch) == [None, NEW, None]
    (tmp_path / "saved").write_bytes(OLD)
    os.replace(tmp_path / "saved", path)  # as an editor does, in the link's place
    assert await looks(machine, watch) == [None, OLD, None]
    path.write_bytes(NEW)
    assert await looks(machine, watch) == [None, NEW, None]


async def test_b155_a_link_that_leads_nowhere_a_folder_or_a_file_without_rights_leaves_what_is_in_force(
    autojump_clock, watched, tmp_path: Path
):
    machine, path = watched
    path.write_bytes(OLD)
    watch = FileWatch(machine, path)
    assert watch.missing == ""
    path.unlink()
    os.symlink(tmp_path / "nowhere", path)
    assert await looks(machine, watch) == [None, None, None]
    assert watch.missing == "is not there, or is a link to what is not"
    path.unlink()
    path.mkdir()
    assert await looks(machine, watch) == [None, None, None]
    assert watch.missing == "cannot be read: Is a directory"
    path.rmdir()
    os.symlink(path, path)  # a loop
    assert await looks(machine, watch) == [None, None, None]
    assert watch.missing == "cannot be read: Too many levels of symbolic links"
    path.unlink()
    path.write_bytes(NEW)
    assert await looks(machine, watch) == [None, NEW, None]
    assert watch.missing == ""


# --- a process with no settings but its file's


@pytest.mark.parametrize("bad", [b"[route\n", b"[route]\nretrys = 2\n", b'[route]\nretries = "2"\n', b"\xff", b"[[model]]\nx = 1\n"])
async def test_b156_a_broken_file_changes_nothing_and_is_told_once_until_it_changes_again(autojump_clock, bad: bytes):
    """kooshi/llama-swappo#12: a broken file during a reload left half a configuration, or ended the process."""
    machine = SimMachine(1)
    machine.disk.files[FILE] = OLD
    taken, refused = [], []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(poll_file, machine, FILE, load, taken.append, refused.append)
        await machine.sleep_until(machine.now_s() + 1.5)
        machine.disk.files[FILE] = bad
        await machine.sleep_until(machine.now_s() + 10)
        assert taken == []
        (why,) = refused
        assert why.startswith(str(FILE))
        assert "line 1" in why or "route.retr" in why or "model" in why
        machine.disk.files[FILE] = NEW
        await machine.sleep_until(machine.now_s() + 3)
        nursery.cancel_scope.cancel()
    assert [loaded.settings.route.retries for loaded in taken] == [2]
    assert len(refused) == 1


async def test_a_fault_of_the_machine_while_a_file_is_taken_is_told_in_words(autojump_clock):
    machine = SimMachine(1)
    machine.disk.files[FILE] = OLD
    refused: list[str] = []

    def apply(loaded) -> None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), "/etc/x.pem")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(poll_file, machine, FILE, load, apply, refused.append)
        await machine.sleep_until(machine.now_s() + 0.5)
        machine.disk.files[FILE] = NEW
        await machine.sleep_until(machine.now_s() + 5)
        nursery.cancel_scope.cancel()
    (why,) = refused
    assert "ermission denied" in why


# --- the document


async def test_a_new_version_is_in_force_at_the_next_look(autojump_clock):
    world = await SettingsWorld.make("")
    await world.write("route.retries = 5")
    await world.look()
    assert world.settings.route.retries == 5
    assert world.applied == [world.settings]
    assert what(world.in_force, 0) == PlaneSettings(live=2, applied=2)
    assert (world.poller.newest, world.poller.desired) == (2, 2)
    assert world.dry_loads == []
    await world.look(3)
    assert len(world.applied) == 1


async def test_a_version_within_a_second_of_being_written(autojump_clock):
    """The goal of control.md 4: a live change is in force on every healthy process within a second."""
    world = await SettingsWorld.make("")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.poller.run)
        await world.machine.sleep_until(world.machine.now_s() + 0.3)
        await world.write("route.retries = 5")
        await world.machine.sleep_until(world.machine.now_s() + POLL_S)
        assert world.settings.route.retries == 5
        await world.write("route.retries = 6")
        before_s = world.machine.now_s()
        looked = world.poller.looked
        world.poller.nudge()
        await looked.wait()
        assert world.settings.route.retries == 6
        assert world.machine.now_s() == before_s
        nursery.cancel_scope.cancel()


async def test_of_several_versions_between_two_looks_only_the_newest_is_taken(autojump_clock):
    world = await SettingsWorld.make("")
    for retries in range(5):
        await world.write(f"route.retries = {retries}")
    await world.look()
    assert [one.route.retries for one in world.applied] == [4]


async def test_a_version_that_needs_a_restart_is_tried_with_this_machines_file_and_waits(autojump_clock):
    world = await SettingsWorld.make("", file='server.name = "x"')
    await world.write("lease.ttl_s = 30\nroute.retries = 5")
    await world.look(5)
    assert world.dry_loads == [(b'server.name = "x"', "[lease]\nttl_s = 30\n\n[route]\nretries = 5\n")]
    assert (world.settings.lease.ttl_s, world.settings.route.retries) == (15, 5)
    assert what(world.in_force, 0) == PlaneSettings(live=2, applied=1, pending=2)
    assert len(world.applied) == 1


async def test_a_version_that_does_not_load_here_leaves_everything_and_is_told_once(autojump_clock):
    world = await SettingsWorld.make("route.retries = 3")
    before = world.settings
    world.why_not = "tls.certificate: no such file"
    await world.write("lease.ttl_s = 30\nroute.retries = 5")
    await world.look(5)
    assert world.settings is before
    assert world.applied == []
    assert what(world.in_force, 0) == PlaneSettings(live=1, applied=1, refused=2, why="tls.certificate: no such file")
    assert world.told == ["settings.refused: version 2 is not taken here: tls.certificate: no such file"]
    assert len(world.dry_loads) == 1


async def test_a_refused_version_is_tried_again_when_this_machines_file_changes(autojump_clock):
    world = await SettingsWorld.make("", file="log.level = 'info'")
    world.why_not = "no such file"
    await world.write("lease.ttl_s = 30")
    await world.look(3)
    assert (world.in_force.refused, len(world.dry_loads)) == (2, 1)
    world.why_not = ""
    world.put_file("log.level = 'info' # repaired")
    await world.look(4)
    assert what(world.in_force, 0) == PlaneSettings(live=2, applied=1, pending=2)
    assert len(world.dry_loads) == 2


async def test_a_newer_version_takes_the_place_of_a_refused_one(autojump_clock):
    world = await SettingsWorld.make("")
    world.why_not = "no"
    await world.write("lease.ttl_s = 30")
    await world.look(2)
    await world.write("route.retries = 4")
    await world.look()
    assert what(world.in_force, 0) == PlaneSettings(live=3, applied=3)


@pytest.mark.parametrize(
    ("document", "sha256", "why"),
    [
        ("[route]\nretries = 5\n", "0" * 64, "is not what was written"),
        ("[route]\nretrys = 5\n", None, "did you mean route.retries?"),
        ("[server]\nname = 'x'\n", None, "one machine's own key"),
        ("[route", None, "is not TOML"),
        ("[lease]\nttl_s = 3\n", None, "at most a third"),
    ],
)
async def test_a_damaged_or_wrong_version_in_the_store_is_not_applied_and_the_one_before_stays(autojump_clock, document, sha256, why):
    import hashlib

    world = await SettingsWorld.make("route.retries = 3")
    await world.write_raw(document, sha256 or hashlib.sha256(document.encode()).hexdigest())
    await world.look(3)
    assert world.settings.route.retries == 3
    assert (world.in_force.live, world.in_force.refused) == (1, 2)
    assert why in world.in_force.why
    assert len(world.told) == 1
    await world.start()
    assert (world.in_force.live, world.in_force.refused, world.settings.route.retries) == (1, 2, 3)


async def test_absent_is_not_empty_what_is_in_force_stays(autojump_clock):
    world = await SettingsWorld.make(file="route.retries = 7")
    await world.look(3)
    assert world.settings.route.retries == 7
    assert what(world.in_force, 0) == PlaneSettings()
    assert world.applied == []


async def test_a_version_number_that_is_gone_from_the_store_puts_nothing_back(autojump_clock):
    """A store that was put back to a copy from before a version, or replaced by an empty one."""
    world = await SettingsWorld.make("", "route.retries = 3", "route.retries = 4")
    empty = await SettingsWorld.make()
    world.poller._store = empty.store
    await world.look(3)
    assert (world.settings.route.retries, world.in_force.live) == (4, 3)


async def test_a_held_version_goes_back_to_the_newest_that_is_not_held(autojump_clock):
    world = await SettingsWorld.make("", "route.retries = 2", "route.retries = 3")
    assert world.settings.route.retries == 3
    await world.save_row(RolloutRow(held=(Held(3, "the canary failed"),)))
    await world.look()
    assert (world.settings.route.retries, world.in_force.live) == (2, 2)
    assert (world.poller.newest, world.poller.desired) == (3, 2)
    await world.save_row(RolloutRow(held=(Held(2, "x"), Held(3, "y"))))
    await world.look()
    assert world.in_force.live == 1
    await world.save_row(RolloutRow())
    await world.look()
    assert world.in_force.live == 3


async def test_a_held_version_that_needed_a_restart_goes_back_by_another_one(autojump_clock):
    world = await SettingsWorld.make("", "lease.ttl_s = 30")
    assert world.in_force.said(0).applied == 2
    await world.save_row(RolloutRow(held=(Held(2, "x"),)))
    await world.look()
    assert what(world.in_force, 0) == PlaneSettings(live=1, applied=2, pending=1)
    assert world.settings.lease.ttl_s == 30


async def test_where_every_version_is_held_what_is_in_force_stays(autojump_clock):
    world = await SettingsWorld.make("", "route.retries = 2")
    await world.save_row(RolloutRow(held=(Held(1, "x"), Held(2, "y"))))
    await world.look(2)
    assert world.in_force.live == 2


async def test_a_held_version_is_left_for_an_older_one_than_the_newest_where_that_does_not_load_here(autojump_clock):
    world = await SettingsWorld.make("route.retries = 1", "route.retries = 2")
    await world.write_raw("[route]\nretrys = 3\n")
    await world.write("route.retries = 4")
    await world.look()
    assert world.settings.route.retries == 4
    await world.save_row(RolloutRow(held=(Held(4, "x"),)))
    await world.look(3)
    assert (world.settings.route.retries, world.in_force.live, world.in_force.refused) == (2, 2, 3)
    assert world.poller.desired == 3


async def test_a_version_that_does_not_load_here_is_not_gone_below_for_nothing(autojump_clock):
    world = await SettingsWorld.make("route.retries = 1", "route.retries = 2")
    await world.write_raw("[route]\nretrys = 3\n")
    await world.save_row(RolloutRow(held=(Held(1, "x"),)))
    await world.look(3)
    assert world.in_force.live == 2


async def test_a_version_that_was_put_aside_here_is_not_taken_until_another_comes(autojump_clock):
    world = await SettingsWorld.make("", file="log.level = 'info'")
    settings_boot.save_marks(world.machine.disk, FOLDER, Marks(failures=(Failure(2, 2, "boom"),)))
    await world.start()
    await world.write("route.retries = 5")
    await world.look(3)
    assert (world.in_force.live, world.in_force.refused) == (1, 2)
    assert world.in_force.why.endswith("boom")
    await world.write("route.retries = 6")
    await world.look()
    assert what(world.in_force, 0) == PlaneSettings(live=3, applied=3)


async def test_a_store_that_does_not_answer_leaves_what_is_in_force_and_is_read_again(autojump_clock):
    world = await SettingsWorld.make("route.retries = 3")
    await world.look()
    await world.write("route.retries = 4")
    world.store.silent = True
    await world.look(30)
    assert (world.settings.route.retries, world.in_force.refused, world.told) == (3, 0, [])
    world.store.silent = False
    await world.look()
    assert world.settings.route.retries == 4


async def test_the_file_is_watched_while_the_store_is_away(autojump_clock):
    world = await SettingsWorld.make("", file="log.level = 'info'")
    world.store.silent = True
    world.put_file("log.level = 'debug'")
    await world.look(3)
    assert world.in_force.restart_for_file == ("log.level",)


async def test_a_pause_is_seen_and_its_end_too(autojump_clock):
    world = await SettingsWorld.make("")
    await rows.pause(world.store, 1, Pause("works", "ann", 5.0), ANN)
    await world.look()
    assert world.poller.pause == Pause("works", "ann", 5.0)
    await rows.resume(world.store, 1, ANN)
    await world.look()
    assert world.poller.pause is None


async def test_two_looks_at_once_take_a_version_once(autojump_clock):
    world = await SettingsWorld.make("")
    await world.write("lease.ttl_s = 30")
    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(world.poller.look)
    assert (len(world.applied), len(world.dry_loads)) == (1, 1)


# --- this machine's file


async def test_a_changed_file_is_taken_after_two_looks_with_its_objects(autojump_clock):
    world = await SettingsWorld.make(file="route.retries = 1")
    world.put_file("route.retries = 2")
    await world.look()
    assert world.applied == []
    await world.look()
    assert world.settings.route.retries == 2
    assert [loaded.settings.route.retries for loaded in world.files] == [2]


async def test_b156_a_broken_file_leaves_what_is_in_force_and_is_told_with_its_place(autojump_clock):
    world = await SettingsWorld.make("", file="log.level = 'info'")
    for bad, words in (("[log\n", "line 1"), ("log.levle = 'x'", "log.level?"), ("log.level = 3", "log.level: expected a string")):
        world.put_file(bad)
        await world.look(5)
        assert words in world.told[-1]
    assert len(world.told) == 3
    assert (world.applied, world.files, world.in_force.restart_for_file) == ([], [], ())
    world.put_file("log.level = 'debug'")
    await world.look(2)
    assert world.in_force.restart_for_file == ("log.level",)


async def test_a_file_whose_machine_keys_do_not_load_is_not_taken_and_is_tried_again_without_being_changed(autojump_clock):
    world = await SettingsWorld.make("", file="log.level = 'info'")
    world.why_not = "tls.certificate: /no.pem cannot be read"
    world.put_file("log.level = 'info'\ntls.certificate = '/no.pem'\ntls.key = '/no.key'")
    await world.look(5)
    assert world.in_force.restart_for_file == ()
    assert world.files == []
    assert len(world.told) == 1
    assert "/no.pem cannot be read" in world.told[0]
    await world.write("lease.ttl_s = 30")
    await world.look()
    assert "as it stands does not load" in world.in_force.why  # a process that started anew would not come up
    world.why_not = ""
    await world.look(int(AGAIN_S) + 2)
    assert world.in_force.said(0).restart_for_file is True
    assert (world.in_force.pending, world.in_force.refused) == (2, 0)


async def test_a_version_that_did_not_load_is_tried_again_once_what_it_lacked_may_be_there(autojump_clock):
    world = await SettingsWorld.make("", file="log.level = 'info'")
    world.why_not = "metrics.token: /run/token cannot be read"
    await world.write("lease.ttl_s = 30")
    await world.look(5)
    assert (world.in_force.refused, world.in_force.pending, len(world.dry_loads)) == (2, 0, 1)
    world.why_not = ""
    await world.look(int(AGAIN_S) + 2)
    assert (world.in_force.refused, world.in_force.pending) == (0, 2)


async def test_a_file_that_is_gone_is_said_and_keeps_this_process_from_restarting(autojump_clock):
    world = await SettingsWorld.make("", file="log.level = 'info'")
    world.put_file("")
    await world.look(5)
    assert world.told == [f"settings.refused: {FILE} is empty"]
    await world.write("lease.ttl_s = 30")
    await world.look()
    assert (world.in_force.pending, world.in_force.refused) == (0, 2)
    world.put_file("log.level = 'info'")
    await world.look(int(AGAIN_S) + 2)
    assert (world.in_force.pending, world.in_force.refused) == (2, 0)


class ADiskWithLoops(SimDisk):
    """`loop` True: the settings file is a link that leads to itself."""

    loop = False

    def read(self, path: Path) -> bytes | None:
        if self.loop and path == FILE:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        return super().read(path)


async def test_each_thing_that_takes_the_place_of_the_file_is_told_once_and_the_file_when_it_is_back(autojump_clock):
    """A link that leads to itself, in place of a file that was gone already, was told by nobody."""
    machine = SimMachine(1)
    machine.disk = disk = ADiskWithLoops()
    world = await SettingsWorld.make("", file="log.level = 'info'", machine=machine)
    whole = disk.files.pop(FILE)
    await world.look(3)
    disk.loop = True
    await world.look(3)
    assert world.told == [
        f"settings.refused: {FILE} is not there, or is a link to what is not",
        f"settings.refused: {FILE} cannot be read: Too many levels of symbolic links",
    ]
    assert world.poller.file_fault == f"{FILE} cannot be read: Too many levels of symbolic links"
    disk.loop = False
    disk.files[FILE] = whole
    await world.look(3)
    assert world.poller.file_fault == ""
    assert len(world.told) == 2
    assert world.files == []


@pytest.mark.parametrize("text", ["# hello\n", " \n\t\n", "[route]\n"])
async def test_a_file_that_sets_nothing_any_more_is_refused_as_an_empty_one(autojump_clock, text: str):
    """It took every model and key away."""
    file = "[log]\nlevel = 'info'\n[[auth.key]]\nname = 'a'\nkey = 'k'\n"
    world = await SettingsWorld.make(file=file, store=False, file_mode=True)
    world.put_file(text)
    await world.look(5)
    (told,) = world.told
    assert "it sets nothing, which is taken for a file that was not written whole" in told
    assert world.files == []
    world.put_file(file)
    await world.look(3)
    assert world.poller.file_fault == ""


async def test_a_file_that_has_never_set_anything_may_go_on_doing_so(autojump_clock):
    world = await SettingsWorld.make("", file="# all at its default\n")
    world.put_file("# all at its default, still\n")
    await world.look(5)
    assert (world.told, world.poller.file_fault) == ([], "")


async def test_a_file_that_names_another_store_is_not_taken_by_a_process_that_runs(autojump_clock):
    world = await SettingsWorld.make("", file="log.level = 'info'")
    world.put_file("log.level = 'info'\nstore.path = 'other.db'")
    await world.look(5)
    assert "[store] differs" in world.told[-1]
    assert world.in_force.restart_for_file == ()


async def test_a_changed_machine_key_is_tried_together_with_the_document_that_is_in_force(autojump_clock):
    world = await SettingsWorld.make("route.retries = 3", file="log.level = 'info'")
    world.put_file("log.level = 'debug'")
    await world.look(2)
    assert world.dry_loads == [(b"log.level = 'debug'", "[route]\nretries = 3\n")]
    assert world.in_force.said(0).restart_for_file is True


async def test_a_file_put_back_wants_no_restart_any_more(autojump_clock):
    world = await SettingsWorld.make("", file="log.level = 'info'")
    world.put_file("log.level = 'debug'")
    await world.look(2)
    world.put_file("log.level = 'info'")
    await world.look(2)
    assert world.in_force.said(0).restart_for_file is False


async def test_where_nobody_restarts_this_process_no_file_is_tried(autojump_clock):
    world = await SettingsWorld.make(file="log.level = 'info'", restarts=False)
    world.put_file("log.level = 'debug'")
    await world.look(2)
    assert world.dry_loads == []
    assert world.in_force.restart_for_file == ("log.level",)


async def test_cluster_keys_that_a_file_holds_in_vain_change_nothing(autojump_clock):
    world = await SettingsWorld.make("route.retries = 3", file="route.retries = 1")
    world.put_file("route.retries = 2")
    await world.look(2)
    assert world.settings.route.retries == 3


# --- what is kept for the next start


async def run_for(world: SettingsWorld, seconds: float) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(world.poller.run)
        await world.machine.sleep_until(world.machine.now_s() + seconds)
        nursery.cancel_scope.cancel()


async def test_a_start_without_the_store_goes_by_what_was_last_in_force_here(autojump_clock):
    world = await SettingsWorld.make("", file='server.name = "x"')
    await world.write("route.retries = 5\nlease.ttl_s = 30")
    await run_for(world, 2)
    world.store.silent = True
    await world.start()
    assert (world.settings.route.retries, world.settings.lease.ttl_s, world.settings.server.name) == (5, 30, "x")
    assert what(world.in_force, 0) == PlaneSettings(live=2, applied=2)


async def test_a_start_without_the_store_and_without_anything_kept_is_refused(autojump_clock):
    world = await SettingsWorld.make("")
    world.store.silent = True
    with pytest.raises(Unavailable):
        await boot(world.machine, world.store, FOLDER, world.in_force.file)


async def test_a_kept_version_that_is_damaged_is_not_started_with(autojump_clock):
    world = await SettingsWorld.make("route.retries = 5")
    await run_for(world, 2)
    path = FOLDER / settings_boot.CACHE_FILE
    world.machine.disk.files[path] = world.machine.disk.files[path].replace(b"= 5", b"= 6")
    world.store.silent = True
    begun = await boot(world.machine, world.store, FOLDER, world.in_force.file)
    assert begun.read is None
    assert "is not what was written" in begun.why


async def test_what_ran_is_started_with_again_though_a_newer_one_waits_for_its_turn(autojump_clock):
    world = await SettingsWorld.make("")
    await run_for(world, settings_boot.PROVEN_S + 2)
    await world.write("lease.ttl_s = 30")
    await run_for(world, 2)
    await world.start()
    assert world.in_force.started_with == 1
    settings_boot.tell_next(world.machine.disk, FOLDER, 2)
    await world.start()
    assert world.in_force.started_with == 2


async def test_a_version_is_proven_when_it_has_run_for_a_minute_and_not_before(autojump_clock):
    world = await SettingsWorld.make("")
    settings_boot.save_marks(world.machine.disk, FOLDER, Marks(failures=(Failure(1, 1, "boom"),)))
    await world.start()
    await run_for(world, settings_boot.PROVEN_S - 2)
    assert settings_boot.load_marks(world.machine.disk, FOLDER) == Marks(failures=(Failure(1, 1, "boom"),))
    await run_for(world, 4)
    assert settings_boot.load_marks(world.machine.disk, FOLDER) == Marks(proven=1)


async def test_a_version_taken_live_is_not_proven_by_the_time_the_one_before_ran(autojump_clock):
    world = await SettingsWorld.make("")
    await run_for(world, settings_boot.PROVEN_S + 5)
    await world.write("route.retries = 5")
    await run_for(world, 5)
    assert settings_boot.load_marks(world.machine.disk, FOLDER) == Marks(proven=1)


async def test_the_word_which_version_is_next_is_not_lost_by_what_is_remembered_after_it(autojump_clock):
    """A process that is told to restart drains first: where its first minute was over meanwhile, what comes next was forgotten."""
    world = await SettingsWorld.make("")
    await run_for(world, settings_boot.PROVEN_S - 1)
    await world.write("lease.ttl_s = 30")
    await run_for(world, 0.5)
    settings_boot.tell_next(world.machine.disk, FOLDER, 2)
    await run_for(world, 10)
    assert settings_boot.load_marks(world.machine.disk, FOLDER).told == 2
    await world.start()
    assert world.in_force.started_with == 2


async def test_a_full_disk_stops_no_look(autojump_clock):
    world = await SettingsWorld.make("")
    world.machine.disk.fail = OSError(errno.ENOSPC, "No space left on device")
    await world.write("route.retries = 5")
    await run_for(world, 3)
    assert world.settings.route.retries == 5


async def test_a_start_looks_through_pages_of_versions_that_may_not_be_used(autojump_clock):
    world = await SettingsWorld.make("route.retries = 9")
    for number in range(2 * PAGE + 3):
        await world.write(f"route.retries = {number % 2}")
    await world.save_row(RolloutRow(held=tuple(Held(number, "x") for number in range(2, 2 * PAGE + 5))))
    begun = await boot(world.machine, world.store, FOLDER, load_text("", source="f"))
    assert begun.read is not None
    assert (begun.read.version.version, begun.refused) == (1, 0)


async def test_a_bad_edit_cannot_keep_every_control_plane_down(autojump_clock):
    """The newest version that loads is started with, whatever stands above it."""
    world = await SettingsWorld.make("route.retries = 3")
    for _ in range(3):
        await world.write_raw("[route]\nretrys = 5\n")
    await world.start()
    assert (world.in_force.started_with, world.settings.route.retries) == (1, 3)
    assert world.in_force.refused == 4


def test_what_a_test_loads_is_what_a_server_would() -> None:
    with pytest.raises(Invalid):
        load(b"[route]\nretrys = 1")
    assert attrs.evolve(load(b""), path=None).source == str(FILE)
