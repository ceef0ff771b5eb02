"""Bodies: what is JSON here and what is not."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.admin.json_body import parse, parse_table
from llmgw.domain.errors import Invalid

ODD = [
    b"",
    b"   ",
    b"{",
    b"{}x",
    b"{'a': 1}",
    b'{"a": NaN}',
    b'{"a": Infinity}',
    b'{"a": -Infinity}',
    b'{"a": 1e999}',
    b'{"a": 1, "a": 2}',
    b'{"a": {"b": 1, "b": 1}}',
    b'{"a": "\\ud800"}',
    b'{"\\udfff": 1}',
    b'{"a": "\xff"}',
    '{"a": 1}'.encode("utf-16"),
    b'{"a": ' + b"9" * 5000 + b"}",
    b"[" * 100_000,
    b"[" * 100_000 + b"]" * 100_000,
    b"[" * 65 + b"]" * 65,
    b'{"a":' * 70 + b"1" + b"}" * 70,
    b"\xef\xbb\xbf",
    b'{"a": "\x00"}',
    b'{"a": 01}',
]


@pytest.mark.parametrize("data", ODD, ids=range(len(ODD)))
async def test_what_is_odd_is_one_clear_400_over_http(admin, data):
    answer = await admin.call("POST", "/api/v1/models:apply", data)
    assert (answer.status, answer.code) == (400, "not_json")
    with pytest.raises(Invalid):
        parse(data)


@pytest.mark.parametrize("data", [b"[]", b"1", b"null", b'"text"', b"true"])
def test_a_body_that_is_no_object_is_told_so(data):
    with pytest.raises(Invalid) as told:
        parse_table(data)
    assert told.value.code == "not_an_object"


def test_a_byte_order_mark_is_passed_over():
    assert parse(b'\xef\xbb\xbf{"a": 1}') == {"a": 1}


def test_a_whole_pair_of_surrogates_is_a_character():
    assert parse(b'{"a": "\\ud83d\\ude00"}') == {"a": "\U0001f600"}


texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
plain = st.none() | st.booleans() | st.integers(-(2**80), 2**80) | st.floats(allow_nan=False, allow_infinity=False) | texts
values = st.recursive(plain, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4), max_leaves=20)


@given(values)
def test_any_json_value_is_read_as_python_reads_it(value):
    assert parse(json.dumps(value).encode()) == value


@given(st.binary(max_size=60))
def test_any_bytes_are_a_value_or_an_invalid(data):
    try:
        parse(data)
    except Invalid as err:
        told = err
    else:
        return
    assert told.code == "not_json"
