"""The history in pages and as a stream that can be taken up where it was cut."""

from __future__ import annotations

import json

import pytest
import trio
import trio.lowlevel

from llmgw.admin.limits import Limits

from .conftest import ADMIN, DEADLINE_S, running_admin, until


async def record(admin, *texts: str) -> None:
    for text in texts:
        admin.controller.events.record("test.kind", "test/one", text)
    await until(lambda: not admin.controller.events._waiting)


class Follower:
    """Reads a stream of events from the wire."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self.data = b""

    async def next(self) -> tuple[str, dict]:
        """(event's name, its data) of the next block that is no comment."""
        with trio.fail_after(DEADLINE_S):
            while True:
                while b"\n\n" not in self.data:
                    more = await self.stream.receive_some(65536)
                    assert more, "the stream ended"
                    self.data += more
                block, _, self.data = self.data.partition(b"\n\n")
                lines = [line for line in block.decode().replace("\r", "").split("\n") if ":" in line and not line.startswith(":")]
                fields = dict(line.split(": ", 1) for line in lines)
                if "data" in fields:
                    found = json.loads(fields["data"])
                    if "id" in fields:
                        assert found["seq"] == int(fields["id"])
                    return fields.get("event", "message"), found


async def follow(admin, last: str | None = None, path: str = "/api/v1/events") -> Follower:
    stream = await admin.connect()
    more = "" if last is None else f"Last-Event-ID: {last}\r\n"
    await stream.send_all(
        f"GET {path} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {ADMIN}\r\nAccept: text/event-stream\r\n{more}\r\n".encode()
    )
    return Follower(stream)


async def test_pages_go_forward_from_a_number_and_without_one_show_the_newest(admin):
    await record(admin, *(f"event {number}" for number in range(10)))
    first = (await admin.call("GET", "/api/v1/events?after=0&limit=4")).json
    assert [event["seq"] for event in first["events"]] == [1, 2, 3, 4]
    second = (await admin.call("GET", f"/api/v1/events?after={first['next']}&limit=4")).json
    assert [event["seq"] for event in second["events"]] == [5, 6, 7, 8]
    newest = (await admin.call("GET", "/api/v1/events?limit=2")).json
    assert [event["text"] for event in newest["events"]] == ["event 8", "event 9"]
    end = (await admin.call("GET", "/api/v1/events?after=10")).json
    assert end == {"events": [], "next": 10}
    assert set(newest["events"][0]) == {"seq", "at", "kind", "object", "epoch", "text", "level"}


@pytest.mark.parametrize("query", ["after=-1", "after=x", "limit=0", "limit=1001", "after=1e3", "after=99999999999999999999"])
async def test_a_page_that_is_none_is_invalid(admin, query):
    assert (await admin.call("GET", f"/api/v1/events?{query}")).status == 400


async def test_a_stream_gives_what_was_missed_and_then_what_comes_each_once(admin):
    await record(admin, "one", "two", "three")
    follower = await follow(admin, last="1")
    await until(lambda: len(admin.controller.events._followers) == 1)
    await record(admin, "four")
    assert [(await follower.next())[1]["text"] for _ in range(3)] == ["two", "three", "four"]
    await follower.stream.aclose()


async def test_a_stream_without_a_number_begins_now(admin):
    await record(admin, "before")
    follower = await follow(admin)
    await until(lambda: len(admin.controller.events._followers) == 1)
    await record(admin, "after")
    assert (await follower.next())[1]["text"] == "after"
    await follower.stream.aclose()


async def test_events_that_come_while_the_backlog_is_read_are_neither_lost_nor_doubled(admin):
    await record(admin, *(f"{number}" for number in range(1500)))
    follower = await follow(admin, last="0")
    for number in range(1500, 1600):
        admin.controller.events.record("test.kind", "test/one", f"{number}")
        await trio.lowlevel.checkpoint()
    assert [(await follower.next())[1]["text"] for _ in range(1600)] == [str(number) for number in range(1600)]
    await follower.stream.aclose()


async def test_a_silent_stream_says_that_it_is_there(tmp_path):
    async with running_admin(tmp_path, Limits(comment_s=0.05)) as admin:
        follower = await follow(admin)
        data = b""
        with trio.fail_after(DEADLINE_S):
            while data.count(b": still here") < 3:
                data += await follower.stream.receive_some(65536)
        await follower.stream.aclose()


async def test_many_followers_get_the_same(admin):
    followers = [await follow(admin, last="0") for _ in range(10)]
    await until(lambda: len(admin.controller.events._followers) == 10)
    await record(admin, "for all")
    for follower in followers:
        assert (await follower.next())[1]["text"] == "for all"
        await follower.stream.aclose()
    await until(lambda: not admin.controller.events._followers)


async def test_a_follower_that_lags_too_far_is_told_and_cut(admin):
    follower = await follow(admin)
    await until(lambda: len(admin.controller.events._followers) == 1)
    (channel,) = admin.controller.events._followers
    channel.close()  # what the event log does to one that has not taken its thousand
    name, body = await follower.next()
    assert (name, body["error"]["code"]) == ("error", "too_slow")
    await follower.stream.aclose()


@pytest.mark.parametrize("last", ["x", "-1", "1e5", "9" * 30, "\u0661".encode().decode("latin1")])
async def test_a_last_event_id_that_is_none_is_invalid(admin, last):
    answer = await admin.call("GET", "/api/v1/events", None, ADMIN, Accept="text/event-stream", Last_Event_ID=last)
    assert answer.status == 400


async def test_an_event_with_a_line_break_stays_one_event(admin):
    follower = await follow(admin)
    await until(lambda: len(admin.controller.events._followers) == 1)
    await record(admin, "one\n\ndata: {}\r\nid: 99")
    assert (await follower.next())[1]["text"] == "one\n\ndata: {}\r\nid: 99"
    await follower.stream.aclose()
