"""How the news of a replicated store travel: whatever is sent comes, and what is none is refused in words."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.admin import store_news
from llmgw.admin.store_news import decode_news, encode_news
from llmgw.domain.errors import Unavailable
from llmgw.store.copies import News, Position

NUMBERS = st.integers(0, 2**53)
NEWS = st.builds(
    News,
    st.builds(Position, NUMBERS, NUMBERS),
    st.lists(st.binary(max_size=50), max_size=5).map(tuple),
    st.none() | st.binary(max_size=500),
)


@given(NEWS)
def test_what_is_sent_comes(news):
    assert decode_news(encode_news(news).encode()) == news


@given(NEWS, st.integers(0, 2**16), st.binary(max_size=3))
def test_a_damaged_answer_is_refused_or_says_something(news, place, junk):
    data = encode_news(news).encode()
    place %= len(data)
    with contextlib.suppress(Unavailable):
        decode_news(data[:place] + junk + data[place + 1 :])


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "[]",
        "{}",
        "null",
        '{"epoch": 1, "number": "x", "changes": [], "whole": null}',
        '{"epoch": 1, "number": 1, "changes": 1, "whole": null}',
        "[" * 5000,
    ],
)
def test_an_answer_that_is_none_is_refused(answer):
    with pytest.raises(Unavailable, match="cannot be understood"):
        decode_news(answer.encode())


def test_a_whole_that_unpacks_to_too_much_is_refused(monkeypatch):
    monkeypatch.setattr(store_news, "BYTES_MAX", 1000)
    with pytest.raises(Unavailable):
        decode_news(encode_news(News(Position(1, 1), (), b"x" * 1001)).encode())


def test_a_cut_whole_is_refused():
    value = json.loads(encode_news(News(Position(1, 1), (), b"x" * 1000)))
    value["whole"] = value["whole"][:12]
    with pytest.raises(Unavailable):
        decode_news(json.dumps(value).encode())
