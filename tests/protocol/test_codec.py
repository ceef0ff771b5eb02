"""What is told of a message that cannot be taken: its type and what is wrong, in words of JSON."""

from __future__ import annotations

import pytest

from llmgw.domain.errors import Invalid
from llmgw.protocol.codec import MESSAGE_BYTES_MAX, decode, encode
from llmgw.protocol.messages import Goodbye


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
