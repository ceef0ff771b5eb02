"""Hypothesis strategies for the cluster settings: plain data as a document holds it, drawn from what the schema says of each key."""

from __future__ import annotations

import random
import typing
from collections.abc import Mapping
from typing import Any, Final

import attrs
from hypothesis import strategies as st

from llmgw.domain.setting import Scope
from llmgw.settings.decode import field_types, join
from llmgw.settings.load import table_scope
from llmgw.settings.schema import STARTED_ENGINES, EngineSettings, LeaseSettings, ReconcileSettings, Settings, meta_of

# Keys whose good values no range and no list of choices says.
SAID: Final[Mapping[str, st.SearchStrategy[Any]]] = {
    "reconcile.restart_backoff_s": st.lists(st.floats(0, 86_400), min_size=1, max_size=4),
    "placement.spread": st.sampled_from(("facility", "rack", "zone-é")),
    "route.affinity": st.sampled_from(("none", "prefix", "header:X-Session")),
    "notify.url": st.sampled_from(("", "https://hooks.example/llmgw", "http://127.0.0.1:9000/in")),
    "engines.command": st.sampled_from(([], ["/opt/vllm"], ["/opt/a b/vllm", "serve", 'say "ö"\n'])),
}
WORDS: Final = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=12).map(
    "w{}".format
)  # never one that only seems to hold something


def cluster_values() -> st.SearchStrategy[dict[str, Any]]:
    """Plain data that is a valid document: any of the cluster's keys, each with any value that it may have."""
    tables = {
        name: _table(kind, name)
        for name, kind in field_types(Settings).items()
        if table_scope(name) is Scope.CLUSTER and name not in ("engines", "guard")
    }
    engine = _table(EngineSettings, "engines")
    return st.fixed_dictionaries(
        {},
        optional={**tables, "engines": st.dictionaries(st.sampled_from(STARTED_ENGINES), engine, max_size=3), "guard": _guard()},
    )


def _table(cls: type, path: str) -> st.SearchStrategy[dict[str, Any]]:
    keys = {}
    for field in attrs.fields(typing.cast(Any, cls)):
        kind = field_types(cls)[field.name]
        keys[field.name] = _table(kind, f"{path}.{field.name}") if attrs.has(kind) else _value(field, kind, f"{path}.{field.name}")
    return st.fixed_dictionaries({}, optional=keys).filter(lambda given: _fits(cls, given))


def _value(field: Any, kind: Any, path: str) -> st.SearchStrategy[Any]:
    meta = meta_of(field)
    assert meta is not None
    if path in SAID:
        return SAID[path]
    if meta.choices:
        return st.sampled_from(meta.choices)
    if kind is bool:
        return st.booleans()
    assert meta.low is not None, f"{path} needs a strategy of its own"
    assert meta.high is not None, f"{path} needs a strategy of its own"
    if kind is int:
        return st.integers(int(meta.low), int(meta.high))
    least = -int(-meta.low // 1)
    return st.one_of(st.floats(meta.low, meta.high), st.integers(least, int(meta.high)))


def _fits(cls: type, given: Mapping[str, Any]) -> bool:
    """Do the keys of one table fit together, those that are not given at their defaults?"""
    whole = {field.name: given.get(field.name, field.default) for field in attrs.fields(typing.cast(Any, cls))}
    if cls is LeaseSettings:
        return 3 * whole["renew_s"] <= whole["ttl_s"] and whole["poll_s"] <= whole["ttl_s"]
    if cls is ReconcileSettings:
        return whole["node_lost_after_s"] >= 3 * whole["heartbeat_s"]
    return True


def _guard() -> st.SearchStrategy[dict[str, Any]]:
    counts = {name: st.integers(0, 1_000_000_000) for name in ("max_messages", "max_output_tokens", "max_images")}
    rule = st.fixed_dictionaries(
        {"name": st.sampled_from(("a", "b.c", "d-é", "e'f")), "words": st.lists(WORDS, min_size=1, max_size=3)},
        optional={
            "on": st.sampled_from(("prompt", "completion")),
            "match": st.sampled_from(("", "x+", r"\b[0-9]{16}\b", '"\\d')),
            "action": st.sampled_from(("block", "redact", "flag")),
            "models": st.lists(WORDS, min_size=1, max_size=2),
            "keys": st.lists(WORDS, min_size=1, max_size=2),
        },
    )
    (kind, *_) = typing.get_args(field_types(field_types(Settings)["guard"])["rule"])
    assert set(field_types(kind)) == {"name", "words", "on", "match", "action", "models", "keys"}
    rules = st.lists(rule, max_size=3, unique_by=lambda one: one["name"])
    return st.fixed_dictionaries({}, optional={**counts, "rule": rules})


def shuffled(value: Any, rng: random.Random) -> Any:
    """The same data with its keys in another order."""
    if isinstance(value, Mapping):
        names = list(value)
        rng.shuffle(names)
        return {name: shuffled(value[name], rng) for name in names}
    if isinstance(value, list):
        return [shuffled(item, rng) for item in value]
    return value


def spelled(values: Mapping[str, Any], rng: random.Random) -> str:
    """The same data as somebody might write it: dotted keys in any order, comments, blank lines, other escapes, lists over lines."""
    lines = [f"{path} = {_inline(value, rng)}" for path, value in _leaves(values, "")]
    rng.shuffle(lines)
    return "".join(f"{line}{rng.choice(('', '  # why', '   '))}{rng.choice(chr(10) * 3 + '#')}\n" for line in lines)


def _leaves(values: Mapping[str, Any], above: str) -> list[tuple[str, Any]]:
    found = []
    for name, value in values.items():
        path = join(above, name)
        found += _leaves(value, path) if isinstance(value, Mapping) else [(path, value)]
    return found


def _inline(value: Any, rng: random.Random) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name} = {_inline(item, rng)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        gap = rng.choice(("", " ", "\n  "))
        return "[" + "".join(f"{gap}{_inline(item, rng)}," for item in value) + gap + "]"
    if isinstance(value, str):
        return '"' + "".join(f"\\U{ord(c):08X}" if not c.isalnum() or rng.random() < 0.2 else c for c in value) + '"'
    return repr(value)
