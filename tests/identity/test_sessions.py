"""Machines that joined by certificate, at the real admin port: who comes in, who does not, and what both sides log of it."""

from __future__ import annotations

import os
import ssl
import stat
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import trio
from structlog.testing import capture_logs

from llmgw.domain.errors import Conflict, Denied, Invalid, LlmgwError, Unavailable
from llmgw.domain.identity import MachineIdentity, MachineRole
from llmgw.domain.ids import ClusterId, NodeId, OwnerId
from llmgw.domain.node import Device, DeviceKind, NodeFacts
from llmgw.domain.replica import ReplicaState
from llmgw.identity import ca
from llmgw.identity.join_tokens import JoinToken, parse_token, print_token
from llmgw.identity.trust import Trust
from llmgw.protocol.channel import ChannelClosed
from llmgw.protocol.messages import AgentHello, Goodbye, ServerHello
from llmgw.protocol.websocket import ROUTER_SESSION_PATH, SESSION_PATH, dial
from llmgw.wiring import joining
from llmgw.wiring.identity_files import load_authority, load_held, save_held
from llmgw.wiring.renewal import renew, renew_if_due

from .conftest import file_of, plane, until

A, R, S = MachineRole.AGENT, MachineRole.ROUTER, MachineRole.SERVER


def hello(name: str) -> AgentHello:
    device = Device("cpu", 0, DeviceKind.CPU, "cpu", 8192)
    facts = NodeFacts(
        id=NodeId(f"node-{name}"), name=name, machine_id="m", boot_id="b", build="0", facility="r", labels={}, devices=(device,)
    )
    return AgentHello(facts, ClusterId(""), 0, OwnerId(""))


async def refused_by(url: str, trust: Trust | None, path: str = SESSION_PATH, token: str = "") -> LlmgwError:
    """The error of a dial that must not open a session."""
    with pytest.raises((Denied, Unavailable)) as refused:
        async with dial(url, token, trust, path) as channel:
            await channel.receive()
    return refused.value


def refusals(logs: list[dict]) -> list[dict]:
    return [line for line in logs if line["event"] == "a peer was refused"]


async def test_an_agent_that_joined_becomes_a_known_node_under_the_name_of_its_certificate(tmp_path: Path):
    async with plane(tmp_path) as control:
        held = await control.join(tmp_path / "gpu-1", "gpu-1")
        async with dial(control.url, "", held.trust()) as channel:
            await channel.send(hello("gpu-1"))
            assert isinstance(await channel.receive(), ServerHello)
            await until(lambda: [node.name for node in control.running.controller.nodes.known.values()] == ["gpu-1"], "the node is known")
        async with dial(control.url, "", held.trust()) as channel:
            await channel.send(hello("gpu-2"))
            answer = await channel.receive()
            assert isinstance(answer, Goodbye)
            assert "the certificate is of agent gpu-1, and this agent calls itself gpu-2" in answer.text
        status, body = await control.call("GET", "/api/v1/identities?role=agent")
        assert status == 200
        assert [(row["name"], row["state"], row["serial"]) for row in body["identities"]] == [
            ("gpu-1", "valid", held.leaf.presented.serial)
        ]


async def test_keys_are_for_their_owner_alone_and_no_secret_reaches_the_store_or_the_log(tmp_path: Path):
    with capture_logs() as logs:
        async with plane(tmp_path) as control:
            token = await control.token(A, "gpu-1")
            held = await control.join(tmp_path / "gpu-1", "gpu-1", token=token)
            authority = load_authority(control.machine, tmp_path / "shared" / "ca")
            assert authority is not None
            for key in (tmp_path / "shared" / "ca" / "ca.key", held.key_file):
                assert stat.S_IMODE(os.stat(key).st_mode) == 0o600
            files = [path for path in (tmp_path / "shared").iterdir() if path.is_file()]
            kept = b"".join(path.read_bytes() for path in files)
            secrets = [parse_token(token).secret, authority.key_pem.splitlines()[1], held.key_pem.splitlines()[1]]
            assert authority.pin.encode() in kept
            for secret in secrets:
                assert secret.encode() not in kept
                assert secret not in str(logs)


async def test_a_token_lets_in_one_machine(tmp_path: Path):
    async with plane(tmp_path) as control:
        token = await control.token(A)
        await control.join(tmp_path / "a", "gpu-1", token=token)
        with capture_logs() as logs, pytest.raises(Denied, match="has let in gpu-1 already") as refused:
            await control.join(tmp_path / "b", "gpu-2", token=token)
        assert refused.value.code == "join_token_used"
        assert [line["why"] for line in logs if line["event"] == "a machine was not let in"] == [refused.value.message]
        assert load_held(control.machine, tmp_path / "b", A) is None


async def test_of_many_that_bring_one_token_at_once_one_joins(tmp_path: Path):
    async with plane(tmp_path) as control:
        token = await control.token(R)
        came: list[str] = []
        errors: list[str] = []

        async def join(name: str) -> None:
            try:
                await control.join(tmp_path / name, name, R, token)
                came.append(name)
            except Denied as err:
                errors.append(err.code)

        async with trio.open_nursery() as nursery:
            for number in range(8):
                nursery.start_soon(join, f"r-{number}")
        assert len(came) == 1
        assert errors == ["join_token_used"] * 7


async def test_whoever_lost_the_answer_asks_again_with_the_same_key(tmp_path: Path):
    async with plane(tmp_path) as control:
        token = parse_token(await control.token(A, "gpu-1"))
        key = ca.make_key()
        body = {"token": token.secret, "role": "agent", "name": "gpu-1", "request": ca.make_request(key), "addresses": []}
        first = (await control.call("POST", "/api/v1/join", body))[1]
        again = (await control.call("POST", "/api/v1/join", body))[1]
        assert first["serial"] != again["serial"]
        status, answer = await control.call("POST", "/api/v1/join", {**body, "request": ca.make_request(ca.make_key())})
        assert (status, answer["error"]["code"]) == (403, "join_token_used")


async def test_whoever_was_removed_is_not_let_in_again_by_the_token_of_before(tmp_path: Path):
    async with plane(tmp_path) as control:
        token = parse_token(await control.token(A, "gpu-1"))
        key = ca.make_key()
        for _ in range(2):  # the same key may ask again
            await trio.to_thread.run_sync(lambda: joining.join(token, "gpu-1", (), key_pem=key))
        ended = (await control.call("POST", "/api/v1/identities/agent/gpu-1/revoke"))[1]
        assert (ended["certificates"], ended["join_tokens"]) == (2, 0)
        with pytest.raises(Denied) as refused:
            await trio.to_thread.run_sync(lambda: joining.join(token, "gpu-1", (), key_pem=key))
        assert refused.value.code == "join_token_revoked"


async def test_expired_revoked_unknown_and_misused_tokens_are_told_apart(tmp_path: Path):
    async with plane(tmp_path) as control:
        revoked = await control.token(A, "gpu-1")
        rows = (await control.call("GET", "/api/v1/join-tokens"))[1]["join-tokens"]
        assert [(row["state"], row["name"]) for row in rows] == [("valid", "gpu-1")]
        assert "secret" not in str(rows)
        assert (await control.call("POST", f"/api/v1/join-tokens/{rows[0]['id']}/revoke"))[1]["change"] == "revoked"
        late = await control.token(A, "gpu-2")
        other = parse_token(await control.token(A, "gpu-3"))
        unknown = print_token(JoinToken("cd" * 32, A, "", other.pin, other.addresses))
        as_router = print_token(JoinToken(other.secret, R, "", other.pin, other.addresses))
        wrong_pin = print_token(JoinToken(other.secret, A, "", "sha256:" + "0" * 64, other.addresses))
        control.machine.ahead_s = 3601.0
        for token, name, role, code in [
            (revoked, "gpu-1", A, "join_token_revoked"),
            (late, "gpu-2", A, "join_token_expired"),
            (unknown, "gpu-3", A, "join_token_unknown"),
            (as_router, "gpu-3", R, "join_token_expired"),
            (wrong_pin, "gpu-3", A, "wrong_pin"),
        ]:
            with pytest.raises(Denied) as refused:
                await control.join(tmp_path / "x", name, role, token)
            assert refused.value.code == code
        control.machine.ahead_s = 0.0
        for token, name, role, code in [(as_router, "gpu-3", R, "join_token_role"), (print_token(other), "gpu-4", A, "join_token_name")]:
            with pytest.raises(Denied) as refused:
                await control.join(tmp_path / "x", name, role, token)
            assert refused.value.code == code


async def test_a_name_is_held_by_one_machine_until_its_certificate_is_revoked(tmp_path: Path):
    async with plane(tmp_path) as control:
        free = await control.token(A)
        await control.join(tmp_path / "a", "gpu-1")
        with pytest.raises(Conflict, match="llmgw node rm gpu-1"):
            await control.join(tmp_path / "b", "gpu-1", token=free)
        status, body = await control.call("POST", "/api/v1/join-tokens", {"role": "agent", "name": "gpu-1"})
        assert (status, body["error"]["code"]) == (409, "name_taken")
        assert (await control.call("POST", "/api/v1/identities/agent/gpu-1/revoke"))[1]["change"] == "revoked"
        await control.join(tmp_path / "b", "gpu-1", token=free)  # the refused try did not use it up


async def test_a_revoked_certificate_ends_its_session_at_once_and_opens_none(tmp_path: Path):
    async with plane(tmp_path) as control:
        held, other = await control.join(tmp_path / "a", "gpu-1"), await control.join(tmp_path / "b", "gpu-2")
        async with dial(control.url, "", held.trust()) as channel, dial(control.url, "", other.trust()) as bystander:
            for one, name in ((channel, "gpu-1"), (bystander, "gpu-2")):
                await one.send(hello(name))
                assert isinstance(await one.receive(), ServerHello)
            with capture_logs() as logs:
                await control.call("POST", "/api/v1/identities/agent/gpu-1/revoke")
                with pytest.raises(ChannelClosed, match="the certificate of agent gpu-1 was revoked"), trio.fail_after(10):
                    while True:
                        await channel.receive()
                assert len([line for line in logs if line["event"].startswith("a session ends")]) == 1
            with capture_logs() as logs:
                for _ in range(3):
                    err = await refused_by(control.url, held.trust())
                    assert (err.code, "was revoked" in err.message) == ("certificate_revoked", True)
            assert [line["code"] for line in refusals(logs)] == ["certificate_revoked"]
            assert "gpu-2" in [node.name for node in control.running.controller.nodes.known.values()]
            assert control.running.controller.sessions.connected() == (NodeId("node-gpu-2"),)


async def test_each_wrong_certificate_is_refused_with_one_line_on_either_side(tmp_path: Path):
    async with plane(tmp_path) as control:
        held = await control.join(tmp_path / "a", "gpu-1")
        ours = load_authority(control.machine, tmp_path / "shared" / "ca")
        assert ours is not None
        cluster, now = ours.cluster, control.machine.wall_s()
        stranger = ca.make_ca(cluster, now, "0f" * 16)

        def made(folder: str, authority: ca.Authority, identity: MachineIdentity, at: float) -> Trust:
            key = ca.make_key()
            issued = ca.issue(authority, ca.public_key_of(key), identity, (), at, control.machine.fresh_hex(16))
            save_held(control.machine, tmp_path / folder, key, issued.pem, ours.pem)
            return Trust(ours.pem, certificate=tmp_path / folder / "certificate.pem", key=tmp_path / folder / "key.pem")

        agent = MachineIdentity(cluster, A, "gpu-9")
        cases = [
            (made("1", stranger, agent, now), SESSION_PATH, "certificate_foreign"),
            (made("2", ours, agent, now - 91 * ca.DAY_S), SESSION_PATH, "certificate_expired"),
            (made("3", ours, agent, now + ca.DAY_S), SESSION_PATH, "certificate_not_yet_valid"),
            (made("4", ours, MachineIdentity("c-other", A, "gpu-9"), now), SESSION_PATH, "certificate_foreign"),
            (held.trust(), ROUTER_SESSION_PATH, "certificate_role"),
            (made("5", ours, MachineIdentity(cluster, R, "r"), now), SESSION_PATH, "certificate_role"),
            (Trust(ours.pem), SESSION_PATH, "certificate_missing"),
        ]
        for trust, path, code in cases:
            with capture_logs() as logs:
                errors = [await refused_by(control.url, trust, path) for _ in range(2)]
            if code == "certificate_not_yet_valid":  # the alert of TLS for it names no reason
                assert {err.code for err in errors} <= {"certificate_refused", code}
            else:
                assert {err.code for err in errors} == {code}, [err.message for err in errors]
            assert [line["code"] for line in refusals(logs)] == [code]
            if code in ("certificate_expired", "certificate_not_yet_valid"):
                assert "clock" in refusals(logs)[0]["why"]
            if code == "certificate_expired":
                assert "clock" in errors[0].message
            async with dial(control.url, "", held.trust()) as channel:  # whoever is let in from there ends what was told of it
                await channel.send(hello("gpu-1"))
                await channel.receive()


async def test_the_token_of_the_file_counts_for_nobody_where_plain_is_never(tmp_path: Path):
    async with plane(tmp_path) as control:
        token = control.running.agent_token_file.read_text().strip()
        err = await refused_by(control.url, Trust(control.ca_file.read_text()), token=token)
        assert err.code == "certificate_missing"


async def test_a_plain_text_client_is_told_so_and_here_it_is_one_line(tmp_path: Path):
    async with plane(tmp_path) as control:
        with capture_logs() as logs:
            for _ in range(2):
                err = await refused_by(control.url.replace("https://", "http://"), None, token="x" * 64)
                assert (err.code, "https:// is asked for" in err.message) == ("tls_needed", True)
        assert [line["code"] for line in refusals(logs)] == ["plain_text"]


async def test_a_control_plane_of_another_ca_and_a_machine_that_poses_as_one_are_not_dialled(tmp_path: Path):
    async with plane(tmp_path) as control:
        held = await control.join(tmp_path / "a", "gpu-1")
        stranger = ca.make_ca("c-1", control.machine.wall_s(), "0f" * 16)
        err = await refused_by(control.url, Trust(stranger.pem, certificate=held.certificate_file, key=held.key_file))
        assert (err.code, "another CA" in err.message) == ("certificate", True)
        router = await control.join(tmp_path / "r", "r-1", R, addresses=["127.0.0.3"])
        for one, words in ((router, "router r-1, which is no control plane"), (held, "another role")):
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(one.certificate_file, one.key_file)
            listeners = await trio.open_ssl_over_tcp_listeners(0, context, host="127.0.0.3")

            async def serve(stream: trio.SSLStream) -> None:
                try:
                    await stream.receive_some()
                except trio.BrokenResourceError:
                    pass
                finally:
                    await trio.aclose_forcefully(stream)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.serve_listeners, serve, listeners)
                port = listeners[0].transport_listener.socket.getsockname()[1]
                err = await refused_by(f"https://127.0.0.3:{port}", held.trust())
                assert words in err.message
                nursery.cancel_scope.cancel()


async def test_nobody_but_a_control_plane_gets_a_certificate_for_an_address_of_one(tmp_path: Path):
    async with plane(tmp_path) as control:
        for address in ("127.0.0.2", "LOCALHOST"):
            with pytest.raises(Denied, match="an address of a control plane"):
                await control.join(tmp_path / "r", "r-1", R, addresses=[address])


async def test_a_certificate_is_renewed_by_whoever_shows_it(tmp_path: Path):
    async with plane(tmp_path) as control:
        held = await control.join(tmp_path / "a", "gpu-1", addresses=["10.0.0.1"])
        await trio.to_thread.run_sync(lambda: renew(control.machine, held, [control.url]))
        after = load_held(control.machine, held.folder, A)
        assert after is not None
        assert after.leaf.presented.serial != held.leaf.presented.serial
        assert (after.key_pem, after.leaf.addresses) == (held.key_pem, {"10.0.0.1"})
        assert not await trio.to_thread.run_sync(lambda: renew_if_due(control.machine, held.folder, A, [control.url], ""))
        rows = (await control.call("GET", "/api/v1/identities?role=agent"))[1]["identities"]
        assert [row["issued_for"] for row in rows][1:] == ["renewal"]
        await control.call("POST", "/api/v1/identities/agent/gpu-1/revoke")
        with pytest.raises(Denied, match="was revoked"):
            await trio.to_thread.run_sync(lambda: renew(control.machine, after, [control.url]))
        bare = {"request": ca.make_request(ca.make_key()), "addresses": []}
        assert (await control.call("POST", "/api/v1/renew", bare))[0] == 401


async def test_a_control_plane_renews_its_own_while_connections_go_on(tmp_path: Path):
    async with plane(tmp_path) as control:
        held = await control.join(tmp_path / "a", "gpu-1")
        folder = tmp_path / "ctl-1" / "identity"
        before = load_held(control.machine, folder, S)
        assert before is not None
        async with dial(control.url, "", held.trust()) as channel:
            await channel.send(hello("gpu-1"))
            assert isinstance(await channel.receive(), ServerHello)
            own = control.running.own
            assert own is not None
            assert not await own.renew_if_due(control.running.controller.identities)
            control.machine.ahead_s = 61 * ca.DAY_S
            assert await own.renew_if_due(control.running.controller.identities)
            control.machine.ahead_s = 0.0
            after = load_held(control.machine, folder, S)
            assert after is not None
            assert after.leaf.presented.serial != before.leaf.presented.serial

            where = urlsplit(control.url)
            shown = await trio.to_thread.run_sync(lambda: ssl.get_server_certificate((str(where.hostname), int(where.port or 0))))
            assert shown == after.certificate_file.read_text()
            assert control.running.controller.sessions.connected() == (NodeId("node-gpu-1"),)


async def test_a_server_joins_only_where_the_store_is_replicated(tmp_path: Path):
    async with plane(tmp_path) as control:
        status, body = await control.call("POST", "/api/v1/join-tokens", {"role": "server", "name": "ctl-2"})
        assert (status, body["error"]["code"]) == (409, "no_replicated_store")
        assert "replicated store" in body["error"]["message"]
        # As it is once the store is one:
        control.running.controller.identities.takes_servers = str
        token = await control.token(S, "ctl-2")
        joined = await trio.to_thread.run_sync(lambda: joining.join(parse_token(token), "ctl-2", ["127.0.0.4"]))
        authority = load_authority(control.machine, tmp_path / "shared" / "ca")
        assert authority is not None
        assert joined.ca_key_pem == authority.key_pem


async def test_two_control_planes_of_one_machine_have_one_ca_and_a_standby_lets_machines_in(tmp_path: Path):
    async with plane(tmp_path) as one, plane(tmp_path, file_of(tmp_path, "ctl-2")) as two:
        standby = two if one.running.controller.leadership.is_leader else one
        assert not standby.running.controller.leadership.is_leader
        held = await standby.join(tmp_path / "a", "gpu-1")
        for control in (one, two):
            async with dial(control.url, "", held.trust()) as channel:
                await channel.send(hello("gpu-1"))
                assert isinstance(await channel.receive(), ServerHello)
        await trio.to_thread.run_sync(lambda: renew(standby.machine, held, [standby.url]))
        await standby.call("POST", "/api/v1/identities/agent/gpu-1/revoke")
        for control in (one, two):
            with trio.fail_after(10):
                while True:
                    err = await refused_by(control.url, held.trust())
                    if err.code == "certificate_revoked":
                        break


async def test_a_node_on_which_something_runs_is_not_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async with plane(tmp_path) as control:
        held = await control.join(tmp_path / "a", "gpu-1")
        async with dial(control.url, "", held.trust()) as channel:
            await channel.send(hello("gpu-1"))
            assert isinstance(await channel.receive(), ServerHello)
            controller = control.running.controller
            await until(lambda: bool(controller.nodes.known), "the node is known")

            class Running:
                node, id, state = NodeId("node-gpu-1"), "r-1", ReplicaState.READY

            with monkeypatch.context() as patched:
                patched.setattr(controller, "replicas", lambda: (Running(),))
                status, body = await control.call("DELETE", "/api/v1/nodes/gpu-1")
                assert (status, body["error"]["code"]) == (409, "node_not_empty")
            assert (await control.call("DELETE", "/api/v1/nodes/gpu-1"))[1]["change"] == "removed"
            assert controller.nodes.known == {}
            await until(lambda: not controller.sessions.connected(), "its session is over")
        assert controller.observe().nodes == ()
        assert (await control.call("DELETE", "/api/v1/nodes/gpu-1"))[0] == 404


async def test_on_the_machine_itself_the_token_of_the_file_counts_over_tls_too(tmp_path: Path):
    text = file_of(tmp_path, plain="loopback", host="0.0.0.0")
    async with plane(tmp_path, text) as control:
        token = control.running.agent_token_file.read_text().strip()
        assert control.url.startswith("https://127.0.0.1:")
        async with dial(control.url, token, Trust(control.ca_file.read_text())) as channel:
            await channel.send(hello("here"))
            assert isinstance(await channel.receive(), ServerHello)
        status, body = await control.call("POST", "/api/v1/join-tokens", {"role": "agent"})
        assert (status, body["error"]["code"]) == (409, "no_address")  # 0.0.0.0 tells nobody where it is


async def test_an_address_without_tls_is_not_told_of_a_port_that_speaks_it(tmp_path: Path):
    text = file_of(tmp_path, plain="loopback", host="0.0.0.0").replace("[store]", 'advertise = "http://ctl-1:8081"\n[store]')
    with pytest.RaisesGroup(pytest.RaisesExc(Invalid, match="say https:// there"), flatten_subgroups=True):
        async with plane(tmp_path, text):
            raise AssertionError("it has started")


async def test_on_loopback_nothing_is_made_and_nothing_is_secured(tmp_path: Path):
    async with plane(tmp_path, file_of(tmp_path, plain="loopback", host="127.0.0.1")) as control:
        assert control.url.startswith("http://")
        assert control.running.own is None
        assert not (tmp_path / "shared" / "ca").exists()
        assert not (tmp_path / "ctl-1" / "identity").exists()


async def test_a_ca_of_another_cluster_or_a_lost_key_keeps_a_control_plane_from_starting(tmp_path: Path):
    async with plane(tmp_path) as control:
        await control.call("GET", "/api/v1/status")
    folder = tmp_path / "shared" / "ca"
    folder.rename(tmp_path / "away")
    with pytest.RaisesGroup(pytest.RaisesExc(Conflict, match="its key is not in"), flatten_subgroups=True):
        async with plane(tmp_path):
            raise AssertionError("it has started")
    folder.mkdir()
    stranger = ca.make_ca("c-other", 1_800_000_000.0, "0f" * 16)
    (folder / "ca.key").write_text(stranger.key_pem)
    (folder / "ca.pem").write_text(stranger.pem)
    with pytest.RaisesGroup(pytest.RaisesExc(Invalid, match="of cluster c-other"), flatten_subgroups=True):
        async with plane(tmp_path):
            raise AssertionError("it has started")
