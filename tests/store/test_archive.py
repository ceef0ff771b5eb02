"""The archive of a backup: what was written comes back, and nothing else is taken for one."""

from __future__ import annotations

import io
import json
import resource
import tarfile

import attrs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llmgw.domain.errors import Conflict, Invalid
from llmgw.store.archive import MANIFEST, STORE, Archive, Facts, write_archive

FACTS = Facts("c-1", 7, 4, "0.1.0", "file", 3, "ab" * 32, 1_700_000_000.5, 0.0)
CONTENTS = {STORE: b"the store" * 1000, "llmgw.toml": b"[server]\n", "tokens/admin-token": b"secret\n"}


@pytest.fixture
def archive(tmp_path):
    path = tmp_path / "a.tar"
    write_archive(path, FACTS, CONTENTS)
    return path


def read_all(path) -> dict[str, bytes]:
    with Archive.opened(path) as found:
        return {part.name: found.content(part.name) for part in found.manifest.parts}


def rewritten(path, change) -> None:
    """`change(members)` of the archive's (name, bytes), put back with a plain tar."""
    with tarfile.open(path) as tar:
        members = [(one.name, tar.extractfile(one).read()) for one in tar]
    with tarfile.open(path, "w") as tar:
        for name, data in change(members):
            one = tarfile.TarInfo(name)
            one.size = len(data)
            tar.addfile(one, io.BytesIO(data))


def test_what_was_written_comes_back(archive, tmp_path):
    assert read_all(archive) == CONTENTS
    with Archive.opened(archive) as found:
        assert found.manifest.facts == FACTS
        assert found.names("tokens/") == ["admin-token"]
        found.extract(STORE, tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == CONTENTS[STORE]
    assert (tmp_path / "out").stat().st_mode & 0o777 == archive.stat().st_mode & 0o777 == 0o600
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.tar", "out"]


def test_an_age_that_nobody_knows_is_kept_as_such(tmp_path):
    facts = attrs.evolve(FACTS, age_s=None)
    write_archive(tmp_path / "b.tar", facts, CONTENTS)
    with Archive.opened(tmp_path / "b.tar") as found:
        assert found.manifest.facts == facts


@pytest.mark.parametrize("what", ["file", "folder", "link to nowhere"])
def test_nothing_is_overwritten(tmp_path, what):
    target = tmp_path / "a.tar"
    {"file": lambda: target.write_text("mine"), "folder": target.mkdir, "link to nowhere": lambda: target.symlink_to("nowhere")}[what]()
    with pytest.raises(Conflict, match="is there already"):
        write_archive(target, FACTS, CONTENTS)
    assert [file.name for file in tmp_path.iterdir()] == ["a.tar"]
    assert what != "file" or target.read_text() == "mine"


def test_a_disk_that_takes_no_more_leaves_nothing_half_done(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(Invalid, match=r"a\.tar \(the backup\) cannot be used: File too large"):
            write_archive(tmp_path / "a.tar", FACTS, CONTENTS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_an_archive_that_was_cut_is_refused_wherever_that_was(archive, data):
    whole = archive.read_bytes()
    end = max(i for i, byte in enumerate(whole) if byte) + 1  # what follows is the end's padding
    cut = archive.with_name("cut.tar")
    cut.write_bytes(whole[: data.draw(st.integers(0, end - 1))])
    with pytest.raises(Invalid) as caught, Archive.opened(cut):
        pass
    assert "nothing was changed" in caught.value.message


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_byte_that_changed_is_no_other_content(archive, data):
    whole = bytearray(archive.read_bytes())
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    other = archive.with_name("other.tar")
    other.write_bytes(whole)
    try:
        found = read_all(other)
    except Invalid:
        return
    assert {name: data for name, data in found.items() if name in CONTENTS} == {name: CONTENTS[name] for name in found}  # a date, a mode


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda members: members[1:], "does not begin with manifest.json"),
        (lambda members: members[:-1], "tokens/admin-token is missing"),
        (lambda members: [*members, ("more", b"x")], "does not name 'more'"),
        (lambda members: [*members, members[1]], "or it is there twice"),
        (lambda members: [members[0], (STORE, b"another"), *members[2:]], "its checksum differs"),
        (lambda members: [(MANIFEST, b"[]"), *members[1:]], "cannot be understood"),
        (lambda members: [(MANIFEST, b"{" * 100_000), *members[1:]], "cannot be understood"),
        (lambda members: [], "no whole backup"),
    ],
)
def test_what_is_no_whole_archive_is_named(archive, change, why):
    rewritten(archive, change)
    with pytest.raises(Invalid, match=why), Archive.opened(archive):
        pass


@pytest.mark.parametrize("name", ["../up", "/etc/passwd", "tokens/../../up", "a/b/c", ""])
def test_a_name_that_leads_out_is_none(archive, name):
    def change(members):
        told = json.loads(members[0][1])
        told["parts"][name] = told["parts"].pop("llmgw.toml")
        return [(MANIFEST, json.dumps(told).encode()), *((name if n == "llmgw.toml" else n, data) for n, data in members[1:])]

    rewritten(archive, change)
    with pytest.raises(Invalid, match="no whole backup"), Archive.opened(archive):
        pass


def test_an_archive_of_a_newer_build_says_so(archive):
    def change(members):
        return [(MANIFEST, json.dumps({**json.loads(members[0][1]), "format": 2}).encode()), *members[1:]]

    rewritten(archive, change)
    with pytest.raises(Invalid, match="made by a newer build"), Archive.opened(archive):
        pass


@pytest.mark.parametrize("data", [b"", b"SQLite format 3\0" + b"\0" * 1000, b"x" * 100_000])
def test_another_kind_of_file_is_none(tmp_path, data):
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(Invalid, match="no whole backup of llmgw"), Archive.opened(tmp_path / "x"):
        pass


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(Invalid, match="nowhere"), Archive.opened(tmp_path / "nowhere"):
        pass
    with pytest.raises(Invalid, match="is no file"), Archive.opened(tmp_path):
        pass
