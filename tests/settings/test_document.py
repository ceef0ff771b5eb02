"""The cluster's settings document: one form for one meaning, every fault with its place, and what two documents differ in."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from typing import Any, TypeVar

import attrs
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llmgw.domain.errors import EXIT_INVALID, Invalid, NotFound
from llmgw.domain.setting import Applies, Scope
from llmgw.settings.decode import known_paths
from llmgw.settings.document import (
    BASELINE_GUARD,
    DOCUMENT_BYTES_MAX,
    EMPTY,
    Document,
    cluster_values_of,
    differences,
    document_of,
    imported,
    live_merge,
    parse_document,
    path_parts,
    path_text,
    read_value,
    restart_keys,
    value_at,
    with_keys,
)
from llmgw.settings.layers import effective
from llmgw.settings.load import load_text, table_scope
from llmgw.settings.schema import RouterSettings, ServerSettings, Settings
from tests.settings.strategies import cluster_values, shuffled, spelled

T = TypeVar("T")
quick = settings(deadline=None, max_examples=200)
documents = cluster_values().map(lambda values: document_of(values, "drawn"))


def faults(given: str | bytes | dict[str, Any]) -> dict[str, str]:
    with pytest.raises(Invalid) as caught:
        document_of(given, "the document") if isinstance(given, dict) else parse_document(given, "the document")
    assert caught.value.exit_code == EXIT_INVALID
    assert caught.value.message.startswith("the document is not valid")
    for fault in caught.value.faults:
        assert str(fault) in caught.value.message
    return {fault.path: fault.reason for fault in caught.value.faults}


def refusal(text: str | bytes) -> Invalid:
    with pytest.raises(Invalid) as caught:
        parse_document(text, "the document")
    return caught.value


def change_faults(given: dict[str, Any], unset: tuple[str, ...] = (), document: Document = EMPTY) -> dict[str, str]:
    with pytest.raises(Invalid) as caught:
        with_keys(document, given, unset)
    return {fault.path: fault.reason for fault in caught.value.faults}


def told(make: Callable[[], T]) -> T | Invalid:
    """What comes of it, or how it is refused; anything else is raised."""
    try:
        return make()
    except Invalid as err:
        return err


def of(**tables: dict[str, Any]) -> Document:
    return document_of(tables, "t")


# --- one form for one meaning


@quick
@given(documents)
def test_the_text_of_a_document_read_again_is_the_document(document: Document) -> None:
    again = parse_document(document.text, "t")
    assert again == document
    assert (again.text, again.values, again.sha256, again.settings) == (document.text, document.values, document.sha256, document.settings)
    assert document.sha256 == hashlib.sha256(document.text.encode()).hexdigest()


@quick
@given(cluster_values(), st.randoms(use_true_random=False))
def test_the_order_of_keys_and_how_they_are_spelled_do_not_change_the_text(values: dict[str, Any], rng: random.Random) -> None:
    expected = document_of(values, "t").text
    assert document_of(shuffled(values, rng), "t").text == expected
    assert parse_document(spelled(values, rng), "t").text == expected
    assert document_of(json.loads(json.dumps(values)), "t").text == expected


def test_a_whole_number_with_and_without_a_point_is_one_setting() -> None:
    plain = parse_document("[lease]\nttl_s = 20\n[reconcile]\nrestart_backoff_s = [1, 2]\n[reconcile.brake]\nshare = 1", "t")
    pointed = parse_document("reconcile.brake.share = 1.0\nlease.ttl_s = 2e1\nreconcile.restart_backoff_s = [1.0, 2.0]", "t")
    assert plain == pointed
    assert plain.text == "[lease]\nttl_s = 20\n\n[reconcile]\nrestart_backoff_s = [\n    1,\n    2,\n]\n\n[reconcile.brake]\nshare = 1\n"


def test_tables_stand_in_the_schemas_order_and_engines_by_name() -> None:
    text = parse_document(
        '[notify]\nlevel = "error"\n[engines.vllm]\nload_limit_s = 9\n[engines."llama.cpp"]\nload_limit_s = 8\n'
        "[lease]\npoll_s = 2\nttl_s = 20",
        "t",
    ).text
    assert [line for line in text.splitlines() if line] == [
        "[lease]",
        "ttl_s = 20",
        "poll_s = 2",
        '[engines."llama.cpp"]',
        "load_limit_s = 8",
        "[engines.vllm]",
        "load_limit_s = 9",
        "[notify]",
        'level = "error"',
    ]


def test_a_table_that_says_nothing_leaves_no_trace() -> None:
    assert parse_document("[lease]\n[engines.vllm]\n[reconcile.brake]\n", "t") == EMPTY
    assert (EMPTY.text, EMPTY.paths) == ("", ())
    assert document_of({}, "t") == EMPTY


def test_a_key_set_to_its_default_is_set() -> None:
    assert parse_document("[lease]\nttl_s = 15", "t").paths == ("lease.ttl_s",)
    assert parse_document("[guard]\nrule = []", "t").paths == ("guard.rule",)


def test_a_byte_order_mark_and_line_ends_of_windows_change_nothing() -> None:
    assert parse_document("\ufeff[lease]\r\nttl_s = 20\r\n", "t") == of(lease={"ttl_s": 20})


# --- one key: set, unset, get


@quick
@given(documents)
def test_a_document_is_made_of_its_keys(document: Document) -> None:
    keys = {path: value_at(document, path) for path in document.paths}
    assert with_keys(EMPTY, keys) == document
    assert with_keys(document, {}, document.paths) == EMPTY
    assert with_keys(document, keys) == document


@quick
@given(documents, st.data())
def test_what_was_set_is_read_back_and_nothing_else_moves(document: Document, data: st.DataObject) -> None:
    path, value = data.draw(
        st.sampled_from(
            [
                ("route.retries", 3),
                ("placement.pack", False),
                ('engines."llama.cpp".load_limit_s', 77),
                ("reconcile.brake.share", 0.5),
                ("guard.rule", [{"name": "a", "words": ["b"]}]),
                ("events.keep_days", 7),
            ]
        )
    )
    changed = with_keys(document, {path: value})
    assert value_at(changed, path) == value
    assert {other: value_at(changed, other) for other in changed.paths if other != path} == {
        other: value_at(document, other) for other in document.paths if other != path
    }
    assert value_at(with_keys(changed, {}, [path]), path) is None


def test_an_engines_name_with_a_point_stands_in_quotes() -> None:
    document = with_keys(EMPTY, {'engines."llama.cpp".load_limit_s': 60})
    assert document.text == '[engines."llama.cpp"]\nload_limit_s = 60\n'
    assert value_at(document, "engines.'llama.cpp'.load_limit_s") == 60
    assert value_at(document, 'engines."llama.cpp"') == {"load_limit_s": 60}
    assert value_at(document, "engines.vllm.load_limit_s") is None
    assert document.settings.engine("llama.cpp").load_limit_s == 60
    assert 'did you mean engines."llama.cpp"?' in change_faults({"engines.llama.cpp.load_limit_s": 60})["engines.llama"]


def test_a_guard_rule_is_set_with_the_whole_list_of_rules() -> None:
    document = with_keys(EMPTY, {"guard.rule": [{"words": ["x"], "name": "a", "action": "flag"}]})
    assert document.text == '[[guard.rule]]\nname = "a"\nwords = [\n    "x",\n]\naction = "flag"\n'
    assert value_at(document, "guard.rule") == [{"name": "a", "words": ["x"], "action": "flag"}]
    assert "no keys of its own" in change_faults({"guard.rule.name": "b"})["guard.rule.name"]


@pytest.mark.parametrize(
    ("change", "path", "reason"),
    [
        ({"lease": {"ttl_s": 20}}, "lease", "is a table; name one of its keys"),
        ({"engines": {}}, "engines", "is a table; name one of its keys"),
        ({"engines.vllm": {}}, "engines.vllm", "is a table; name one of its keys"),
        ({"lease.ttl": 20}, "lease.ttl", "did you mean lease.ttl_s?"),
        ({"leese.ttl_s": 20}, "leese", "did you mean lease?"),
        ({"lease.ttl_s.x": 20}, "lease.ttl_s.x", "no keys of its own"),
        ({"engines.vllm.load_limit": 20}, "engines.vllm.load_limit", "did you mean engines.vllm.load_limit_s?"),
        ({"engines.vlm.load_limit_s": 20}, "engines.vlm", "did you mean engines.vllm?"),
        ({"router.listen": "0.0.0.0:80"}, "router.listen", "one machine's own key"),
        ({"store.path": "x"}, "store.path", "one machine's own key"),
        ({"model": []}, "model", "llmgw ctl model"),
        ({"endpoint.url": ""}, "endpoint.url", "endpoints come from models' replicas"),
        ({"auth.key": []}, "auth.key", "clients' keys are changed with `llmgw ctl key`"),
        ({"auth.key.name": "a"}, "auth.key.name", "llmgw ctl key"),
        ({"": 1}, "", "is no key: expected table.key"),
        ({"a b": 1}, "a b", "is no key"),
        ({"lease.ttl_s = 3 #": 1}, "lease.ttl_s = 3 #", "is no key"),
        ({"[lease]": 1}, "[lease]", "is no key"),
        ({"lease..ttl_s": 1}, "lease..ttl_s", "is no key"),
        ({"lease.ttl_s\n": 1}, "lease.ttl_s\n", "is no key"),
        ({"lease.\0": 1}, "lease.\0", "is no key"),
    ],
)
def test_a_change_of_what_is_no_key_of_the_cluster_names_it(change: dict[str, Any], path: str, reason: str) -> None:
    found = change_faults(change)
    assert list(found) == [path]
    assert reason in found[path]
    assert change_faults({}, tuple(change)) == found


def test_a_key_as_long_as_a_page_does_not_flood_the_fault() -> None:
    with pytest.raises(Invalid) as caught:
        with_keys(EMPTY, {"lease." + "x" * 100_000: 1})
    assert len(str(caught.value)) < 500


def test_one_key_cannot_be_set_and_unset_at_once() -> None:
    assert change_faults({"lease.ttl_s": 20}, ("lease.ttl_s",)) == {"lease.ttl_s": "cannot be set and unset at once"}


def test_one_key_in_two_spellings_is_one_key() -> None:
    """`"lease".ttl_s` is `lease.ttl_s` in TOML: the later of two values won in silence, and a key was set and unset at once."""
    assert "at once" in change_faults({"lease.ttl_s": 20}, ('"lease".ttl_s',))["lease.ttl_s"]
    assert "twice" in change_faults({"lease.ttl_s": 20, 'lease."ttl_s"': 30})['lease."ttl_s"']


def test_unsetting_what_is_not_set_changes_nothing() -> None:
    document = of(lease={"ttl_s": 20})
    assert with_keys(document, {}, ("lease.poll_s", "route.retries", "engines.vllm.load_limit_s")) == document


def test_every_fault_of_a_change_is_told_at_once() -> None:
    found = change_faults({"lease.ttl_s": "x", "route.retries": 99, "events.keep_days": 1.5})
    assert list(found) == ["lease.ttl_s", "route.retries", "events.keep_days"]


def test_a_refused_change_leaves_the_document_as_it_was() -> None:
    document = of(guard={"rule": [{"name": "a", "words": ["b"]}]}, lease={"ttl_s": 20})
    before = (document.text, json.dumps(document.values))
    change_faults({"lease.ttl_s": 9999, "guard.rule": 3}, document=document)
    with_keys(document, {"lease.ttl_s": 30, "guard.rule": []})
    assert (document.text, json.dumps(document.values)) == before


def test_asking_for_a_key_that_nobody_knows_is_an_error_and_for_one_that_is_not_set_is_none() -> None:
    assert value_at(EMPTY, "lease.ttl_s") is None
    assert value_at(EMPTY, "lease") is None
    assert value_at(of(lease={"ttl_s": 20}), "lease") == {"ttl_s": 20}
    for path in ("lease.ttl", "router.listen", "model", "", "lease.ttl_s.x", "\ud800"):
        with pytest.raises(NotFound) as caught:
            value_at(EMPTY, path)
        assert caught.value.code == "unknown_key"


@given(st.lists(st.text(st.characters(exclude_categories=("Cc", "Cs"), exclude_characters="=#[]{}"), max_size=8), min_size=1, max_size=4))
def test_a_path_of_parts_comes_back_as_its_parts(parts: list[str]) -> None:
    assert path_parts(path_text(parts)) == tuple(parts)


@given(st.text(max_size=40))
@example("a.b = 1\nc")
@example('"' * 3)
@example("." * 299)
def test_any_text_for_a_path_is_a_path_or_refused(text: str) -> None:
    parts = told(lambda: path_parts(text))
    assert "is no key" in parts.message if isinstance(parts, Invalid) else parts
    changed = told(lambda: with_keys(EMPTY, {text: 1}))
    assert changed.faults if isinstance(changed, Invalid) else changed.text


# --- faults, each with its key


@pytest.mark.parametrize(
    ("text", "path", "reason"),
    [
        ("[lease]\nttl = 20", "lease.ttl", "unknown key; did you mean lease.ttl_s?"),
        ("[leese]\nttl_s = 20", "leese", "unknown key; did you mean lease?"),
        ("ttl_s = 20", "ttl_s", "did you mean lease.ttl_s?"),
        ("[reconcile]\nshare = 0.5", "reconcile.share", "did you mean reconcile.brake.share?"),
        ('[lease]\nttl_s = "20"', "lease.ttl_s", "expected a number"),
        ("[lease]\nttl_s = true", "lease.ttl_s", "expected a number"),
        ("[route]\nretries = 1.5", "route.retries", "expected a whole number"),
        ("[placement]\npack = 1", "placement.pack", "expected true or false"),
        ("[notify]\nurl = 3", "notify.url", "expected a string"),
        ("[guard]\nrule = 3", "guard.rule", "expected a list of tables"),
        ("[guard]\nrule = [3]", "guard.rule[0]", "expected a table"),
        ("lease = 3", "lease", "expected a table"),
        ("auth = 3", "auth", "expected a table"),
        ("engines = 3", "engines", "expected a table"),
        ("engines.vllm = 3", "engines.vllm", "expected a table"),
        ("lease.ttl_s = 1979-05-27", "lease.ttl_s", "expected a number"),
        ("[lease]\nttl_s = 1e9", "lease.ttl_s", "must be between 2 and 300 s, not 1e+09"),
        ("[lease]\nttl_s = 0", "lease.ttl_s", "must be between 2 and 300 s"),
        ("[route]\nretries = -1", "route.retries", "must be between 0 and 10, not -1"),
        ('[notify]\nlevel = "warn"', "notify.level", "did you mean 'warning'?"),
        ('[notify]\nurl = "ftp://x"', "notify.url", ""),
        ('[route]\naffinity = "cookie"', "route.affinity", '"header:NAME"'),
        ("[reconcile]\nrestart_backoff_s = []", "reconcile.restart_backoff_s", "1 to 32 numbers"),
        ("[lease]\nttl_s = nan", "lease.ttl_s", "expected a finite number"),
        ("[lease]\nttl_s = inf", "lease.ttl_s", "expected a finite number"),
        ("[lease]\nttl_s = -inf", "lease.ttl_s", "expected a finite number"),
        ("[lease]\nttl_s = 1e999", "lease.ttl_s", "expected a finite number"),
        (f"[lease]\nttl_s = {10**400}", "lease.ttl_s", "expected a finite number"),
        (f"[route]\nqueue_max = {2**63}", "route.queue_max", "too large"),
        (f"[route]\nqueue_max = {-(2**64)}", "route.queue_max", "too large"),
        ("[reconcile]\nrestart_backoff_s = [1, nan]", "reconcile.restart_backoff_s[1]", "expected a finite number"),
        ('[placement]\nspread = "a\\u0000b"', "placement.spread", "NUL"),
        ('[[guard.rule]]\nname = "a"\nwords = ["x\\u0000"]', "guard.rule[0].words[0]", "NUL"),
        ('[[guard.rule]]\nname = "a"', "guard.rule[0]", "needs match or words"),
        ('[[guard.rule]]\nwords = ["a"]', "guard.rule[0].name", "is missing"),
        ('[[guard.rule]]\nname = "a"\nwords = [""]', "guard.rule[0].words", "empty word"),
        ('[[guard.rule]]\nname = "a"\nmatch = "("', "guard.rule[0].match", "not a regular expression"),
        ('[[guard.rule]]\nname = "a"\nmatch = "x*"', "guard.rule[0].match", "matches the empty text"),
        ('[[guard.rule]]\nname = "a"\nwords = ["b"]\nactoin = "flag"', "guard.rule[0].actoin", "did you mean guard.rule[0].action?"),
        ('[[guard.rule]]\nname="a"\nwords=["b"]\n[[guard.rule]]\nname="a"\nwords=["c"]', "guard.rule[1].name", "there twice"),
        ('[engines.vllm]\ncommand = [""]', "engines.vllm.command", "must not be empty"),
        ("[engines.openai]\nload_limit_s = 3", "engines.openai", "unknown name"),
        ("[lease]\nttl_s = 14", "lease.renew_s", "must be at most a third of ttl_s (14 s), not 5"),
        ("[lease]\nrenew_s = 6", "lease.renew_s", "must be at most a third of ttl_s (15 s), not 6"),
        ("[lease]\nttl_s = 30\nrenew_s = 10.1", "lease.renew_s", "must be at most a third of ttl_s (30 s), not 10.1"),
        ("[lease]\npoll_s = 16", "lease.poll_s", "must be at most ttl_s (15 s), not 16"),
        ("[reconcile]\nheartbeat_s = 11", "reconcile.node_lost_after_s", "at least three times heartbeat_s (33 s), not 30"),
        ("[reconcile]\nnode_lost_after_s = 20", "reconcile.node_lost_after_s", "at least three times heartbeat_s (30 s), not 20"),
        ('[server]\nname = "x"', "server", "[server] is one machine's own key"),
        ("[store]", "store", "[store] is one machine's own key"),
        ('tls.certificate = "/x"', "tls", "one machine's own key"),
        ('[[model]]\nname = "m"', "model", "llmgw ctl model"),
        ('[[endpoint]]\nid = "u"', "endpoint", "[[endpoint]] tables stand in the file of a router"),
        ("model = 3", "model", "llmgw ctl model"),
        ('[[auth.key]]\nname = "a"', "auth.key", "clients' keys are changed with `llmgw ctl key`"),
    ],
)  # fmt: skip
def test_a_fault_names_the_key_and_what_is_wrong_with_it(text: str, path: str, reason: str) -> None:
    found = faults(text)
    assert list(found) == [path]
    assert reason in found[path]


def test_every_fault_of_a_document_is_told_at_once() -> None:
    found = faults(
        '[server]\nname = "x"\n[[model]]\n[leese]\n[auth]\nrequired = 1\nkey = []\n[lease]\nttl_s = "x"\nrenew_s = 200\n[route]\nretrys = 1'
    )
    assert set(found) == {"server", "model", "leese", "auth.required", "auth.key", "lease.ttl_s", "lease.renew_s", "route.retrys"}


def test_a_contradiction_is_found_whichever_of_the_two_keys_is_changed() -> None:
    document = of(lease={"ttl_s": 30, "renew_s": 10})
    assert set(change_faults({"lease.ttl_s": 29}, document=document)) == {"lease.renew_s"}
    assert set(change_faults({"lease.renew_s": 10.5}, document=document)) == {"lease.renew_s"}
    assert set(change_faults({}, ("lease.ttl_s",), document=document)) == {"lease.renew_s"}
    assert with_keys(document, {"lease.ttl_s": 29, "lease.renew_s": 9}).settings.lease.ttl_s == 29


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "\ud800", "a\0b", 2**70, None, {}, [[]], {"a": {"b": []}}])
def test_what_json_may_hold_and_no_key_takes_is_a_fault_with_its_path(value: Any) -> None:
    for path in ("lease.ttl_s", "route.queue_max", "notify.url", "placement.pack", "reconcile.restart_backoff_s"):
        assert all(at.startswith(path) for at in change_faults({path: value}))
        table, key = path.split(".")
        assert all(at.startswith(path) for at in faults({table: {key: value}}))


def test_half_a_character_in_a_key_is_a_fault() -> None:
    assert faults({"lease": {"\ud800": 1}})
    assert faults({"\ud800": {}})
    assert faults({"engines": {"\udfff": {"load_limit_s": 3}}})


def test_a_text_that_is_not_utf_8_names_the_line() -> None:
    assert refusal(b"[lease]\nttl_s = 20\n# \xff").message == "the document is not UTF-8 text (line 3)"
    assert refusal("[lease]\n# \ud800").message == "the document is not UTF-8 text (line 2)"


def test_broken_toml_names_line_and_column() -> None:
    err = refusal("[lease]\nttl_s = = 3")
    assert err.message.startswith("the document is not TOML at line 2, column 9")
    assert refusal("[lease]\nttl_s = 20\nttl_s = 30\n").message.startswith("the document is not TOML at line 3")
    assert refusal("a = \0").faults == ()


def test_a_number_of_more_digits_than_python_converts_is_refused() -> None:
    assert "more digits" in refusal(f"[route]\nqueue_max = {'9' * 10_000}").message


@pytest.mark.parametrize("text", ["x = " + "[" * 5000, "x = " + "{a=" * 3000, "a" + ".a" * 5000 + " = 1", "[" + "a." * 5000 + "a]"])
def test_a_document_nested_without_end_is_refused(text: str) -> None:
    assert len(refusal(text).message) < 3000


def test_ten_megabytes_are_refused_before_they_are_read() -> None:
    for text in ("# " + "x" * 10_000_000, b"\xff" * 10_000_000):
        err = refusal(text)
        assert err.code == "document_too_large"
        assert f"the document is larger than {DOCUMENT_BYTES_MAX} bytes" in err.message


def test_a_document_is_as_large_as_its_text_however_it_came() -> None:
    words = ["x" * 1000] * 1100
    with pytest.raises(Invalid) as caught:
        document_of({"guard": {"rule": [{"name": "a", "words": words}]}}, "the body")
    assert caught.value.code == "document_too_large"
    assert document_of({"guard": {"rule": [{"name": "a", "words": words[:900]}]}}, "the body").text


@quick
@given(st.binary(max_size=100))
@example(b"")
@example(b"\xef\xbb\xbf")
def test_any_bytes_are_a_document_or_refused(data: bytes) -> None:
    document = told(lambda: parse_document(data, "t"))
    if isinstance(document, Invalid):
        assert document.message.startswith("t ")
    else:
        assert parse_document(document.text, "t") == document


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(), max_size=6), inner, max_size=3),
    max_leaves=8,
)


@quick
@given(
    st.dictionaries(
        st.sampled_from(("lease", "guard", "engines", "auth", "reconcile", "model", "server", "")) | st.text(), plain, max_size=3
    )
)
def test_any_plain_data_is_a_document_or_refused(values: dict[str, Any]) -> None:
    document = told(lambda: document_of(values, "t"))
    if isinstance(document, Invalid):
        assert document.faults
    else:
        assert parse_document(document.text, "t") == document


@quick
@given(st.sampled_from([path for path in known_paths(Settings) if table_scope(path.partition(".")[0]) is Scope.CLUSTER]), plain)
def test_any_value_for_a_key_is_taken_or_refused_with_its_path(path: str, value: Any) -> None:
    if path == "engines":
        path = "engines.vllm.load_limit_s"
    document = told(lambda: with_keys(EMPTY, {path: value}))
    if isinstance(document, Invalid):
        assert document.faults
        assert all(fault.path.startswith(path.partition(".")[0]) for fault in document.faults)
    else:
        assert document.paths in ((path,), ())


# --- two documents


@quick
@given(documents, documents)
def test_what_two_documents_differ_in_turns_one_into_the_other(before: Document, after: Document) -> None:
    found = differences(before, after)
    set_now = {one.path: one.after for one in found if one.after is not None}
    unset = [one.path for one in found if one.after is None]
    assert with_keys(before, set_now, unset) == after
    assert len({one.path for one in found}) == len(found)
    assert all(one.before != one.after for one in found)
    assert [(one.path, one.after, one.before) for one in found] == [(one.path, one.before, one.after) for one in differences(after, before)]


@quick
@given(documents)
def test_a_document_does_not_differ_from_itself_and_from_the_empty_one_in_its_keys(document: Document) -> None:
    assert differences(document, document) == ()
    assert [one.path for one in differences(EMPTY, document)] == list(document.paths)


def test_differences_stand_in_the_schemas_order_and_say_when_they_take_effect() -> None:
    before = of(notify={"level": "error"}, lease={"poll_s": 2, "ttl_s": 20})
    after = of(lease={"ttl_s": 30}, engines={"vllm": {"load_limit_s": 9}, "llama.cpp": {"load_limit_s": 8}}, route={"retries": 2})
    assert [(one.path, one.before, one.after, one.applies) for one in differences(before, after)] == [
        ("lease.ttl_s", 20, 30, Applies.RESTART),
        ("lease.poll_s", 2, None, Applies.RESTART),
        ("route.retries", None, 2, Applies.LIVE),
        ('engines."llama.cpp".load_limit_s', None, 8, Applies.LIVE),
        ("engines.vllm.load_limit_s", None, 9, Applies.LIVE),
        ("notify.level", "error", None, Applies.LIVE),
    ]


def test_a_document_of_another_build_with_keys_that_nobody_knows_here_is_compared_all_the_same() -> None:
    newer = Document("", {"lease": {"ttl_s": 20, "new\nkey": 1}, "queues": {"a=b": {"x": 2}}, "notify": {"level": "error"}}, Settings())
    found = [(one.path, one.after) for one in differences(EMPTY, newer)]
    assert found == [("lease.ttl_s", 20), ('lease."new\nkey"', 1), ("notify.level", "error"), ('queues."a=b".x', 2)]
    assert [one.before for one in differences(newer, EMPTY)] == [20, 1, "error", 2]


# --- what a running process can take


def with_machine(document: Document, name: str, listen: str) -> Settings:
    return attrs.evolve(document.settings, server=ServerSettings(name=name), router=RouterSettings(listen=listen))


machines = st.builds(with_machine, documents, st.sampled_from(("a", "b")), st.sampled_from(("127.0.0.1:1", "127.0.0.1:2")))


@quick
@given(machines, machines)
def test_a_live_merge_takes_every_live_key_and_no_other(running: Settings, wanted: Settings) -> None:
    merged = live_merge(running, wanted)
    assert restart_keys(running, merged) == ()
    assert restart_keys(running, merged, Scope.MACHINE) == ()
    assert restart_keys(merged, wanted) == restart_keys(running, wanted)
    assert attrs.evolve(merged, lease=wanted.lease, server=wanted.server, router=wanted.router) == wanted


@quick
@given(machines, machines)
def test_merging_twice_is_merging_once_and_what_runs_stays(running: Settings, wanted: Settings) -> None:
    merged = live_merge(running, wanted)
    assert live_merge(merged, wanted) == merged
    assert live_merge(running, running) == running


@quick
@given(machines, machines)
def test_a_live_merge_makes_no_contradiction(running: Settings, wanted: Settings) -> None:
    document_of(cluster_values_of(live_merge(running, wanted)), "t")


def test_restart_keys_are_the_leases_in_the_schemas_order() -> None:
    before = of(lease={"ttl_s": 30, "poll_s": 2}).settings
    after = of(route={"retries": 4}).settings
    assert restart_keys(before, after) == ("lease.ttl_s", "lease.poll_s")
    assert restart_keys(before, before) == ()


def test_a_key_set_to_its_default_asks_for_no_restart() -> None:
    assert restart_keys(EMPTY.settings, of(lease={"ttl_s": 15.0}).settings) == ()


@quick
@given(documents)
def test_the_values_of_settings_make_a_document_with_these_settings(document: Document) -> None:
    again = document_of(cluster_values_of(document.settings), "t")
    names = {*document.settings.engines, *again.settings.engines}
    assert attrs.evolve(again.settings, engines={}) == attrs.evolve(document.settings, engines={})
    assert all(again.settings.engine(name) == document.settings.engine(name) for name in names)
    assert set(again.paths) <= set(document.paths)


def test_default_settings_are_no_values() -> None:
    assert cluster_values_of(Settings()) == {}
    assert cluster_values_of(attrs.evolve(Settings(), server=ServerSettings(name="x"))) == {}


# --- the first version


def test_a_file_without_a_guard_is_imported_with_the_baseline_policy() -> None:
    document = imported({"lease": {"ttl_s": 20}}, "the file")
    assert value_at(document, "guard") == BASELINE_GUARD
    assert value_at(document, "lease.ttl_s") == 20
    assert document.settings.guard.rule[0].action == "flag"


def test_a_file_that_says_something_of_the_guard_keeps_that() -> None:
    assert imported({"guard": {"max_images": 3}}, "the file").paths == ("guard.max_images",)


@quick
@given(cluster_values())
def test_a_file_with_cluster_keys_is_imported_as_it_is_in_force(values: dict[str, Any]) -> None:
    file = load_text(document_of(values, "t").text, source="f")
    document = imported(file.cluster_values, "f")
    assert attrs.evolve(effective(file, document), guard=file.settings.guard) == attrs.evolve(
        file.settings, engines=document.settings.engines
    )
    assert "guard" not in values or not values["guard"] or document == document_of(values, "t")


# --- what a person types


@pytest.mark.parametrize(
    ("path", "text", "value"),
    [
        ("lease.ttl_s", "20", 20),
        ("lease.ttl_s", "2_0.5", 20.5),
        ("lease.ttl_s", "20 # seconds", 20),
        ("placement.pack", "false", False),
        ("placement.spread", "rack", "rack"),
        ("placement.spread", '"rack"', "rack"),
        ("placement.spread", "true", "true"),
        ("placement.spread", "08", "08"),
        ("placement.spread", "3", "3"),
        ("placement.spread", "", ""),
        ("notify.url", "https://h.example/a#b", "https://h.example/a#b"),
        ("notify.url", "${HOOK}", "${HOOK}"),
        ("reconcile.restart_backoff_s", "[1, 2.5]", [1, 2.5]),
        ("engines.vllm.command", '["/opt/vllm", "x"]', ["/opt/vllm", "x"]),
        ("guard.rule", '[{name = "a", words = ["b"]}]', [{"name": "a", "words": ["b"]}]),
    ],
)
def test_what_a_person_types_is_toml_or_text_for_a_key_that_takes_text(path: str, text: str, value: Any) -> None:
    assert read_value(path, text) == value


@pytest.mark.parametrize(
    "text", ["", "yes", "20\nother = 3", "20\n[x]", "/opt/vllm", "[1", "9" * 10_000, "[" * 5000, "${X}", "08", "\ud800"]
)
def test_a_value_that_toml_does_not_know_is_refused_with_its_key(text: str) -> None:
    with pytest.raises(Invalid) as caught:
        read_value("lease.ttl_s", text)
    assert caught.value.message.startswith("lease.ttl_s: ")
    assert caught.value.param == "lease.ttl_s"
    assert len(caught.value.message) < 300


def test_a_value_for_an_unknown_key_names_the_nearest() -> None:
    with pytest.raises(Invalid) as caught:
        read_value("lease.ttl", "20")
    assert "did you mean lease.ttl_s?" in caught.value.message


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('lease.ttl_s = "${X}"', "expected a number"),
        ("lease.ttl_s = ''", "expected a number"),
        ('placement.pack = "true"', "expected true"),
    ],
)
def test_b158_a_place_holder_is_never_filled_in_and_never_a_number(text: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """BerriAI/litellm#8919: `${X}` was taken as text where a number was needed. Nothing is expanded here, set or not."""
    monkeypatch.setenv("X", "20")
    (found,) = faults(text).values()
    assert reason in found


def test_b158_a_place_holder_in_a_text_stays_as_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("X", "rack")
    assert parse_document('placement.spread = "${X}"', "t").settings.placement.spread == "${X}"


def test_every_fault_of_a_change_is_told_at_once_those_of_keys_and_those_of_values() -> None:
    with pytest.raises(Invalid) as caught:
        with_keys(EMPTY, {"guard.max_mesages": 7, "route.retries": -1, "lease.ttl_s": 9.0, "lease.renew_s": 4.0})
    told = caught.value.message
    assert all(path in told for path in ("guard.max_mesages", "route.retries", "lease")), told


@pytest.mark.parametrize("text", ["nan", "inf", "-inf"])
def test_a_number_that_is_none_is_told_with_its_key(text: str) -> None:
    with pytest.raises(Invalid, match=r"route\.retry_budget: expected a finite number"):
        read_value("route.retry_budget", text)


@pytest.mark.parametrize("key", ["models", "keys"])
def test_a_rule_for_nobody_is_refused(key: str) -> None:
    with pytest.raises(Invalid, match=f"{key}: names nobody"):
        document_of({"guard": {"rule": [{"name": "a", "words": ["x"], key: []}]}}, "the document")
