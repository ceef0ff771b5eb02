"""`llmgw lease release`: what a dead control plane held is let go of, and nothing else is touched."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import apsw
import attrs
import pytest

from llmgw.lease.file import LEASE_FILE, LeaseFile
from llmgw.lease.object_store import LeaseBucket
from llmgw.lease.owner_file import OWNER_FILE, write_owner
from llmgw.lease.record import ROLE, LeaseRecord, RecordState
from llmgw.settings.object_place import ObjectPlace
from llmgw.wiring.data_dir import claim
from llmgw.wiring.machine import RealDisk
from tests.cli.conftest import Ran, Run
from tests.cli.test_main import LIMIT_S, SERVER_SIDE, loaded_modules
from tests.lease.places import SECRET, scripted_place
from tests.lease.records import later, record
from tests.s3_server import error, s3_server

HELD = record(epoch=7, seq=40, owner="ctl-1-0123456789abcdef")


class Place:
    """A data directory whose control plane has died, and the lease's file beside it."""

    def __init__(self, folder: Path) -> None:
        self.data_dir = folder / "data"
        self.data_dir.mkdir()
        self.owner_file = self.data_dir / OWNER_FILE
        self.lease_file = folder / LEASE_FILE
        write_owner(RealDisk(), self.owner_file, HELD, ROLE, str(self.lease_file))
        self.write(None, HELD)

    def write(self, expected: LeaseRecord | None, new: LeaseRecord) -> None:
        leases = LeaseFile(self.lease_file)
        leases.replace(ROLE, expected, new)
        leases.close()

    @property
    def record(self) -> LeaseRecord | None:
        leases = LeaseFile(self.lease_file)
        try:
            return leases.read(ROLE)
        finally:
            leases.close()


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture
def release(place: Place, run: Run) -> Run:
    def run_release(owner_file: Path = place.owner_file) -> Ran:
        return run("lease", "release", "--if-owner-file", str(owner_file))

    return run_release


def test_what_a_dead_process_held_is_released_and_keeps_its_epoch(place: Place, release: Run):
    ran = release()
    assert (ran.code, ran.err) == (0, "")
    assert ran.out == "released: the lease of ctl-1-0123456789abcdef under epoch 7\n"
    found = place.record
    assert found is not None
    assert found.write_id != HELD.write_id
    assert found == attrs.evolve(HELD, seq=41, write_id=found.write_id, state=RecordState.RELEASED)


def test_a_living_process_on_the_data_directory_keeps_its_lease(place: Place, release: Run):
    with claim(place.data_dir):
        ran = release()
    assert ran.code == 0
    assert f"in use by pid {os.getpid()}" in ran.out
    assert place.record == HELD


@pytest.mark.parametrize(
    "other",
    [
        later(HELD, owner="ctl-2-aa", epoch=8, tenure="t8"),
        later(HELD, owner="ctl-2-aa", epoch=7, tenure="t7"),
        later(HELD, epoch=8, tenure="t8"),
        later(HELD, tenure="again"),
        later(HELD, state=RecordState.RELEASED),
    ],
    ids=["a successor", "another owner", "a higher epoch", "another tenure", "released before"],
)
def test_a_record_that_the_file_does_not_name_is_left_as_it_is(place: Place, release: Run, other: LeaseRecord):
    place.write(HELD, other)
    ran = release()
    assert ran.code == 0
    assert ran.out.startswith("nothing to release")
    assert place.record == other


def test_without_an_owner_file_or_a_lease_there_is_nothing_to_do_and_nothing_is_made(place: Place, release: Run, tmp_path: Path):
    assert release(tmp_path / "none" / OWNER_FILE).code == 0
    assert not (tmp_path / "none").exists()
    for path in tmp_path.glob("lease.db*"):
        path.unlink()
    assert release().code == 0
    assert not place.lease_file.exists()


@pytest.mark.parametrize("junk", ["", "no json", "[]", '{"owner": "a"}', '{"owner":"a","epoch":"7","tenure":"t","role":"r","store":"s"}'])
def test_a_broken_owner_file_is_named_and_nothing_is_released(place: Place, release: Run, junk: str):
    place.owner_file.write_text(junk)
    ran = release()
    assert ran.code == 3
    assert f"{place.owner_file} is not an owner file" in ran.err
    assert place.record == HELD


def test_a_lease_file_that_another_process_keeps_locked_is_unavailable_and_expires(place: Place, release: Run):
    connection = apsw.Connection(str(place.lease_file))
    connection.execute("BEGIN IMMEDIATE")
    ran = release()
    connection.execute("ROLLBACK")
    connection.close()
    assert ran.code == 6
    assert "expires by itself" in ran.err
    assert place.record == HELD


def test_a_damaged_lease_file_is_an_error_that_names_it(place: Place, release: Run):
    place.lease_file.write_bytes(b"junk" * 4096)
    ran = release()
    assert ran.code == 6
    assert f"{place.lease_file} is damaged" in ran.err


def test_a_disk_that_hangs_does_not_keep_it(place: Place):
    place.owner_file.unlink()
    os.mkfifo(place.owner_file)  # whoever opens it waits for ever
    ran = subprocess.run(
        [sys.executable, "-m", "llmgw", "lease", "release", "--if-owner-file", str(place.owner_file)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ran.returncode == 6
    assert "not released within 3 s" in ran.stderr


def test_it_loads_neither_trio_nor_server_code(place: Place):
    found = loaded_modules("lease", "release", "--if-owner-file", str(place.owner_file))
    rooms = {"llmgw.control", "llmgw.admin", "llmgw.agent", "llmgw.router", "llmgw.store", "llmgw.protocol", "llmgw.lease.keeper"}
    assert not found & {*(set(SERVER_SIDE) - {"apsw"}), *rooms}
    released = place.record
    assert released is not None
    assert released.released


def test_what_a_dead_process_held_on_an_object_store_is_released_there(place: Place, release: Run, tmp_path: Path):
    with s3_server() as server:
        bucket = LeaseBucket(scripted_place(server.address, tmp_path), 5.0)
        bucket.replace(ROLE, None, HELD)
        write_owner(RealDisk(), place.owner_file, HELD, ROLE, bucket.place.address)
        assert SECRET not in place.owner_file.read_text()
        ran = release()
        assert (ran.code, ran.out) == (0, "released: the lease of ctl-1-0123456789abcdef under epoch 7\n"), ran.err
        found = bucket.read(ROLE)
        assert found == attrs.evolve(HELD, seq=41, write_id=found.write_id, state=RecordState.RELEASED)
        again = release()
        assert again.out.startswith("nothing to release: the lease is no longer held by")
        server.script = lambda asked: error(503, "SlowDown")
        assert release().code == 6
    assert release().code == 6, "nobody listens there any more"


@pytest.mark.parametrize("prefix", ["", "a/prefix", "a b"])
def test_the_address_of_a_place_says_all_of_it(prefix: str):
    place = ObjectPlace("bucket", prefix, "http://127.0.0.1:9000", "eu-central-1", "file:/etc/llmgw/keys & more")
    assert ObjectPlace.parse(place.address) == place


@pytest.mark.parametrize("text", ["", "/var/lib/llmgw/lease.db", "s3://bucket/p", "s3://?endpoint=e&region=r&credentials=c"])
def test_what_is_no_address_is_none(text: str):
    assert ObjectPlace.parse(text) is None
