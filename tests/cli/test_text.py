"""What ctl prints from whatever a server sends: no shape of an answer is a crash, and nothing in it steers a terminal."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.cli.ctl import client, events, explain, model, node, output, replica, status
from llmgw.cli.main import main
from llmgw.cli.text import LINE_MAX, WORD_MAX, columns, printable, readable, width
from tests.cli.conftest import Run
from tests.cli.fake_api import TOKEN, FakeApi, Says

_KEYS = [
    "name", "state", "reason", "leader", "holder", "epoch", "store", "models", "nodes", "router", "endpoints", "problems", "replicas",
    "ready", "text", "rejections", "at", "seq", "level", "age_s", "labels", "gpus", "x",
]  # fmt: skip
bodies = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_KEYS), inner, max_size=6),
    max_leaves=20,
)
objects = st.dictionaries(st.sampled_from(_KEYS), bodies, max_size=8)


@settings(deadline=None)
@given(objects)
def test_any_object_can_be_shown(body):
    for lines in (
        status.status_lines(body, lambda noun: [body]),
        explain._lines(body),
        output.details(body),
        model._model_lines(body),
        [events.event_line(body)],
        output.table([body], model._COLUMNS, "none"),
        output.table([body], replica.REPLICA_COLUMNS, "none"),
        output.table([body], node._COLUMNS, "none"),
    ):
        assert all(isinstance(line, str) for line in lines)
    json.loads(output.json_text(body, indent=2))


@settings(deadline=None)
@given(st.text())
def test_text_for_a_terminal_holds_no_control_characters(text):
    shown = printable(text, True)
    assert not any((c < " " and c not in "\n\t") or "\x7f" <= c <= "\x9f" or c in "\u202e\u2066\u2028" for c in shown)
    assert printable(text, False) == text


@settings(deadline=None)
@given(st.lists(st.tuples(st.text(max_size=6), st.text(max_size=6)), min_size=1, max_size=4))
def test_columns_line_up(rows):
    lines = columns(["A", "B"], rows)
    assert len(lines) == len(rows) + 1
    assert all("\n" not in line and line == line.rstrip() for line in lines)


def test_wide_and_combining_characters_are_counted_as_a_terminal_does():
    assert width("北京") == 4
    assert width("e\u0301") == 1
    assert columns(["A", "B"], [["北", "x"], ["a", "y"]]) == ["A   B", "北  x", "a   y"]


@settings(deadline=None)
@given(st.text(max_size=20))
def test_a_name_is_one_segment_whatever_it_holds(name):
    part = client.segment(name)
    assert part.isascii()
    assert not set(part) & set("/?#: \r\n")


@settings(deadline=None)
@given(
    st.lists(
        st.sampled_from(["data: {}", 'data: {"kind": 1}', "data:", ": x", "", "id: 1", "data: [1]", "data: {", "event: error"]), max_size=12
    )
)
def test_any_stream_of_lines_gives_events_or_nothing(lines):
    assert all(isinstance(event, dict) and "kind" in event for event in events.parse_stream(iter(lines)))


def test_a_name_that_is_no_utf8_is_asked_for_as_it_is(ctl: Run, api: FakeApi):
    ran = ctl("model", "show", b"m\xff".decode("utf-8", "surrogateescape"))
    assert ran.code == 4
    assert api.requests[0].path == "/api/v1/models/m%FF"


@pytest.mark.parametrize("body", [[], "x", 3, None, True])
def test_an_answer_that_is_no_object_is_an_error_and_no_crash(ctl: Run, api: FakeApi, body: object):
    for path, args in (("status", ("status",)), ("leader", ("leader", "show")), ("explain/model/m", ("explain", "model", "m"))):
        api.on(f"GET /api/v1/{path}", Says(body))
        ran = ctl(*args)
        assert ran.code == 3
        assert "is this the admin API's address?" in ran.err


def test_https_to_a_server_without_tls_is_one_line(run: Run, api: FakeApi, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LLMGW_TOKEN", "t")
    ran = run("ctl", "--server", api.url.replace("http:", "https:"), "status")
    assert ran.code == 6
    assert "speaks no TLS" in ran.err
    assert ran.err.count("\n") == 1


def test_a_token_that_no_header_can_carry_is_refused_before_anything_is_sent(run: Run, api: FakeApi, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LLMGW_TOKEN", "a\nb")
    ran = run("ctl", "--server", api.url, "status")
    assert ran.code == 5
    assert api.requests == []


def test_names_beyond_the_outputs_encoding_are_replaced(api: FakeApi):
    api.on("GET /api/v1/models", {"models": [{"name": "北京"}]})
    ran = subprocess.run(
        [sys.executable, "-m", "llmgw", "ctl", "--server", api.url, "model", "list"], capture_output=True, text=True, timeout=60,
        env={**os.environ, "LLMGW_TOKEN": TOKEN, "PYTHONIOENCODING": "ascii"}, check=False,
    )  # fmt: skip
    assert ran.returncode == 0
    assert "??" in ran.stdout


@given(st.lists(st.text(max_size=WORD_MAX), max_size=4), st.integers(WORD_MAX + 1, 5_000))
def test_an_error_keeps_what_is_short_and_both_ends_of_what_is_long(words, size):
    short = " ".join(words)
    assert readable(short) == short
    cut = readable(f"not '{'x' * size}'; known: a, b\nsecond line")
    assert cut.startswith("not 'x")
    assert cut.endswith("x'; known: a, b\nsecond line")
    assert len(cut) < WORD_MAX + 50
    assert len(readable("a b " * size)) <= max(LINE_MAX + 5, 0)


LONG = "x" * 3_000


@pytest.mark.parametrize(
    "words",
    [
        (LONG,),
        ("ctl", LONG),
        ("ctl", "usage", "--by", LONG),
        ("ctl", "usage", f"--{LONG}"),
        ("ctl", "hold", "add", "f", "--reason", "r", "--until", LONG),
        ("ctl", "node", "label", "n", LONG),
        ("ctl", "node", "drain", "n", "--deadline", LONG),
        ("ctl", "config", "diff", LONG, "2"),
        ("check", f"/{LONG}"),
        ("sim", "--nodes", LONG),
    ],
)
def test_no_command_repeats_a_very_long_word_of_its_command_line(words, capsys):
    assert main(words) in (2, 3)
    assert 0 < max(map(len, capsys.readouterr().err.splitlines())) < 500
