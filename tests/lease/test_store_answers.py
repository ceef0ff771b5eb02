"""The text of a client's error as what it means. Over HTTP `test_object_store` shows that the client's texts are these."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llmgw.lease.store_answers import NO_ANSWER, NO_SUCH_KEY, REFUSED, failure

SAID = "Generic S3 error: Error performing PUT http://s/b/k in 1ms - Server returned non-2xx status code: {} Some Reason: {}"
WORDS = ["<Code>NoSuchKey</Code>", "<Code>", "</Code>", "404", "non-2xx status code: 412", "TimedOut", "\n\nDebug source:", "é", "<html>"]
texts = st.lists(st.sampled_from(WORDS) | st.text(max_size=8), max_size=12).map("".join)


def said(status: int, body: str) -> str:
    return f"{SAID.format(status, body)}\n\nDebug source:\nGeneric {{ store }}"


@given(texts)
def test_a_text_that_is_not_understood_decides_nothing(text: str):
    found = failure(text)
    assert found.why
    if "non-2xx status code: " not in text:
        assert found.status == NO_ANSWER
        assert not found.absent
        assert not found.refused


@given(st.integers(100, 999), texts)
@example(404, "<Code>NoSuchBucket</Code>")
@example(404, "<html>NoSuchKey</html>")
@example(500, "non-2xx status code: 404 Not Found: <Code>NoSuchKey</Code>")
@example(503, "\n\nDebug source: <Code>NoSuchKey</Code>")
def test_what_a_store_says_of_itself_changes_neither_the_status_nor_what_is_read_from_it(status: int, body: str):
    found = failure(said(status, body))
    assert found.status == status
    assert found.refused == (status in REFUSED)
    assert found.absent == (status == 404 and found.code == NO_SUCH_KEY)
    if "<Code>NoSuchKey</Code>" not in body.partition("\n\nDebug source:")[0]:
        assert not found.absent


@given(
    st.integers(300, 599),
    st.text(alphabet=st.characters(codec="ascii"), min_size=20, max_size=80).filter(lambda text: "<Code>" not in text),
)
def test_of_a_body_nothing_but_the_code_is_repeated(status: int, body: str):
    assert failure(said(status, f"<Error><Code>Odd</Code><Message>{body}</Message>")).why == failure(said(status, "<Code>Odd</Code>")).why


@pytest.mark.parametrize("code", ["ExpiredToken", "InvalidAccessKeyId", "AccessDenied"])
def test_only_what_others_credentials_could_mend_asks_for_others(code: str):
    assert failure(said(403, f"<Code>{code}</Code>")).of_credentials
    assert not failure(said(403, "<Code>RequestTimeTooSkewed</Code>")).of_credentials
    assert not failure(said(503, "<Code>SlowDown</Code>")).of_credentials
