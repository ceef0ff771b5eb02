"""Backup, restore, verify and adopt of a replicated store, on a real object store with real Litestream."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from pathlib import Path

import attrs
import obstore
import pytest
import trio

from llmgw.cli.backup import fetch_store
from llmgw.domain.errors import Conflict, Invalid, NotFound
from llmgw.domain.ids import OwnerId
from llmgw.lease.bucket import open_bucket
from llmgw.lease.object_store import LeaseBucket
from llmgw.lease.record import ROLE, LeaseRecord, RecordState
from llmgw.replication.prefix_store import REQUEST_S, PrefixStore
from llmgw.settings.load import Loaded, Role, load_file
from llmgw.settings.object_place import ObjectPlace
from llmgw.wiring.backup import take_backup
from llmgw.wiring.machine import RealMachine
from llmgw.wiring.restore import restore_backup
from llmgw.wiring.server import Running, run_control_plane
from llmgw.wiring.store_tools import Choice, adopt, status, verify_store
from tests.programs import free_port
from tests.wiring.test_standby import ask, until

pytestmark = pytest.mark.usefixtures("program")
TTL_S = 2.0


class Cluster:
    """Control planes, each with a folder of its own, on one place of the object store."""

    def __init__(self, folder: Path, place: ObjectPlace) -> None:
        self.folder = folder
        self.place = place

    def loaded(self, name: str) -> Loaded:
        data_dir = self.folder / name
        data_dir.mkdir(exist_ok=True)
        for token in ("agent-token", "control-token"):
            file = data_dir / token
            if not file.exists():
                file.write_text(f"{token}-{'x' * 40}\n")
                file.chmod(0o600)
        file = self.folder / f"{name}.toml"
        if not file.exists():
            file.write_text(
                f"""
[server]
name = "{name}"
data_dir = "{data_dir}"
admin_listen = "127.0.0.1:{free_port()}"
[store]
replica = "s3://{self.place.bucket}/{self.place.prefix}"
s3_endpoint = "{self.place.endpoint}"
s3_region = "{self.place.region}"
s3_credentials = "{self.place.credentials}"
[router]
listen = "127.0.0.1:0"
[lease]
ttl_s = {TTL_S}
renew_s = 0.5
poll_s = 0.1
[auth]
required = false
"""
            )
        return load_file(file, role=Role.SERVER)

    @contextlib.asynccontextmanager
    async def running(self, name: str) -> AsyncIterator[Running]:
        """It ends as SIGTERM ends it."""
        async with trio.open_nursery() as nursery:
            found: Running = await nursery.start(run_control_plane, RealMachine(), self.loaded(name))
            yield found
            found.stop()

    async def begun(self, *facilities: str) -> str:
        """A leader has been there, has stored these, and has ended. The cluster's id."""
        async with self.running("first") as one:
            await leads(one)
            for facility in facilities:
                assert await hold(one, facility) < 300
            return one.controller.leadership.cluster_id

    async def holds(self, name: str = "last") -> set[str]:
        """What a leader that begins now has."""
        async with self.running(name) as one:
            await leads(one)
            return await holds(one)

    async def backup(self, name: str, target: Path):
        loaded = self.loaded(name)
        return await take_backup(RealMachine(), loaded, target, secrets=True, fetch=lambda into: fetch_store(loaded.settings, into))

    async def restore(self, name: str, target: Path, *, replace: bool = False, say: Callable[[str], None] = lambda text: None):
        return await restore_backup(RealMachine(), self.loaded(name), target, replace=replace, say=say)

    async def adopt(self, prefix: str = "", *, agree: Callable[[Choice], None] = lambda choice: None, **options):
        options = {"file": None, "replace": False, "go_back": False, "say": lambda text: None, **options}
        return await adopt(RealMachine(), self.loaded("last"), prefix, agree=agree, **options)

    @property
    def leases(self) -> LeaseBucket:
        return LeaseBucket(self.place, 10)

    def record(self) -> LeaseRecord:
        found = self.leases.read(ROLE)
        assert found is not None
        return found

    def objects(self, prefix: str) -> dict[str, bytes]:
        seen = PrefixStore(self.place).look(prefix)
        client = self.client
        return {} if seen is None else {name: bytes(obstore.get(client, name).bytes()) for name in seen.names}

    @property
    def client(self):
        return open_bucket(self.place, "", timedelta(seconds=REQUEST_S))


@pytest.fixture
def cluster(tmp_path: Path, place: ObjectPlace) -> Cluster:
    return Cluster(tmp_path, attrs.evolve(place, prefix=place.prefix.replace(" ", "-")))


async def leads(one: Running) -> None:
    await until(lambda: one.controller.leadership.confirmed(one.controller.machine.now_s()), "it leads")


async def hold(to: Running, facility: str) -> int:
    return (await ask(to, "PUT", "/api/v1/holds", {"facility": facility, "reason": "r"}))[0]


async def holds(of: Running) -> set[str]:
    return {row["facility"] for row in (await ask(of, "GET", "/api/v1/holds"))[1]["holds"]}


async def test_a_backup_of_a_leader_and_of_a_standby_has_all_that_was_answered(cluster, tmp_path):
    async with cluster.running("one") as one:
        await leads(one)
        async with cluster.running("two") as two:
            await until(lambda: bool(one.controller.peers.standbys()), "it stands by")
            for number in range(5):
                await hold(one, f"f{number}")
                await cluster.backup("one", tmp_path / f"one{number}.tar")
                manifest = await cluster.backup("two", tmp_path / f"two{number}.tar")
                assert manifest.facts.mode == "replicated"
                assert manifest.facts.age_s < 2
            assert two.controller.leadership.epoch == 0
    elsewhere = Cluster(tmp_path / "elsewhere", attrs.evolve(cluster.place, prefix=f"{cluster.place.prefix}-elsewhere"))
    elsewhere.folder.mkdir()
    for number in range(5):
        for name in ("one", "two"):
            await elsewhere.restore("x", tmp_path / f"{name}{number}.tar")
            found = await elsewhere.holds("x")
            assert found == {f"f{before}" for before in range(number + 1)}, name


async def test_restore_goes_back_and_keeps_what_was_there(cluster, tmp_path):
    cluster_id = await cluster.begun("x")
    manifest = await cluster.backup("first", tmp_path / "a.tar")  # nothing runs: from the replica
    assert manifest.facts.cluster_id == cluster_id
    async with cluster.running("first") as one:
        await leads(one)
        await hold(one, "later")
    before = cluster.record()
    done = await cluster.restore("first", tmp_path / "a.tar")
    after = cluster.record()
    assert (after.released, after.epoch, after.cluster_id) == (True, done.epoch, cluster_id)
    assert done.epoch >= before.epoch + 1000
    assert done.kept == before.base != after.base
    assert await cluster.holds("second") == {"x"}
    whole = await verify_store(RealMachine(), cluster.loaded("first"), (), every=True)
    assert [one.why for one in whole] == [""] * len(whole)
    assert before.base in [one.name for one in whole]
    (was,) = await verify_store(RealMachine(), cluster.loaded("first"), (before.base,), every=False)
    assert was.rows["facility_holds"] == 2


async def test_a_cluster_that_is_led_elsewhere_is_not_restored(cluster, tmp_path):
    async with cluster.running("one") as one:
        await leads(one)
        await hold(one, "x")
        await cluster.backup("one", tmp_path / "a.tar")
        before = PrefixStore(cluster.place).copies()
        for attempt in (cluster.restore("two", tmp_path / "a.tar", replace=True), cluster.adopt(cluster.record().base, go_back=True)):
            with pytest.raises(Conflict, match=r"one at http://.* leads under epoch 1"):
                await attempt
        assert PrefixStore(cluster.place).copies() == before
        assert await hold(one, "y") < 300


async def test_a_dead_leader_s_lease_is_waited_for_once(cluster, tmp_path):
    await cluster.begun("x")
    await cluster.backup("first", tmp_path / "a.tar")
    released = cluster.record()
    cluster.leases.replace(ROLE, released, attrs.evolve(released, seq=released.seq + 1, write_id="w" * 32, state=RecordState.HELD))
    told: list[str] = []
    await cluster.restore("first", tmp_path / "a.tar", say=told.append)
    assert told[0].startswith("waiting 3 s to see whether first (epoch 1) still leads")
    assert await cluster.holds() == {"x"}


async def test_whoever_takes_the_lease_meanwhile_keeps_it(cluster, tmp_path):
    await cluster.begun("x")
    await cluster.backup("first", tmp_path / "a.tar")
    before = PrefixStore(cluster.place).copies()
    taken: list[LeaseRecord] = []

    def take(text: str) -> None:
        if text.startswith("uploading"):
            now = cluster.record()
            taken.append(attrs.evolve(now, epoch=now.epoch + 1, seq=now.seq + 1, owner=OwnerId("quick-1"), write_id="q" * 32))
            cluster.leases.replace(ROLE, now, taken[0])

    with pytest.raises(Conflict, match=r"quick has taken the lease meanwhile \(epoch 2\); nothing was changed"):
        await cluster.restore("first", tmp_path / "a.tar", say=take)
    assert cluster.record() == taken[0]
    assert PrefixStore(cluster.place).copies() == before


async def test_another_cluster_s_bucket_is_taken_only_when_told(cluster, tmp_path):
    await cluster.begun("x")
    await cluster.backup("first", tmp_path / "a.tar")
    other = Cluster(tmp_path / "other", attrs.evolve(cluster.place, prefix=f"{cluster.place.prefix}-other"))
    other.folder.mkdir()
    await other.begun("theirs")
    before = other.record()
    with pytest.raises(Conflict, match="--replace"):
        await other.restore("first", tmp_path / "a.tar")
    assert other.record() == before
    await other.restore("first", tmp_path / "a.tar", replace=True)
    assert other.record().cluster_id == cluster.record().cluster_id
    assert await other.holds() == {"x"}


async def test_a_lease_whose_record_is_gone_is_repaired_by_adopting(cluster):
    await cluster.begun("x", "y")
    base = cluster.record().base
    cluster.leases.remove(ROLE)
    found = await status(RealMachine(), cluster.loaded("last"))
    assert any("llmgw store adopt" in trouble for trouble in found.troubles), found.troubles
    with pytest.raises(ExceptionGroup) as caught:
        async with cluster.running("last"):
            pass
    assert "llmgw store adopt" in str(caught.value.exceptions[0])
    shown: list[Choice] = []
    done = await cluster.adopt(base, agree=shown.append)
    assert shown[0].now is None
    assert shown[0].new.rows["facility_holds"] == 2
    assert (done.base, cluster.record().base, cluster.record().epoch) == (base, base, done.epoch)
    assert done.epoch >= 1001
    assert await cluster.holds() == {"x", "y"}


async def test_a_damaged_base_is_found_and_another_copy_is_adopted(cluster):
    await cluster.begun("x")
    older = cluster.record().base
    async with cluster.running("first") as one:
        await leads(one)
        await hold(one, "lost")
    base = cluster.record().base
    client = cluster.client
    for name, data in cluster.objects(base).items():
        obstore.put(client, name, data[: len(data) // 2] + bytes(len(data) - len(data) // 2))
    (broken,) = await verify_store(RealMachine(), cluster.loaded("last"), (), every=False)
    assert broken.name == base
    assert broken.why
    shown: list[Choice] = []
    await cluster.adopt(older, agree=shown.append)
    assert shown[0].now is not None
    assert shown[0].now.why
    assert shown[0].newer == (base,)
    assert await cluster.holds() == {"x"}


async def test_what_a_standby_has_left_is_adopted_when_the_bucket_lost_its_copies(cluster):
    await cluster.begun("x", "y")
    record, client = cluster.record(), cluster.client
    for name in cluster.objects(record.base):
        obstore.delete(client, name)
    found = await status(RealMachine(), cluster.loaded("last"))
    assert any("nothing is there" in trouble for trouble in found.troubles)
    (left,) = (cluster.folder / "first" / "copies").glob("*.db")
    await cluster.adopt(file=left)
    assert await cluster.holds() == {"x", "y"}


async def test_an_emptied_bucket_is_restored(cluster, tmp_path):
    cluster_id = await cluster.begun("x")
    await cluster.backup("first", tmp_path / "a.tar")
    client = cluster.client
    obstore.delete(client, [one["path"] for batch in obstore.list(client) for one in batch])
    done = await cluster.restore("first", tmp_path / "a.tar")
    assert cluster.record().cluster_id == cluster_id
    assert done.epoch >= 1001
    assert await cluster.holds() == {"x"}


async def test_nothing_is_adopted_by_accident(cluster):
    await cluster.begun("x")
    base, before = cluster.record().base, cluster.record()
    with pytest.raises(Conflict, match="nothing need be adopted"):
        await cluster.adopt(base)
    with pytest.raises(NotFound, match="has no copy e/7-nowhere"):
        await cluster.adopt("e/7-nowhere")

    def refuse(choice: Choice) -> None:
        raise Invalid("not confirmed")

    with pytest.raises(Invalid, match="not confirmed"):
        await cluster.adopt(base, agree=refuse, go_back=True)
    assert cluster.record() == before
    async with cluster.running("last") as one:
        await leads(one)
        with pytest.raises(Conflict, match="in use by pid"):
            await cluster.adopt(base, go_back=True)


async def test_status_names_what_is_there(cluster):
    cluster_id = await cluster.begun("x")
    found = await status(RealMachine(), cluster.loaded("first"))
    assert (found.mode, found.cluster_id, found.troubles) == ("replicated", cluster_id, ())
    assert found.lease is not None
    assert found.lease.written is not None
    assert (found.lease.holder, found.lease.epoch) == ("", 1)
    (prefix,) = found.prefixes
    assert prefix.is_base
    assert prefix.bytes > 0
    assert found.copy_written_s is not None
    assert found.litestream
