"""The agents' end: token before anything, messages over a real WebSocket, and bad peers that disturb nobody."""

from __future__ import annotations

import base64
import json
import os

import pytest
import trio

from llmgw.admin.limits import Limits
from llmgw.domain.errors import Denied, Unavailable
from llmgw.domain.ids import ClusterId, NodeId, OwnerId
from llmgw.domain.node import Device, DeviceKind, NodeFacts
from llmgw.protocol.channel import ChannelClosed
from llmgw.protocol.codec import MESSAGE_BYTES_MAX, encode
from llmgw.protocol.messages import AgentHello, Goodbye, Heartbeat, Inventory, LeaderHello, LogChunk, LogRequest, ServerHello
from llmgw.protocol.websocket import SESSION_PATH, dial

from .conftest import ADMIN, AGENT, DEADLINE_S, OPERATOR, VIEWER, running_admin, until


def facts(name: str = "gpu-1") -> NodeFacts:
    return NodeFacts(
        id=NodeId(f"node-{name}"),
        name=name,
        machine_id="m",
        boot_id=f"boot-{name}",
        build="0.1.0",
        facility="room-1",
        labels={"gpu": "h100"},
        devices=(Device("cpu", 0, DeviceKind.CPU, "cpu", 8192),),
    )


async def greet(channel, name: str = "gpu-1") -> None:
    """What an agent does first: hello, and the full inventory that answers the leader's barrier."""
    await channel.send(AgentHello(facts(name), ClusterId(""), 0, OwnerId("")))
    assert isinstance(await channel.receive(), ServerHello)
    barrier = await channel.receive()
    assert isinstance(barrier, LeaderHello)
    await channel.send(Inventory(facts(name), (), barrier.token.epoch, barrier.token.owner))


def url(admin) -> str:
    return f"http://127.0.0.1:{admin.port}"


async def nodes(admin) -> dict[str, dict]:
    return {node["name"]: node for node in (await admin.call("GET", "/api/v1/nodes")).json["nodes"]}


async def test_an_agent_with_the_token_becomes_a_known_node(admin):
    async with dial(url(admin), AGENT) as channel:
        await greet(channel)
        await until(lambda: admin.controller.observe().nodes[0].state.value == "ready")
        node = (await nodes(admin))["gpu-1"]
        assert (node["state"], node["connected"], node["facility"], node["labels"]) == ("ready", True, "room-1", {"gpu": "h100"})
        assert node["devices"][0]["total_mib"] == 8192
    await until(lambda: not admin.controller.sessions.connected())


@pytest.mark.parametrize("token", ["wrong", ADMIN, VIEWER, "k\xe9y"])
async def test_an_agent_with_another_token_is_refused_before_anything(admin, token):
    with pytest.raises(Denied):
        async with dial(url(admin), token):
            pass
    assert admin.controller.sessions.connected() == ()


async def test_the_agents_token_opens_no_other_door(admin):
    assert (await admin.call("GET", "/api/v1/status", token=AGENT)).status == 401


HANDSHAKE = (
    "GET {path} HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: {version}\r\n{more}\r\n"
)


def handshake(path: str = SESSION_PATH, version: str = "13", more: str = f"Authorization: Bearer {AGENT}\r\n") -> bytes:
    return HANDSHAKE.format(path=path, key=base64.b64encode(os.urandom(16)).decode(), version=version, more=more).encode()


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (handshake(more=""), 401),
        (handshake(more="Authorization: Bearer \xff\r\n"), 401),
        (handshake(path="/api/v1/status"), 404),
        (handshake(path="/elsewhere"), 404),
        (handshake(version="8"), 400),
        (handshake(more=f"Authorization: Bearer {AGENT}\r\nX: " + "x" * 20_000 + "\r\n"), 431),
    ],
)
async def test_a_handshake_that_is_not_an_agents_is_refused_with_an_error(admin, data, status):
    answer = await admin.raw(data)
    assert answer.status == status
    if status != 400:
        assert answer.code


async def test_a_plain_request_at_the_sessions_path_is_no_session(admin):
    assert (await admin.call("GET", SESSION_PATH)).status == 404


BAD = {
    "not json": b"{",
    "not an object": b"[]",
    "unknown type": b'{"type": "Nonsense"}',
    "empty": b"",
    "not utf-8": b"\xff\xfe",
    "deep": b"[" * 100_000,
    "a message of the other side": encode(ServerHello(ClusterId("c1"), OwnerId("o"), "b")),
    "missing fields": b'{"type": "AgentHello"}',
    "nan": b'{"type": "Heartbeat", "facts": {"skew_s": NaN}}',
}


@pytest.mark.parametrize("when", ["first", "later"])
@pytest.mark.parametrize("data", BAD.values(), ids=BAD.keys())
async def test_a_bad_message_ends_its_own_session_with_a_reason_and_no_other(admin, data, when):
    async with dial(url(admin), AGENT) as good:
        await greet(good, "good")
        async with dial(url(admin), AGENT) as bad:
            if when == "later":
                await greet(bad, "bad")
            await bad._connection.send_message(data)
            with trio.fail_after(DEADLINE_S):
                goodbye = await bad.receive()
                assert isinstance(goodbye, Goodbye)
                assert goodbye.text
                with pytest.raises(ChannelClosed):
                    await bad.receive()
            assert bad._connection.closed.code == 1008
            assert bad._connection.closed.reason
        await until(lambda: len(admin.controller.sessions.connected()) == 1)
        await good.send(Heartbeat(facts("good")))
        assert (await nodes(admin))["good"]["connected"]


async def test_an_oversized_message_is_told_so_and_kept_nowhere(admin):
    async with dial(url(admin), AGENT) as channel:
        await greet(channel)
        with trio.fail_after(DEADLINE_S):
            await channel._connection.send_message(encode(Heartbeat(facts("x" * MESSAGE_BYTES_MAX))))
            goodbye = await channel.receive()
            assert isinstance(goodbye, Goodbye)
            assert goodbye.code == "message_too_large"
            assert (
                goodbye.text == f"node gpu-1 sent a message Heartbeat that is over the limit of {MESSAGE_BYTES_MAX} bytes for one message"
            )
            with pytest.raises(ChannelClosed):
                await channel.receive()
    await until(lambda: not admin.controller.sessions.connected())
    assert (await admin.call("GET", "/health")).status == 200


async def test_broken_frames_end_the_session(admin):
    stream = await admin.connect()
    await stream.send_all(handshake())
    data = b""
    with trio.fail_after(DEADLINE_S):
        while b"\r\n\r\n" not in data:
            data += await stream.receive_some(4096)
        assert data.startswith(b"HTTP/1.1 101")
        await stream.send_all(b"\xff\xff\xff\xff not a frame at all")
        while await stream.receive_some(4096):
            pass
    await stream.aclose()
    assert (await admin.call("GET", "/health")).status == 200


@pytest.mark.parametrize("version", ["13", "8"])
async def test_a_refused_handshake_ends_the_connection_and_leaves_nothing(admin, version):
    stream = await admin.connect()
    await stream.send_all(handshake(version=version) + b"\x82\x80\x01\x02\x03\x04" * 3)  # frames that do not wait for the answer
    with trio.fail_after(DEADLINE_S):
        while await stream.receive_some(4096):
            pass
        await until(lambda: admin.app.open_connections == 0, "the connection has ended")
    await stream.aclose()


async def test_an_agent_that_vanishes_without_a_word_is_noticed(admin):
    stream = await admin.connect()
    await stream.send_all(handshake())
    await stream.aclose()
    async with dial(url(admin), AGENT) as channel:
        await greet(channel)
        await until(lambda: len(admin.controller.sessions.connected()) == 1)
        channel._connection._stream.socket.shutdown(2)
        await until(lambda: not admin.controller.sessions.connected())


async def test_an_operators_orders_reach_the_node_and_a_log_comes_back(admin):
    async with dial(url(admin), AGENT) as channel:
        await greet(channel)
        await until(lambda: admin.controller.observe().nodes[0].state.value == "ready")
        drained = await admin.call("POST", "/api/v1/nodes/gpu-1/drain", {"deadline_s": 600}, OPERATOR)
        assert (drained.status, drained.json["cordoned"], drained.json["draining"]) == (200, True, True)
        assert 500 < drained.json["drain_left_s"] <= 600
        resumed = await admin.call("POST", "/api/v1/nodes/gpu-1/resume", {}, OPERATOR)
        assert (resumed.json["cordoned"], resumed.json["draining"], resumed.json["drain_left_s"]) == (False, False, None)
        labelled = await admin.call("POST", "/api/v1/nodes/gpu-1/labels", {"labels": {"tier": "gold"}}, OPERATOR)
        assert labelled.json["labels"] == {"gpu": "h100", "tier": "gold"}
        assert (await admin.call("POST", "/api/v1/nodes/gpu-1/labels", {"labels": {"tier": None}}, OPERATOR)).json["own_labels"] == {}


async def test_a_replica_is_placed_shown_explained_and_its_log_read(admin):
    async with dial(url(admin), AGENT) as channel:
        await greet(channel)
        model = {"name": "m1", "profile": [{"name": "p", "engine": "command", "command": ["x"], "env": {"A": "secret-value"}}]}
        facts_with_engine = {"models": [model]}
        assert (await admin.call("POST", "/api/v1/models:apply", facts_with_engine, OPERATOR)).status == 200
        with trio.fail_after(DEADLINE_S):
            command = await channel.receive()
        order = command.order.order
        (replica,) = (await admin.call("GET", "/api/v1/replicas")).json["replicas"]
        assert (replica["id"], replica["model"], replica["node"], replica["state"]) == (order.id, "m1", "gpu-1", "pending")
        assert {"id", "model", "profile", "node", "gpus", "state", "reason", "since", "url", "pid", "attempt", "generation"} <= set(replica)
        assert "secret-value" not in json.dumps(replica)
        why = (await admin.call("GET", f"/api/v1/explain/replica/{order.id}")).json
        assert why["object"] == f"replica/{order.id}"
        assert why["text"]
        for query, count in (("node=gpu-1", 1), ("node=node-gpu-1", 1), ("model=m1", 1), ("node=other", 0), ("model=m2", 0)):
            assert len((await admin.call("GET", f"/api/v1/replicas?{query}")).json["replicas"]) == count

        async def answer_log() -> None:
            asked = await channel.receive()
            while not isinstance(asked, LogRequest):
                asked = await channel.receive()
            await channel.send(LogChunk(asked.request_id, 2, 0, 5, "hello", (1, 2)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(answer_log)
            log = await admin.call("GET", f"/api/v1/replicas/{order.id}/logs?attempt=2&offset=0&limit=100")
        expected = {"replica": order.id, "attempt": 2, "attempts": [1, 2], "offset": 0, "next_offset": 5, "text": "hello"}
        assert log.json == expected
        for query in ("limit=0", "limit=999999999", "attempt=-1", "offset=x"):
            assert (await admin.call("GET", f"/api/v1/replicas/{order.id}/logs?{query}")).status == 400
    await until(lambda: not admin.controller.sessions.connected())
    gone = await admin.call("GET", f"/api/v1/replicas/{order.id}/logs")
    assert (gone.status, gone.code) == (503, "node_not_connected")


async def test_a_draining_control_plane_lets_its_agents_go(tmp_path):
    async with running_admin(tmp_path, Limits(drain_s=5)) as admin:
        async with dial(url(admin), AGENT) as channel:
            await greet(channel)
            admin.app.drain()
            with trio.fail_after(DEADLINE_S), pytest.raises(ChannelClosed):
                while True:
                    await channel.receive()
            assert channel._connection.closed.code == 1001
        with trio.fail_after(DEADLINE_S):
            await admin.served.wait()
        with pytest.raises(Unavailable):
            async with dial(url(admin), AGENT):
                pass


async def test_a_dead_peer_does_not_keep_the_server_from_ending(tmp_path):
    async with running_admin(tmp_path, Limits(drain_s=0.2, send_stall_s=0.3)) as admin:
        stream = await admin.connect(receive_buffer=2048)
        await stream.send_all(handshake())
        await trio.sleep(0.05)
        admin.app.drain()
        with trio.fail_after(DEADLINE_S):
            await admin.served.wait()
        await stream.aclose()
