"""The record as bytes, the timings that belong together, and the two files a control plane keeps of its lease."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llmgw.domain.errors import Invalid
from llmgw.domain.ids import ClusterId, OwnerId
from llmgw.lease.epoch_file import read_epoch, write_epoch
from llmgw.lease.owner_file import parse_owner, write_owner
from llmgw.lease.record import NUMBER_MAX, RECORD_BYTES_MAX, ROLE, TTL_S_MAX, LeaseRecord, RecordState, decode, encode
from llmgw.lease.timings import LeaseTimings
from llmgw.sim.machine import SimDisk
from tests.lease.records import later, record

FILE = Path("/data/epoch")
NAMES = st.text(min_size=1, max_size=40).filter(lambda text: not re.search("[\ud800-\udfff]", text))
RECORDS = st.builds(
    LeaseRecord,
    cluster_id=NAMES.map(ClusterId),
    epoch=st.integers(1, NUMBER_MAX),
    owner=NAMES.map(OwnerId),
    tenure=NAMES,
    write_id=NAMES,
    boot_id=st.just(""),
    seq=st.integers(1, NUMBER_MAX),
    ttl_s=st.floats(0.5, TTL_S_MAX),
    state=st.sampled_from(RecordState),
    base=st.just("e/1-ab"),
    settings_version=st.integers(0, NUMBER_MAX),
)


@given(RECORDS)
def test_a_record_is_read_back_as_it_was_written(written: LeaseRecord):
    assert decode(encode(written)) == written


@given(RECORDS, RECORDS)
def test_two_records_have_the_same_bytes_only_if_they_are_equal(one: LeaseRecord, other: LeaseRecord):
    assert (encode(one) == encode(other)) is (one == other)


def test_what_a_newer_build_adds_is_skipped_and_what_an_older_one_lacks_has_its_default():
    values = json.loads(encode(record()))
    del values["schema"], values["base"]
    read = decode(json.dumps(values | {"colour": "red"}).encode())
    assert (read.schema, read.base) == (0, "")


def test_all_faults_are_named_at_once():
    values = json.loads(encode(record())) | {"epoch": 0, "ttl_s": "15", "state": "gone", "seq": True}
    del values["owner"]
    with pytest.raises(Invalid) as refused:
        decode(json.dumps(values).encode())
    assert [fault.path for fault in refused.value.faults] == ["epoch", "owner", "seq", "ttl_s", "state"]


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"7", b"null", b"\xff\xfe", b"[" * 100_000, b'{"a": ' + b" " * RECORD_BYTES_MAX + b"1}"],
    ids=["empty", "cut", "list", "number", "null", "no text", "deep", "long"],
)
def test_bytes_that_are_no_record_are_refused(data: bytes):
    with pytest.raises(Invalid, match="the lease's record"):
        decode(data)


@pytest.mark.parametrize("ttl_s", ["NaN", "Infinity", "-1", "0", "1e9"])
def test_a_ttl_that_would_keep_everybody_out_is_refused(ttl_s: str):
    data = encode(record()).replace(b'"ttl_s":15.0', f'"ttl_s":{ttl_s}'.encode())
    with pytest.raises(Invalid, match="ttl_s"):
        decode(data)


def test_only_a_higher_epoch_or_another_holder_of_ours_is_proof():
    held = record(epoch=7, seq=3)
    assert not later(held).deposes(held)
    assert not record(epoch=6, seq=90, owner="b-1").deposes(held)
    assert record(epoch=8, owner="b-1").deposes(held)
    assert later(held, owner="b-1").deposes(held)
    assert later(held, tenure="again").deposes(held)


# --- timings


@given(st.floats(2, TTL_S_MAX), st.floats(0.01, 1.0), st.floats(0.05, 60))
@example(15.067015942157822, 1.0, 1.0)  # three times a third of it is more than the whole
def test_what_the_settings_allow_fits_together(ttl_s: float, share: float, poll_s: float):
    timings = LeaseTimings.of(ttl_s, ttl_s / 3 * share, poll_s)
    assert timings.request_timeout_s + timings.retry_s <= timings.renew_s * (1 + 1e-9)
    assert timings.renew_s < timings.valid_s(ttl_s) < ttl_s < timings.wait_s(ttl_s)


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"ttl_s": 15.0, "renew_s": 5.1}, "renew_s"),
        ({"request_timeout_s": 4.5}, "request_timeout_s"),
        ({"poll_s": 0.0}, "poll_s"),
        ({"ttl_s": 301.0}, "ttl_s"),
        ({"ttl_s": float("nan")}, "ttl_s"),
        ({"ttl_s": 1.2, "renew_s": 0.4, "request_timeout_s": 0.2, "retry_s": 0.1}, "ttl_s"),
    ],
)
def test_timings_that_cannot_work_together_are_refused_by_name(values: dict[str, float], fault: str):
    with pytest.raises(Invalid) as refused:
        LeaseTimings(**values)
    assert fault in [fault.path for fault in refused.value.faults]


# --- the files


def test_the_epoch_file_only_rises():
    disk = SimDisk()
    assert read_epoch(disk, FILE) == 0
    write_epoch(disk, FILE, 7)
    write_epoch(disk, FILE, 3)
    assert read_epoch(disk, FILE) == 7
    write_epoch(disk, FILE, NUMBER_MAX)
    assert read_epoch(disk, FILE) == NUMBER_MAX


@pytest.mark.parametrize("junk", [b"", b"seven", b"-1", b"1.5", b"9" * 17, b"9" * 16, b"\xff", "٣".encode()])
def test_an_epoch_file_with_junk_in_it_is_refused_by_name_and_kept(junk: bytes):
    disk = SimDisk()
    disk.files[FILE] = junk
    with pytest.raises(Invalid, match=str(FILE)):
        read_epoch(disk, FILE)
    with pytest.raises(Invalid):
        write_epoch(disk, FILE, 7)
    assert disk.files[FILE] == junk


def test_the_owner_file_names_one_tenure():
    disk = SimDisk()
    held = record(epoch=7)
    write_owner(disk, FILE, held, ROLE, "/store/lease.db")
    found = parse_owner(disk.files[FILE], FILE)
    assert (found.role, found.store) == (ROLE, "/store/lease.db")
    assert found.names(later(held))
    assert not found.names(later(held, epoch=8))
    assert not found.names(later(held, tenure="again"))
