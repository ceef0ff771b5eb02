"""Models between their tables and the domain: what comes back is what went in, and any input gives a value or faults."""

from __future__ import annotations

import contextlib
import json
import tomllib

import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.domain.errors import Fault, Invalid
from llmgw.domain.model import CPU_BY_DEFAULT, ENGINES, ModelKind, ModelSpec, Profile, ReplicaCounts
from llmgw.domain.policy import ApiKey
from llmgw.settings.load import load_text
from llmgw.settings.objects import (
    format_time,
    key_from_table,
    key_to_table,
    model_from_table,
    model_to_table,
    parse_time,
    read_endpoints,
    read_keys,
    read_model,
    read_models,
)

words = st.text(st.characters(exclude_categories=("Cs", "Cc", "Zs", "Zl", "Zp"), exclude_characters="\x00"), min_size=1, max_size=12)
model_names = words.filter(lambda name: name.isprintable() and name not in (".", ".."))
arguments = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\x00"), max_size=12)
numbers = st.floats(0, 1_000_000, allow_nan=False)


@st.composite
def profiles(draw: st.DrawFn, name: str) -> Profile:
    engine = draw(st.sampled_from(ENGINES))
    needs_files = engine in ("xllamacpp", "llama.cpp", "vllm", "sglang")
    return Profile(
        name=name,
        engine=engine,
        checkpoint=draw(words) if needs_files else "",
        gpus=draw(st.integers(0, 16)),
        share_gpu=draw(st.booleans()),
        memory_mib=draw(st.integers(0, 10**6)),
        args=tuple(draw(st.lists(arguments, max_size=3))),
        env=draw(st.dictionaries(st.sampled_from(["A", "B_1"]), arguments)),
        selector=draw(st.dictionaries(words, words, max_size=2)),
        priority=draw(st.integers(-5, 5)),
        weight=draw(numbers),
        command=("/bin/x", *draw(st.lists(arguments, max_size=2))) if engine == "command" else (),
        ready_path=draw(st.sampled_from(["/health", "/v1/models"])),
        url="https://api.example/base" if engine == "openai" else "",
        api_key_env=draw(st.sampled_from(["", "KEY"])),
    )


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    least, count, most = sorted(draw(st.lists(st.integers(0, 20), min_size=3, max_size=3)))
    names = draw(st.lists(model_names, min_size=1, max_size=4, unique=True))
    labels = draw(st.lists(words, min_size=1, max_size=3, unique=True))
    return ModelSpec(
        name=names[0],
        aliases=tuple(names[1:]),
        profiles=tuple(draw(profiles(label)) for label in labels),
        kind=draw(st.sampled_from(ModelKind)),
        pool=draw(words),
        replicas=ReplicaCounts(least, most, count),
        idle_stop_s=draw(numbers),
    )


@settings(deadline=None)
@given(models())
def test_a_model_comes_back_from_its_table_as_it_went_in(spec):
    table = model_to_table(spec)
    assert model_from_table(table) == spec
    assert model_from_table(json.loads(json.dumps(table))) == spec
    text = tomli_w.dumps({"model": [table]})
    assert model_from_table(tomllib.loads(text)["model"][0]) == spec
    assert load_text(text, source="t").models == (spec,)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (".", "'.' cannot be a name"),
        ("..", "it means a folder"),
        ("gpt\u202egnp", "holds U+202E"),
        ("gpt\u200b", "holds U+200B"),
        ("gpt\u00a04", "holds U+00A0"),
        ("gpt\x9b31m", "holds U+009B"),
        ("gpt\n", "holds U+000A"),
        ("", "must not be empty"),
    ],
)
def test_a_name_that_addresses_cannot_hold_or_people_cannot_see_is_refused_wherever_it_is_given(name, told):
    model = {"name": name, "profile": [{"engine": "ollama"}]}
    also = {"name": "m", "aliases": ["fine", name], "profile": [{"engine": "ollama"}]}
    for table, path in ((model, "model.name"), (also, "model.aliases")):
        with pytest.raises(Invalid) as caught:
            model_from_table(table)
        (fault,) = caught.value.faults
        assert fault.path == path
        assert told in fault.reason
        assert fault.reason.isprintable()
    faults: list[Fault] = []
    read_endpoints([{"id": "u1", "url": "http://127.0.0.1:1", "models": [name]}], "endpoint", faults, {})
    assert [told in fault.reason for fault in faults] == [True]


@pytest.mark.parametrize("name", ["...", ".hidden", "org/Model-7B:Q4", "a b", "modèle", "模型", "\N{ROCKET}"])
def test_a_name_that_can_be_seen_and_addressed_is_taken(name):
    assert model_from_table({"name": name, "profile": [{"engine": "ollama"}]}).name == name


def test_a_table_leaves_out_what_is_at_its_default():
    for engine in ENGINES:
        needed = {"command": {"command": ["/x"]}, "openai": {"url": "http://h"}, "ollama": {}}.get(engine, {"checkpoint": "/c"})
        table = {"name": "m", "replicas": 1, "profile": [{"name": engine, "engine": engine, **needed}]}
        assert model_to_table(model_from_table(table)) == table
        assert model_from_table(table).profiles[0].gpus == (0 if engine in CPU_BY_DEFAULT else 1)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["name", "engine", "profile", "replicas", "min", "x"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(deadline=None)
@given(plain, plain, plain)
def test_whatever_plain_data_comes_in_the_answer_is_a_value_or_faults(first, second, third):
    raw = {"name": first, "profile": [{"engine": "ollama", "weight": second}], "replicas": third, "aliases": second}
    for candidate in (first, raw):
        found: list[Fault] = []
        spec = read_model(candidate, "model", found)
        assert (spec is None) == bool(found)
        assert spec is None or model_from_table(model_to_table(spec)) == spec
    faults: list[Fault] = []
    read_models(first, "model", faults)
    read_keys([{"name": first, "key": second, "expires": third}], "auth.key", faults, [])
    read_endpoints([{"id": first, "url": second, "models": third, "aliases": third}], "endpoint", faults, {})


def test_json_has_no_table_and_no_null_where_the_schema_wants_a_value():
    with pytest.raises(Invalid) as caught:
        model_from_table({"name": None, "profile": [{"engine": "ollama", "gpus": None}], "replicas": None}, "body")
    found = {fault.path: fault.reason for fault in caught.value.faults}
    assert found == {
        "body.name": "expected a string, not null",
        "body.replicas": "expected a whole number or a table, not null",
        "body.profile[0].gpus": "expected a whole number, not null",
    }


@pytest.mark.parametrize(
    ("text", "seconds"), [("1970-01-01T00:00:00Z", 0), ("1970-01-01t00:00:00.123456789z", 0.123456), ("1970-01-02T00:00:00-00:30", 88_200)]
)
def test_a_time_with_a_zone_is_read(text, seconds):
    assert parse_time(text) == pytest.approx(seconds)


@settings(deadline=None)
@given(st.text(max_size=30) | st.from_regex(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(Z|\+\d\d:\d\d)", fullmatch=True))
def test_a_time_is_read_or_refused_with_a_reason(text):
    with contextlib.suppress(ValueError):  # any other error is a bug
        assert isinstance(parse_time(text), float)


def test_names_that_stand_twice_are_told_beside_the_faults_of_their_tables():
    text = """
[[model]]
name = "a"
[[model.profile]]
engine = "command"
command = ["x"]
[[model]]
name = "b"
aliases = ["a"]
[[model.profile]]
engine = "warp"
[[endpoint]]
id = "u1"
url = "nonsense"
models = ["m"]
[[endpoint]]
id = "u1"
url = "http://127.0.0.1:1"
models = ["m"]
"""
    with pytest.raises(Invalid) as told:
        load_text(text, source="f")
    paths = [fault.path for fault in told.value.faults]
    assert {"model[1]", "model[1].profile[0].engine", "endpoint[0].url", "endpoint[1].id"} <= set(paths)


@st.composite
def keys(draw: st.DrawFn) -> ApiKey:
    micros = draw(st.one_of(st.none(), st.integers(0, 253_402_300_799 * 10**6)))  # to the end of the year 9999
    return ApiKey(
        name=draw(words),
        sha256=draw(st.text("0123456789abcdef", min_size=64, max_size=64)),
        models=tuple(draw(st.lists(model_names, max_size=3, unique=True))),
        max_parallel=draw(st.integers(0, 10**9)),
        requests_per_minute=draw(st.integers(0, 10**9)),
        tokens_per_minute=draw(st.integers(0, 10**9)),
        expires_wall_s=None if micros is None else micros / 1e6,
        operator=draw(st.booleans()),
    )


@given(keys())
def test_a_key_comes_back_from_its_table_through_toml_and_json(key: ApiKey):
    table = key_to_table(key)
    assert key_from_table(json.loads(json.dumps(table))) == key
    assert key_from_table(tomllib.loads(tomli_w.dumps(table))) == key


@given(st.integers(-62_135_596_800 * 10**6, 253_402_300_799 * 10**6))
def test_a_time_is_written_as_it_is_read(micros: int):
    assert parse_time(format_time(micros / 1e6)) == micros / 1e6


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("9999-12-31T23:59:59.999999Z", "9999-12-31T23:59:59Z"),
        ("9999-12-31T23:59:59-14:00", "9999-12-31T23:59:59Z"),
        ("0001-01-01T00:00:00+14:00", "0001-01-01T00:00:00Z"),
        ("2030-01-01T00:00:00.25+02:00", "2029-12-31T22:00:00.250000Z"),
    ],
)
def test_a_time_beyond_the_years_of_four_digits_is_taken_and_told_as_the_last_or_the_first(given: str, shown: str):
    assert format_time(parse_time(given)) == shown
