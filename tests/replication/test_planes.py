"""Two control planes on one bucket, as `llmgw server` makes them, each with a data directory of its own."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from datetime import timedelta
from pathlib import Path

import attrs
import obstore
import pytest
import trio
import trio.lowlevel
from structlog.testing import capture_logs

from llmgw.admin.limits import Limits
from llmgw.admin.peer_client import PeerClient
from llmgw.domain.errors import Invalid, Unavailable
from llmgw.domain.identity import MachineRole
from llmgw.domain.ids import OwnerId
from llmgw.identity.join_tokens import parse_token
from llmgw.identity.trust import Trust
from llmgw.lease.bucket import open_bucket
from llmgw.settings.load import Loaded, Role, load_bytes
from llmgw.settings.object_place import ObjectPlace
from llmgw.wiring import joining, stores
from llmgw.wiring.identity_files import CA_FOLDER, IDENTITY_FOLDER, mark_joined, save_authority, save_held
from llmgw.wiring.machine import RealMachine
from llmgw.wiring.server import CONTROL_TOKEN_FILE, Running, run_control_plane
from llmgw.wiring.stores import open_store
from tests.identity.conftest import Machine, Plane
from tests.plane_file import plane_file
from tests.replication.conftest import Seaweed
from tests.wiring.test_standby import MODEL, ask, until


def loaded(
    folder: Path,
    place: ObjectPlace,
    name: str,
    *,
    endpoint: str = "",
    seed: str = "llmgw.db",
    host: str = "127.0.0.1",
    plain: str = "anywhere",
) -> Loaded:
    """`plain = "never"`: certificates are all that counts, as between machines; else one control-token is put into both folders."""
    store = f"""
        path = "{seed}"
        replica = "s3://{place.bucket}/{place.prefix.replace(" ", "-")}"
        s3_endpoint = "{endpoint or place.endpoint}"
        s3_credentials = "{place.credentials}"
    """
    text = plane_file(folder, name, store, host=host, plain=plain)
    found = load_bytes(text.encode(), source="test", role=Role.SERVER)
    data_dir = folder / name
    data_dir.mkdir(mode=0o700, exist_ok=True)
    if plain != "never":
        (data_dir / CONTROL_TOKEN_FILE).write_text("a-token-of-control-planes-that-is-long-enough\n")
        (data_dir / CONTROL_TOKEN_FILE).chmod(0o600)
    return found


@asynccontextmanager
async def planes(folder: Path, place: ObjectPlace, *names: str) -> AsyncIterator[list[Running]]:
    """The first of them leads."""
    async with trio.open_nursery() as nursery:
        running = [await nursery.start(run_control_plane, RealMachine(), loaded(folder, place, name)) for name in names]
        yield running
        nursery.cancel_scope.cancel()


async def test_an_order_at_a_standby_is_durable_shown_at_both_and_known_to_the_next_leader(tmp_path: Path, place: ObjectPlace):
    async with planes(tmp_path, place, "one", "two") as (leader, standby):
        status, body = await ask(standby, "PUT", "/api/v1/models/m", MODEL, **{"If-None-Match": "*"})
        assert (status, body["durability"]) == (201, "replicated")
        for one in (standby, leader):
            assert (await ask(one, "GET", "/api/v1/models/m"))[0] == 200
        store = (await ask(standby, "GET", "/api/v1/status"))[1]["store"]
        assert store["mode"] == "replicated"
        assert store["age_s"] < 2
        await until(lambda: bool(leader.controller.peers.healthy()), "the standby is known")
        with capture_logs() as logs:
            leader.controller.events.record("test.last", "cluster", "said just before it let go")
            assert (await ask(leader, "POST", "/api/v1/leader/hand-over", {}))[0] == 202
            await until(lambda: standby.controller.leadership.is_leader, "the other leads")
        assert [one for one in logs if one["log_level"] in ("warning", "error")] == []
        events = (await ask(standby, "GET", "/api/v1/events"))[1]["events"]
        assert [one["text"] for one in events if one["kind"] == "test.last"] == ["said just before it let go"]
        assert (await ask(standby, "GET", "/api/v1/models/m"))[0] == 200
        status, body = await ask(leader, "PUT", "/api/v1/models/n", MODEL | {"name": "n"}, **{"If-None-Match": "*"})
        assert status == 201
        await until(
            lambda: "n" in [one.name for one in leader.controller.live.current.models], "what the new leader writes comes to the old"
        )


async def test_a_start_reads_what_the_cluster_has_while_nobody_leads(tmp_path: Path, place: ObjectPlace):
    async with planes(tmp_path, place, "one") as (leader,):
        cluster = leader.controller.leadership.cluster_id
        assert (await ask(leader, "PUT", "/api/v1/models/m", MODEL, **{"If-None-Match": "*"}))[0] == 201
    with ExitStack() as held:
        opened = await open_store(RealMachine(), loaded(tmp_path, place, "three").settings, held)
        assert opened.cluster_id == cluster
        names = await opened.store.read(lambda con: [name for (name,) in con.execute("SELECT name FROM models")])
        assert names == ["m"]


async def test_two_first_starts_at_once_are_of_one_cluster(tmp_path: Path, place: ObjectPlace):
    found = []

    async def start(name: str) -> None:
        with ExitStack() as held:
            found.append((await open_store(RealMachine(), loaded(tmp_path, place, name).settings, held)).cluster_id)

    async with trio.open_nursery() as nursery:
        for name in ("one", "two", "three"):
            nursery.start_soon(start, name)
    assert len(set(found)) == 1


async def test_the_first_leader_begins_with_the_store_of_one_machine(tmp_path: Path, place: ObjectPlace):
    text = f"""
        [server]
        data_dir = "{tmp_path / "alone"}"
        admin_listen = "127.0.0.1:0"
        [store]
        path = "llmgw.db"
        [router]
        listen = "127.0.0.1:0"
        [auth]
        required = false
    """
    async with trio.open_nursery() as nursery:
        alone = await nursery.start(run_control_plane, RealMachine(), load_bytes(text.encode(), source="test", role=Role.SERVER))
        cluster = alone.controller.leadership.cluster_id
        assert (await ask(alone, "PUT", "/api/v1/models/m", MODEL, **{"If-None-Match": "*"}))[0] == 201
        nursery.cancel_scope.cancel()
    settings = loaded(tmp_path, place, "one", seed=str(tmp_path / "alone" / "llmgw.db"))
    async with trio.open_nursery() as nursery:
        leader = await nursery.start(run_control_plane, RealMachine(), settings)
        assert leader.controller.leadership.cluster_id == cluster
        assert (await ask(leader, "GET", "/api/v1/models/m"))[0] == 200
        nursery.cancel_scope.cancel()
    with sqlite3.connect(tmp_path / "alone" / "llmgw.db") as seed:  # only read
        assert seed.execute("SELECT name FROM models").fetchall() == [("m",)]


async def test_a_bucket_that_lost_its_lease_and_has_data_is_refused_with_what_helps(tmp_path: Path, place: ObjectPlace):
    plain = ObjectPlace(place.bucket, place.prefix.replace(" ", "-"), place.endpoint, place.region, place.credentials)
    async with planes(tmp_path, place, "one"):
        pass
    client = open_bucket(plain, "", timedelta(seconds=5))
    await trio.to_thread.run_sync(obstore.delete, client, ["lease/control-plane.json"])
    with ExitStack() as held, pytest.raises(Invalid, match="store adopt"):
        await open_store(RealMachine(), loaded(tmp_path, place, "one").settings, held)


async def test_a_control_plane_that_knows_a_cluster_begins_none_at_a_place_where_that_is_not(tmp_path: Path, place: ObjectPlace):
    """A mistyped prefix: it would lead an empty store, and have the agents stop every engine."""
    async with planes(tmp_path, place, "one"):
        pass
    elsewhere = attrs.evolve(place, prefix=f"{place.prefix}x")
    with ExitStack() as held, pytest.raises(Invalid, match=r"is one of cluster c-.*, of which nothing is at"):
        await open_store(RealMachine(), loaded(tmp_path, elsewhere, "one").settings, held)
    fresh = loaded(tmp_path, elsewhere, "two").settings
    mark_joined(RealMachine(), fresh.server.data_path, "c-ours")
    with ExitStack() as held, pytest.raises(Invalid, match=r"is one of cluster c-ours, of which nothing is at"):
        await open_store(RealMachine(), fresh, held)
    with ExitStack() as held, pytest.raises(Invalid, match=r"the lease at .* is of cluster c-.*, and this control plane is one of c-ours"):
        await open_store(RealMachine(), loaded(tmp_path, place, "two").settings, held)
    client = open_bucket(attrs.evolve(place, prefix=elsewhere.prefix.replace(" ", "-")), "", timedelta(seconds=5))
    there = await trio.to_thread.run_sync(lambda: [one["path"] for batch in obstore.list(client) for one in batch])
    assert [name for name in there if "probe" not in name] == []


async def test_a_leader_whose_lease_was_removed_goes_on_with_its_store(tmp_path: Path, place: ObjectPlace):
    async with planes(tmp_path, place, "one", "two") as (leader, standby):
        assert (await ask(leader, "PUT", "/api/v1/models/m", MODEL, **{"If-None-Match": "*"}))[0] == 201
        plain = attrs.evolve(place, prefix=place.prefix.replace(" ", "-"))
        client = open_bucket(plain, "", timedelta(seconds=5))
        epoch = leader.controller.leadership.epoch
        await trio.to_thread.run_sync(obstore.delete, client, ["lease/control-plane.json"])
        await until(lambda: leader.controller.leadership.epoch > epoch and leader.controller.leadership.is_leader, "it has taken it anew")
        for one in (leader, standby):
            assert [model.name for model in one.controller.live.current.models] == ["m"]
        assert leader.controller.leadership.record is not None
        assert leader.controller.leadership.record.base


async def test_a_start_without_the_object_store_shows_what_was_read_last(
    tmp_path: Path, place: ObjectPlace, seaweed_server: Seaweed, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(stores, "LOOK_S_MAX", 0.5)
    async with planes(tmp_path, place, "one") as (leader,):
        assert (await ask(leader, "PUT", "/api/v1/models/m", MODEL, **{"If-None-Match": "*"}))[0] == 201
    seaweed_server.freeze()
    try:
        async with planes(tmp_path, place, "one") as (again,):
            assert not again.controller.leadership.is_leader
            status, body = await ask(again, "GET", "/api/v1/models")
            assert (status, [model["name"] for model in body["models"]]) == (200, ["m"])
            store = (await ask(again, "GET", "/api/v1/status"))[1]["store"]
            assert store["age_s"] is None
            seaweed_server.thaw()
            await until(lambda: again.controller.leadership.is_leader, "it leads once the store answers")
    finally:
        seaweed_server.thaw()


async def test_an_object_store_that_is_silent_at_the_start_is_waited_for_and_told_once(
    tmp_path: Path, place: ObjectPlace, seaweed_server: Seaweed
):
    with capture_logs() as logs, ExitStack() as held:
        seaweed_server.freeze()
        try:
            async with trio.open_nursery() as nursery:

                async def start() -> None:
                    await open_store(RealMachine(), loaded(tmp_path, place, "one").settings, held)

                nursery.start_soon(start)
                await until(lambda: any("waiting for it" in one["event"] for one in logs), "it is told")
                await trio.lowlevel.checkpoint()
                seaweed_server.thaw()
        finally:
            seaweed_server.thaw()
    events = [one["event"] for one in logs if "object store" in one["event"]]
    assert events == ["the object store cannot be used yet; waiting for it", "the object store answers"]


class Leader(Plane):
    """The control plane that lets others in; its CA is in its own data directory."""

    @property
    def ca_file(self) -> Path:
        return self.folder / "one" / CA_FOLDER / "ca.pem"

    async def let_in(self, name: str) -> None:
        """What `llmgw join` does on the machine of another control plane."""
        text = await self.token(MachineRole.SERVER, name)
        data_dir = self.folder / name

        def work() -> None:
            joined = joining.join(parse_token(text), name, ["127.0.0.3"])
            save_authority(self.machine, data_dir / CA_FOLDER, joined.ca_key_pem, joined.ca_pem)
            save_held(self.machine, data_dir / IDENTITY_FOLDER, joined.key_pem, joined.certificate_pem, joined.ca_pem)

        await trio.to_thread.run_sync(work)


async def test_a_control_plane_that_was_removed_is_told_so_and_is_good_again_once_it_has_joined_anew(tmp_path: Path, place: ObjectPlace):
    second = loaded(tmp_path, place, "two", host="127.0.0.3", plain="never")
    async with trio.open_nursery() as nursery:
        first = loaded(tmp_path, place, "one", host="127.0.0.2", plain="never")
        leader = Leader(await nursery.start(run_control_plane, RealMachine(), first), tmp_path, Machine())
        peers = leader.running.controller.peers
        await leader.let_in("two")
        async with trio.open_nursery() as its_own:
            await its_own.start(run_control_plane, RealMachine(), second)
            await until(lambda: bool(peers.healthy()), "the standby is known")
            with capture_logs() as logs:
                assert (await leader.call("POST", "/api/v1/identities/server/two/revoke"))[1]["change"] == "revoked"
                await until(lambda: any("does not take our word" in one["event"] for one in logs), "the standby hears why")
                await until(lambda: not peers.healthy(), "the leader does not hear it")
                (word,) = [one for one in logs if "does not take our word" in one["event"]]
                assert "the certificate of server two was revoked" in word["why"]
                refused = [one for one in logs if one["event"] == "a peer was refused"]
                assert [(one["who"], one["code"]) for one in refused] == [("server", "certificate_revoked")]
            its_own.cancel_scope.cancel()
        # A restart alone makes a certificate that nobody knows, by the key that was revoked: it is no way back.
        async with trio.open_nursery() as its_own:
            with capture_logs() as logs:
                (tmp_path / "two" / IDENTITY_FOLDER / "certificate.pem").unlink()
                (tmp_path / "two" / IDENTITY_FOLDER / "key.pem").unlink()
                await its_own.start(run_control_plane, RealMachine(), second)
                await until(lambda: any("certificate of server two was revoked" in one.get("why", "") for one in logs), "it is told")
                assert not peers.healthy()
                await until(lambda: any("does not compete for the lease" in one["event"] for one in logs), "it does not want to lead")
            its_own.cancel_scope.cancel()
        for name in (CA_FOLDER, IDENTITY_FOLDER):
            (tmp_path / "two" / name).rename(tmp_path / "two" / f"{name}.old")
        await leader.let_in("two")
        async with trio.open_nursery() as its_own:
            with capture_logs() as logs:
                await its_own.start(run_control_plane, RealMachine(), second)
                await until(lambda: bool(peers.healthy()), "the standby is known again")
            assert [one for one in logs if "refuse" in one["event"] or "refuse" in str(one.get("why", ""))] == []
            its_own.cancel_scope.cancel()
        nursery.cancel_scope.cancel()


async def test_a_control_plane_that_was_removed_does_not_lead_though_it_reaches_the_bucket_and_nobody_else_leads(
    tmp_path: Path, place: ObjectPlace
):
    first = loaded(tmp_path, place, "one", host="127.0.0.2", plain="never")
    second = loaded(tmp_path, place, "two", host="127.0.0.3", plain="never")
    async with trio.open_nursery() as nursery:
        leader = Leader(await nursery.start(run_control_plane, RealMachine(), first), tmp_path, Machine())
        await leader.let_in("two")
        assert (await leader.call("POST", "/api/v1/identities/server/two/revoke"))[1]["change"] == "revoked"
        status, body = await leader.call("POST", "/api/v1/identities/server/one/revoke")
        assert (status, body["error"]["code"]) == (409, "leads")
        nursery.cancel_scope.cancel()
    async with trio.open_nursery() as nursery:
        with capture_logs() as logs:
            removed = await nursery.start(run_control_plane, RealMachine(), second)
            await until(lambda: any("does not compete for the lease" in one["event"] for one in logs), "it does not want to lead")
        good = await nursery.start(run_control_plane, RealMachine(), first)
        await until(lambda: good.controller.leadership.is_leader, "the one that was not removed leads")
        assert removed.controller.leadership.transitions == 0
        nursery.cancel_scope.cancel()


async def test_a_control_plane_that_never_joined_is_told_so_and_guesses_no_token(tmp_path: Path, place: ObjectPlace):
    """It heard that the control-token file was replaced, its leader said nothing, and soon its address was slowed down."""
    async with trio.open_nursery() as nursery:
        first = loaded(tmp_path, place, "one", host="127.0.0.2", plain="never")
        leader = Leader(await nursery.start(run_control_plane, RealMachine(), first), tmp_path, Machine())
        second = loaded(tmp_path, place, "two", host="127.0.0.3")
        tls = attrs.evolve(second.settings.tls, ca=str(leader.ca_file))
        with capture_logs() as logs:
            await nursery.start(run_control_plane, RealMachine(), attrs.evolve(second, settings=attrs.evolve(second.settings, tls=tls)))
            await until(lambda: any("does not take our word" in one["event"] for one in logs), "the standby hears why")
            await until(lambda: any(one["event"] == "a peer was refused" for one in logs), "the leader says so")
        (word,) = [one["why"] for one in logs if "does not take our word" in one["event"]]
        assert "shows no certificate of this cluster" in word
        assert "llmgw server add" in word
        assert [(one["who"], one["code"]) for one in logs if one["event"] == "a peer was refused"] == [("server", "not_joined")]
        peer = PeerClient(lambda: "a-token-that-counts-nowhere-here", lambda: OwnerId("two-1"), lambda: Trust(others=str(leader.ca_file)))
        for _ in range(Limits().failures_max + 2):
            with pytest.raises(Unavailable) as told:
                await peer.say_changed(leader.url)
            assert told.value.code == "not_joined"
        nursery.cancel_scope.cancel()
