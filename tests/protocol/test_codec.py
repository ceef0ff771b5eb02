"""Messages to bytes and back, and what is told of one that cannot be taken."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.domain.endpoint import Endpoint, EndpointList, ListStamp
from llmgw.domain.errors import Invalid
from llmgw.domain.ids import CPU_DEVICE, ClusterId, CommandId, EndpointId, OwnerId, ReplicaId
from llmgw.domain.lease import FencingToken
from llmgw.domain.model import ModelKind, Profile
from llmgw.domain.placed import Filter, Placement, Rejection
from llmgw.domain.replica import ReplicaOrder
from llmgw.protocol.codec import MESSAGE_BYTES_MAX, Shared, decode, encode
from llmgw.protocol.messages import Command, Goodbye, StartReplica
from llmgw.protocol.router_messages import PushEndpoints

STAMP = ListStamp(FencingToken(ClusterId("c"), 1, OwnerId("o")), 1)
TEXT = st.text(max_size=8)
ENDPOINTS = st.builds(
    Endpoint,
    id=TEXT.map(EndpointId),
    url=TEXT,
    models=st.lists(TEXT, max_size=2).map(tuple),
    aliases=st.dictionaries(TEXT, TEXT, max_size=2),
    weight=st.sampled_from((0.0, 1.0, 2.5)),
    priority=st.sampled_from((0, 1)),
    key=TEXT,
)


def taken(message: PushEndpoints) -> PushEndpoints:
    found = decode(encode(message))
    assert isinstance(found, PushEndpoints)
    return found


@given(st.lists(ENDPOINTS, max_size=4))
def test_a_list_of_endpoints_comes_as_it_was_sent_and_what_came_before_is_the_same_value(endpoints: list[Endpoint]) -> None:
    message = PushEndpoints(STAMP, EndpointList(tuple(endpoints)))
    first, second = taken(message), taken(message)
    assert first == second == message
    assert all(one is other for one, other in zip(first.endpoints.endpoints, second.endpoints.endpoints, strict=True))


def test_what_is_no_endpoint_is_refused_each_time_and_after_one_that_looks_alike() -> None:
    good = PushEndpoints(STAMP, EndpointList((Endpoint(EndpointId("e"), "http://e", ("m",), priority=1, weight=1.0),)))
    assert taken(good) == good
    raw = json.loads(encode(good))
    for bad in (True, 1.0, "1", None):
        raw["endpoints"]["endpoints"][0]["priority"] = bad
        for _ in range(2):
            with pytest.raises(Invalid, match="priority"):
                decode(json.dumps(raw).encode())


def test_what_goes_to_several_peers_is_made_into_bytes_once_and_into_the_same_as_alone() -> None:
    message = PushEndpoints(STAMP, EndpointList((Endpoint(EndpointId("e"), "http://e", ("m",)),)))
    shared = Shared(message)
    assert encode(shared) is encode(shared)
    assert encode(shared) == encode(message)


def refused(data: bytes) -> Invalid:
    with pytest.raises(Invalid) as caught:
        decode(data)
    return caught.value


@pytest.mark.parametrize(
    ("data", "code", "text"),
    [
        (b'{"type":"Nope"}', "unknown_message", "a message of type 'Nope', which this build does not know"),
        (b"{", "malformed_message", "bytes that are not JSON: Input data was truncated"),
        (b"[]", "malformed_message", "something that is not a message: an object with a type is expected"),
        (
            b'{"type":"Goodbye","code":3,"final":0}',
            "malformed_message",
            (
                "a malformed Goodbye: Goodbye.code: expected a string, not a whole number; Goodbye.text: is missing; "
                "Goodbye.final: expected true or false, not a whole number"
            ),
        ),
        (
            b'{"type":"CommandResult","command_id":"x","outcome":"odd"}',
            "malformed_message",
            "a malformed CommandResult: CommandResult.outcome: must be one of done, refused, stale, foreign",
        ),
        (
            b'{"type":"ReplicaForgotten","replica":[]}',
            "malformed_message",
            "a malformed ReplicaForgotten: ReplicaForgotten.replica: expected a string, not a list",
        ),
    ],
)
def test_what_cannot_be_taken_is_told_with_its_type_and_in_words_of_json(data: bytes, code: str, text: str) -> None:
    told = refused(data)
    assert told.code == code
    assert told.message == text
    for word in ("str", "int", "float", "bool", "NodeId", "dict", "Errno", "invalid value for type"):
        assert word not in told.message.replace("string", "").split()


def test_a_message_that_is_too_large_is_told_with_its_type_and_the_limit() -> None:
    told = refused(encode(Goodbye("code", "x" * MESSAGE_BYTES_MAX)))
    assert (told.code, told.message) == (
        "message_too_large",
        f"a message Goodbye that is over the limit of {MESSAGE_BYTES_MAX} bytes for one message",
    )
    assert refused(b" " * (MESSAGE_BYTES_MAX + 1)).message.startswith("a message of unknown type that is over")


def test_an_orders_reasons_may_hold_words_of_the_next_build_and_may_be_missing() -> None:
    placement = Placement("why", (Rejection("n1", Filter.PORT, "no port"),))
    order = ReplicaOrder(
        ReplicaId("m-1"), "m", ("m",), ModelKind.CHAT, Profile("p", "command", command=("x",)), (CPU_DEVICE,), 1, 1, placement=placement
    )
    command = Command(FencingToken(ClusterId("c"), 1, OwnerId("o")), CommandId("x"), 1, StartReplica(order))
    assert decode(encode(command)) == command
    newer = decode(encode(command).replace(b'"filter":"port"', b'"filter":"phase of the moon"'))
    assert isinstance(newer, Command)
    assert isinstance(newer.order, StartReplica)
    assert newer.order.order.placement.passed[0].filter is Filter.OTHER
    raw = json.loads(encode(command))
    del raw["order"]["order"]["placement"]
    older = decode(json.dumps(raw).encode())
    assert isinstance(older, Command)
    assert isinstance(older.order, StartReplica)
    assert older.order.order.placement == Placement()
