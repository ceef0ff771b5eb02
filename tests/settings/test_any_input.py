"""Whatever stands in a file, the answer is a value or `Invalid` with paths; nothing else comes out and no secret is repeated."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llmgw.domain.errors import Invalid
from llmgw.settings.example import example_text, uncommented
from llmgw.settings.load import Role, load_bytes, load_text

EXAMPLE = "\n".join(line for line in uncommented(example_text()).split("\n") if line and not line.startswith("#"))
VALUES = [
    "0",
    "-1",
    "1e999",
    "nan",
    "true",
    '""',
    '"x"',
    "[]",
    "[[]]",
    "{}",
    "{ a = 1 }",
    "2030-01-01",
    "9" * 40,
    '"\\u0000"',
    '"\\uD7FF"',
    "[1, 'a']",
    "'''\n'''",
]


@settings(deadline=None)
@given(st.integers(0, len(EXAMPLE.split("\n")) - 1), st.sampled_from(VALUES), st.sampled_from([None, *Role]))
def test_any_value_in_place_of_a_good_one_is_taken_or_refused_with_its_path(number, value, role):
    lines = EXAMPLE.split("\n")
    if " = " not in lines[number]:
        return
    name = lines[number].partition(" = ")[0]
    lines[number] = f"{name} = {value}"
    try:
        load_text("\n".join(lines), source="t", role=role, environ={"U1_KEY": "k"})
    except Invalid as err:
        text = err.message
        faulty = [fault.path for fault in err.faults]
    else:
        return
    assert not faulty or any(name.split(".")[-1] in path or path for path in faulty)
    assert len(text) < 5000


@settings(deadline=None)
@given(st.integers(0, len(EXAMPLE)), st.integers(0, 40), st.binary(max_size=8))
def test_a_file_with_a_piece_torn_out_is_read_or_refused(start, length, instead):
    data = EXAMPLE.encode()
    with contextlib.suppress(Invalid):
        load_bytes(data[:start] + instead + data[start + length :], source="t", environ={})


@settings(deadline=None)
@given(st.binary(max_size=200))
@example(b"a" + b".a" * 3000 + b" = 1")
@example(b"agent.labels" + b".a" * 3000 + b" = 1")
@example(b"engines" + b".a" * 3000 + b" = 1")
@example(b"auth.key" + b".a" * 3000 + b" = 1")
@example(b"model = " + b"[" * 200 + b"]" * 200)
def test_any_bytes_are_read_or_refused(data):
    with contextlib.suppress(Invalid):
        load_bytes(data, source="t", environ={})


@pytest.mark.parametrize(
    "text",
    [
        'metrics.token = "{}"',
        '[[endpoint]]\nid = "u"\nurl = "http://h"\nmodels = ["m"]\napi_key_env = "{}"',
        '[[endpoint]]\nid = "u"\nurl = "http://user:{}@h x"\nmodels = ["m"]',
        '[[auth.key]]\nname = "a"\nsha256 = "{}"',
        '[[auth.key]]\nname = "a"\nkey = "{} é"',
        '[[auth.key]]\nname = "a"\nkey = ["{}"]',
        '[[model]]\nname = "m"\n[[model.profile]]\nengine = "openai"\nurl = "https://{}@h"\napi_key_env = "{}"',
    ],
)
def test_no_fault_repeats_what_may_be_a_secret(text):
    with pytest.raises(Invalid) as caught:
        load_text(text.replace("{}", "sk-hunter2"), source="t", environ={})
    assert "hunter2" not in str(caught.value)


def test_a_very_long_value_or_key_does_not_flood_the_fault():
    with pytest.raises(Invalid) as caught:
        load_text(f'log.level = "{"x" * 100_000}"\n{"k" * 100_000} = 1\nrouter.listen = "{"y" * 100_000}"', source="t")
    assert len(caught.value.faults) == 3
    assert len(str(caught.value)) < 3000
