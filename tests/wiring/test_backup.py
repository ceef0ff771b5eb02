"""Backup and restore of a store that is a file: rehearsed as an operator would, with a control plane that runs and one that does not."""

from __future__ import annotations

import contextlib
import http.client
import stat
from pathlib import Path

import apsw
import attrs
import pytest
import trio
import trio.lowlevel

from llmgw.cli.backup import fetch_from, fetch_store
from llmgw.cli.ctl.places import Target
from llmgw.domain.errors import Conflict, Invalid, LlmgwError, Unauthenticated
from llmgw.lease.file import LEASE_FILE, LeaseFile
from llmgw.lease.record import ROLE
from llmgw.settings.load import Loaded, Role, load_file
from llmgw.store.archive import STORE, Archive, write_archive
from llmgw.wiring.backup import take_backup, take_backup_from_afar
from llmgw.wiring.identity_files import ca_folder, ensure_authority
from llmgw.wiring.machine import RealMachine
from llmgw.wiring.restore import restore_backup
from llmgw.wiring.server import Running, run_control_plane
from llmgw.wiring.store_tools import status, verify_store
from tests.plane_file import plane_file, shared_store
from tests.programs import free_port
from tests.wiring.test_standby import ask

MODES = ("none", "file")
TABLES = ("facility_holds", "cluster_settings", "models", "events", "admin_tokens", "nodes", "api_keys")


def loaded_of(folder: Path, mode: str, name: str = "one") -> Loaded:
    """A machine's file; its store is in `folder`."""
    folder.mkdir(exist_ok=True)
    file = folder / f"{name}.toml"
    store = shared_store(folder) if mode == "file" else ""
    file.write_text(plane_file(folder, name, store, admin_port=free_port()))
    if mode == "file":
        (folder / "shared").mkdir(exist_ok=True)
    return load_file(file, role=Role.SERVER)


@contextlib.asynccontextmanager
async def running(loaded: Loaded):
    """It ends as SIGTERM ends it."""
    async with trio.open_nursery() as nursery:
        found: Running = await nursery.start(run_control_plane, RealMachine(), loaded)
        yield found
        found.stop()


async def hold(to: Running, facility: str) -> int:
    return (await ask(to, "PUT", "/api/v1/holds", {"facility": facility, "reason": "r"}))[0]


async def take(loaded: Loaded, target: Path, secrets: bool = True):
    return await take_backup(RealMachine(), loaded, target, secrets=secrets, fetch=lambda into: fetch_store(loaded.settings, into))


async def put_back(loaded: Loaded, target: Path, replace: bool = False):
    return await restore_backup(RealMachine(), loaded, target, replace=replace, say=lambda text: None)


def store_of(folder: Path, mode: str, name: str = "one") -> Path:
    return folder / "shared" / "llmgw.db" if mode == "file" else folder / name / "state.db"


def rows_of(path: Path) -> dict[str, list[tuple]]:
    with contextlib.closing(apsw.Connection(str(path))) as connection:
        return {table: sorted(connection.execute(f"SELECT * FROM {table}"), key=repr) for table in TABLES}


@pytest.mark.parametrize("mode", MODES)
async def test_a_backup_under_load_has_all_that_was_answered_before_it_and_is_whole_elsewhere(tmp_path, mode):
    loaded = loaded_of(tmp_path / "a", mode)
    answered: list[str] = []
    begun: list[int] = []
    async with running(loaded) as one:

        async def write(worker: int) -> None:
            for number in range(25):
                if await hold(one, f"f{worker}-{number}") < 300:
                    answered.append(f"f{worker}-{number}")

        async with trio.open_nursery() as nursery:
            for worker in range(4):
                nursery.start_soon(write, worker)
            with trio.fail_after(20):
                while len(answered) < 20:
                    await trio.lowlevel.checkpoint()
            begun.append(len(answered))
            manifest = await take(loaded, tmp_path / "a.tar")
        assert len(answered) == 100
    assert manifest.facts.mode == mode
    assert manifest.facts.age_s == 0
    other = loaded_of(tmp_path / "b", mode)
    done = await put_back(other, tmp_path / "a.tar")
    assert done.epoch == manifest.facts.epoch + 1000
    assert not done.kept
    with contextlib.closing(apsw.Connection(str(store_of(tmp_path / "b", mode)))) as connection:
        assert connection.execute("PRAGMA integrity_check").get == "ok"
    async with running(other) as two:
        holds = {row["facility"] for row in (await ask(two, "GET", "/api/v1/holds"))[1]["holds"]}
        assert set(answered[: begun[0]]) <= holds
        assert two.controller.leadership.epoch > done.epoch
        assert two.controller.leadership.cluster_id == manifest.facts.cluster_id
        assert await hold(two, "new") < 300


@pytest.mark.parametrize("mode", MODES)
async def test_every_row_comes_back(tmp_path, mode):
    loaded = loaded_of(tmp_path, mode)
    async with running(loaded) as one:
        await hold(one, "x")
    before = rows_of(store_of(tmp_path, mode))
    manifest = await take(loaded, tmp_path / "a.tar")  # from the files: nothing runs
    async with running(loaded) as one:
        await hold(one, "y")
        await ask(one, "DELETE", "/api/v1/holds/x")
    after = rows_of(store_of(tmp_path, mode))
    done = await put_back(loaded, tmp_path / "a.tar")
    assert rows_of(store_of(tmp_path, mode)) == before
    assert rows_of(Path(done.kept)) == after
    assert done.epoch > manifest.facts.epoch + 1000
    async with running(loaded) as one:
        assert [row["facility"] for row in (await ask(one, "GET", "/api/v1/holds"))[1]["holds"]] == ["x"]
        assert one.controller.leadership.epoch == done.epoch + 1


@pytest.mark.parametrize("mode", MODES)
async def test_a_store_in_use_is_not_restored(tmp_path, mode):
    loaded = loaded_of(tmp_path, mode)
    async with running(loaded) as one:
        await hold(one, "x")
        await take(loaded, tmp_path / "a.tar")
        with pytest.raises(Conflict, match="in use by pid"):
            await put_back(loaded, tmp_path / "a.tar")
        assert await hold(one, "y") < 300


async def test_another_control_plane_of_the_machine_keeps_its_store(tmp_path):
    loaded, idle = loaded_of(tmp_path, "file"), loaded_of(tmp_path, "file", "two")
    async with running(loaded) as one:
        await take(loaded, tmp_path / "a.tar")
        with pytest.raises(Conflict, match=r"one at http://.* leads under epoch 1: end every control plane"):
            await put_back(idle, tmp_path / "a.tar")
        assert await hold(one, "y") < 300


async def test_a_store_that_somebody_has_open_without_leading_is_not_restored(tmp_path):
    loaded = loaded_of(tmp_path, "file")
    async with running(loaded):
        await take(loaded, tmp_path / "a.tar")
    with contextlib.closing(apsw.Connection(str(store_of(tmp_path, "file")))) as reader:
        reader.execute("SELECT * FROM meta").fetchall()
        with pytest.raises(Conflict, match="another process has the store"):
            await put_back(loaded, tmp_path / "a.tar")


@pytest.mark.parametrize("mode", MODES)
async def test_another_cluster_s_store_is_replaced_only_when_told(tmp_path, mode):
    loaded, other = loaded_of(tmp_path / "a", mode), loaded_of(tmp_path / "b", mode)
    async with running(loaded) as one:
        await hold(one, "x")
        token = one.admin_token
    async with running(other) as two:
        await hold(two, "theirs")
        theirs = two.admin_token
    before = rows_of(store_of(tmp_path / "b", mode))
    manifest = await take(loaded, tmp_path / "a.tar")
    with pytest.raises(Conflict, match="--replace"):
        await put_back(other, tmp_path / "a.tar")
    assert rows_of(store_of(tmp_path / "b", mode)) == before
    done = await put_back(other, tmp_path / "a.tar", replace=True)
    assert rows_of(Path(done.kept)) == before
    assert "admin-token" in done.tokens
    async with running(other) as two:
        assert two.controller.leadership.cluster_id == manifest.facts.cluster_id
        assert two.admin_token == token != theirs


async def test_tokens_that_are_there_stay_unless_told(tmp_path):
    loaded, other = loaded_of(tmp_path / "a", "none"), loaded_of(tmp_path / "b", "none")
    async with running(loaded):
        pass
    await take(loaded, tmp_path / "a.tar")
    (tmp_path / "b" / "one").mkdir()
    (tmp_path / "b" / "one" / "agent-token").write_text("of-my-own-" + "x" * 40)
    done = await put_back(other, tmp_path / "a.tar")
    assert done.tokens_left == ("agent-token",)
    assert done.tokens == ("admin-token",)
    assert (tmp_path / "b" / "one" / "agent-token").read_text().startswith("of-my-own")


async def test_the_ca_goes_with_it_and_is_only_its_owner_s_to_read(tmp_path):
    loaded, other = loaded_of(tmp_path / "a", "file"), loaded_of(tmp_path / "b", "file")
    async with running(loaded) as one:
        folder = ca_folder(loaded.settings)
        ensure_authority(RealMachine(), folder, one.controller.leadership.cluster_id)
        await take(loaded, tmp_path / "a.tar")
        await take(loaded, tmp_path / "bare.tar", secrets=False)
    assert {"ca.key", "ca.pem"} <= set((await put_back(other, tmp_path / "a.tar")).tokens)
    for name in ("ca.key", "ca.pem"):
        restored = ca_folder(other.settings) / name
        assert restored.read_bytes() == (folder / name).read_bytes()
        assert stat.S_IMODE(restored.stat().st_mode) == 0o600
    key = (folder / "ca.key").read_bytes()
    assert key in (tmp_path / "a.tar").read_bytes()
    assert key not in (tmp_path / "bare.tar").read_bytes()


async def test_without_secrets_no_token_is_in_it(tmp_path):
    loaded = loaded_of(tmp_path, "file")
    async with running(loaded) as one:
        await take(loaded, tmp_path / "a.tar", secrets=False)
        await take(loaded, tmp_path / "b.tar")
        token = one.admin_token.encode()
    with Archive.opened(tmp_path / "a.tar") as found:
        assert [part.name for part in found.manifest.parts] == [STORE, "llmgw.toml"]
    assert token not in (tmp_path / "a.tar").read_bytes()
    assert token in (tmp_path / "b.tar").read_bytes()


async def test_a_backup_from_afar_is_the_store_alone_and_can_be_restored(tmp_path):
    loaded = loaded_of(tmp_path, "file")
    async with running(loaded) as one:
        assert await hold(one, "room-1") == 201
        there = Target(one.admin_url, one.admin_token)
        made = await take_backup_from_afar(RealMachine(), tmp_path / "a.tar", lambda into: fetch_from(there, into))
        assert ([part.name for part in made.parts], made.facts.mode) == ([STORE], "file")
        with pytest.raises(Unauthenticated):
            wrong = Target(one.admin_url, "x" * 64)
            await take_backup_from_afar(RealMachine(), tmp_path / "b.tar", lambda into: fetch_from(wrong, into))
        assert one.admin_token.encode() not in (tmp_path / "a.tar").read_bytes()
    assert [file.name for file in tmp_path.iterdir() if "b.tar" in file.name] == []
    await put_back(loaded_of(tmp_path / "elsewhere", "file"), tmp_path / "a.tar")
    with contextlib.closing(apsw.Connection(str(store_of(tmp_path / "elsewhere", "file")))) as connection:
        assert connection.execute("SELECT facility FROM facility_holds").get == "room-1"


async def test_a_damaged_store_is_put_aside_as_it_lies(tmp_path):
    loaded = loaded_of(tmp_path, "file")
    async with running(loaded) as one:
        await hold(one, "x")
        await take(loaded, tmp_path / "a.tar")
    path = store_of(tmp_path, "file")
    junk = b"junk" * 20_000
    path.write_bytes(junk)
    path.with_name("llmgw.db-wal").write_bytes(b"old log")
    done = await put_back(loaded, tmp_path / "a.tar")
    assert path.with_name(done.kept.rpartition("/")[2]).read_bytes() == junk
    assert not path.with_name("llmgw.db-wal").exists()
    async with running(loaded) as one:
        assert [row["facility"] for row in (await ask(one, "GET", "/api/v1/holds"))[1]["holds"]] == ["x"]


async def test_a_backup_that_is_damaged_inside_changes_nothing(tmp_path):
    loaded = loaded_of(tmp_path, "file")
    async with running(loaded):
        await take(loaded, tmp_path / "a.tar")
    with Archive.opened(tmp_path / "a.tar") as found:
        facts = found.manifest.facts
        found.extract(STORE, tmp_path / "s")
    damaged = bytearray((tmp_path / "s").read_bytes())
    damaged[4096:8192] = b"\xff" * 4096
    write_archive(tmp_path / "b.tar", facts, {STORE: bytes(damaged)})
    write_archive(tmp_path / "c.tar", attrs.evolve(facts, cluster_id="c-other"), {STORE: (tmp_path / "s").read_bytes()})
    write_archive(tmp_path / "d.tar", attrs.evolve(facts, schema=99), {STORE: (tmp_path / "s").read_bytes()})
    before = rows_of(store_of(tmp_path, "file"))
    for name, why in (("b", "is damaged"), ("c", "not the one that its manifest describes"), ("d", "upgrade llmgw")):
        with pytest.raises(Invalid, match=why):
            await put_back(loaded, tmp_path / f"{name}.tar")
    assert rows_of(store_of(tmp_path, "file")) == before
    assert not [file for file in (tmp_path / "shared").iterdir() if "restore" in file.name or file.name.startswith(".llmgw")]


async def test_a_backup_that_fails_leaves_nothing_behind(tmp_path):
    loaded = loaded_of(tmp_path, "file")
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(Invalid, match="there is no store at"):
        await take(loaded, out / "a.tar")

    def fails(into: Path):
        into.write_bytes(b"half")
        raise Invalid("no")

    async with running(loaded):
        with pytest.raises(LlmgwError, match="no"):
            await take_backup(RealMachine(), loaded, out / "a.tar", secrets=True, fetch=fails)
    assert not list(out.iterdir())


async def test_the_lease_of_the_store_carries_on_above(tmp_path):
    loaded = loaded_of(tmp_path, "file")
    async with running(loaded):
        await take(loaded, tmp_path / "a.tar")
    done = await put_back(loaded, tmp_path / "a.tar")
    with contextlib.closing(LeaseFile(tmp_path / "shared" / LEASE_FILE)) as leases:
        record = leases.read(ROLE)
    assert record is not None
    assert record.released
    assert record.epoch == done.epoch


@pytest.mark.parametrize("mode", MODES)
async def test_status_and_verify_tell_of_a_file(tmp_path, mode):
    loaded = loaded_of(tmp_path, mode)
    found = await status(RealMachine(), loaded)
    assert found.troubles == (f"there is no store at {store_of(tmp_path, mode)} yet",)
    async with running(loaded) as one:
        cluster_id = one.controller.leadership.cluster_id
        found = await status(RealMachine(), loaded)
        assert (found.mode, found.cluster_id, found.troubles) == (mode, cluster_id, ())
        assert mode == "none" or (found.lease is not None and found.lease.holder == "one")
        (whole,) = await verify_store(RealMachine(), loaded, (), every=False)
        assert (whole.why, whole.found.cluster_id) == ("", cluster_id)
    path = store_of(tmp_path, mode)
    data = bytearray(path.read_bytes())
    data[4096:8192] = b"\xff" * 4096
    path.write_bytes(data)
    (broken,) = await verify_store(RealMachine(), loaded, (), every=False)
    assert "fails its check" in broken.why or "damaged" in broken.why


async def test_a_copy_is_an_administrator_s_to_ask_for(tmp_path):
    loaded = loaded_of(tmp_path, "none")
    async with running(loaded) as one:

        def get(token: str) -> tuple[int, dict[str, str], bytes]:
            connection = http.client.HTTPConnection(one.admin_url.removeprefix("http://"), timeout=20)
            connection.request("GET", "/api/v1/store/copy", headers={"Authorization": f"Bearer {token}"} if token else {})
            answer = connection.getresponse()
            body = answer.read()
            connection.close()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, body

        status_, headers, body = await trio.to_thread.run_sync(get, one.admin_token)
        assert status_ == 200
        assert body.startswith(b"SQLite format 3\0")
        assert (headers["x-store-mode"], headers["content-length"]) == ("none", str(len(body)))
        assert (await trio.to_thread.run_sync(get, ""))[0] == 401
    assert not list((tmp_path / "one").glob("copy-*"))
