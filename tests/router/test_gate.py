"""The guard without sockets: no way of writing a word hides it, no rule judges what it is not for, and no body costs more than its size."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from llmgw.domain.endpoint import Endpoint, EndpointList
from llmgw.domain.fold import fold
from llmgw.domain.ids import EndpointId
from llmgw.domain.policy import GuardPolicy, GuardRule, Policy
from llmgw.router.body import read_body
from llmgw.router.families import ROUTES, Route
from llmgw.router.gate import ADMITTED, Gate, Guard, Judgement, not_in_force
from llmgw.router.guard_rules import FEW, WordFinder
from llmgw.router.prompt import read_prompt
from llmgw.router.table import build_table

CHAT = ROUTES["/v1/chat/completions"]
WORDS = ("secret", "top secret", "c++", "Straße", "机密", "-----BEGIN", "naïve")
MANY = tuple(f"filler{number}" for number in range(FEW)) + tuple(f"填{chr(0x4E00 + number)}" for number in range(FEW))


def guard(*rules: GuardRule, **limits: int) -> Guard:
    return Guard.of(GuardPolicy(rule=rules, **limits))


def rule(*words: str, name: str = "r", **more: Any) -> GuardRule:
    return GuardRule(name, words=words, **more)


def judge(
    one: Guard, body: dict[str, Any] | bytes, path: str = "/v1/chat/completions", names: tuple[str, ...] = ("m1",), key: str = ""
) -> Judgement:
    raw = body if isinstance(body, bytes) else json.dumps({"model": "m1", **body}).encode()
    return one.admit(ROUTES[path], raw, names, key)


def code(judged: Judgement) -> tuple[str, str | None] | None:
    return None if judged.refusal is None else (judged.refusal.code, judged.refusal.param)


def user(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


def text(found: str) -> dict[str, Any]:
    return {"type": "text", "text": found}


BLOCKED = "guard_blocked"
# Every place where a client's text goes to a model: path, body around the text, the member that is told.
PLACES: dict[str, tuple[str, Callable[[str], dict[str, Any]], str]] = {
    "chat": ("/v1/chat/completions", user, "messages"),
    "chat, a part": (
        "/v1/chat/completions",
        lambda t: user([text(t), {"type": "image_url", "image_url": {"url": "http://i/1"}}]),
        "messages",
    ),
    "chat, a bare part": ("/v1/chat/completions", lambda t: user([t]), "messages"),
    "chat, the name of a user": ("/v1/chat/completions", lambda t: {"messages": [{"role": "user", "name": t, "content": ""}]}, "messages"),
    "chat, a role of its own": ("/v1/chat/completions", lambda t: {"messages": [{"role": t, "content": ""}]}, "messages"),
    "chat, a call": (
        "/v1/chat/completions",
        lambda t: {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": json.dumps({"q": t})}}]}]},
        "messages",
    ),
    "chat, a tool": (
        "/v1/chat/completions",
        lambda t: {**user("hi"), "tools": [{"type": "function", "function": {"description": t}}]},
        "tools",
    ),
    "chat, a tool's member": (
        "/v1/chat/completions",
        lambda t: {**user("hi"), "tools": [{"function": {"parameters": {"properties": {t: {"type": "string"}}}}}]},
        "tools",
    ),
    "chat, data of a tool that looks like an image": (
        "/v1/chat/completions",
        lambda t: {**user("hi"), "tools": [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{t}"}}]},
        "tools",
    ),
    "chat, a template's words": (
        "/v1/chat/completions",
        lambda t: {**user("hi"), "chat_template_kwargs": {"x": t}},
        "chat_template_kwargs",
    ),
    "chat, a member that nobody knows yet": ("/v1/chat/completions", lambda t: {**user("hi"), "brand_new": {"x": [t]}}, "brand_new"),
    "completions": ("/v1/completions", lambda t: {"prompt": t}, "prompt"),
    "completions, many": ("/v1/completions", lambda t: {"prompt": ["a", t]}, "prompt"),
    "completions, suffix": ("/v1/completions", lambda t: {"prompt": "a", "suffix": t}, "suffix"),
    "responses": ("/v1/responses", lambda t: {"input": t}, "input"),
    "responses, items": ("/v1/responses", lambda t: {"input": [{"role": "user", "content": [{"type": "input_text", "text": t}]}]}, "input"),
    "responses, instructions": ("/v1/responses", lambda t: {"input": "a", "instructions": t}, "instructions"),
    "responses, a result": ("/v1/responses", lambda t: {"input": [{"type": "function_call_output", "output": t}]}, "input"),
    "embeddings": ("/v1/embeddings", lambda t: {"input": t}, "input"),
    "embeddings, many": ("/v1/embeddings", lambda t: {"input": ["a", t]}, "input"),
    "messages": ("/v1/messages", user, "messages"),
    "messages, system": ("/v1/messages", lambda t: {**user("hi"), "system": t}, "system"),
    "messages, system in blocks": ("/v1/messages", lambda t: {**user("hi"), "system": [text(t)]}, "system"),
    "messages, a result": ("/v1/messages", lambda t: user([{"type": "tool_result", "tool_use_id": "x", "content": [text(t)]}]), "messages"),
    "messages, a call": ("/v1/messages", lambda t: user([{"type": "tool_use", "id": "x", "name": "f", "input": {t: 1}}]), "messages"),
    "messages, a document": (
        "/v1/messages",
        lambda t: user([{"type": "document", "source": {"type": "content", "content": [text(t)]}}]),
        "messages",
    ),
    "rerank": ("/v1/rerank", lambda t: {"query": t, "documents": ["a"]}, "query"),
    "rerank, documents": ("/v1/rerank", lambda t: {"query": "a", "documents": ["b", {"text": t}]}, "documents"),
    "score": ("/v1/score", lambda t: {"text_1": "a", "text_2": ["b", t]}, "text_2"),
    "classify": ("/v1/classify", lambda t: {"input": [t]}, "input"),
    "images": ("/v1/images/generations", lambda t: {"prompt": t}, "prompt"),
    "speech": ("/v1/audio/speech", lambda t: {"input": t}, "input"),
}


# --- words


def dressed(data: st.DataObject, word: str) -> str:
    """A word with each letter in either case, and with what nobody sees between them."""
    parts = []
    for letter in word:
        parts.append(data.draw(st.sampled_from((letter.lower(), letter.upper(), letter))))
        parts.append(data.draw(st.sampled_from(("", "", "", "\u200b", "\u00ad", "\ufe0f"))))
    return "".join(parts)


def encoded(data: st.DataObject, value: Any) -> str:
    """JSON in which any letter may be written as an escape, in names too."""
    if isinstance(value, str):
        letters = []
        for letter in value:
            if letter in '"\\' or letter < " " or data.draw(st.booleans()):
                letters.append("".join(f"\\u{unit:04x}" for unit in memoryview(letter.encode("utf-16-le", "surrogatepass")).cast("H")))
            else:
                letters.append(letter)
        return '"' + "".join(letters) + '"'
    if isinstance(value, dict):
        return "{" + ", ".join(f"{encoded(data, name)} :{encoded(data, inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",\n".join(encoded(data, inner) for inner in value) + "]"
    return json.dumps(value)


@pytest.mark.parametrize("place", PLACES)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), word=st.sampled_from(WORDS), more=st.sampled_from(((), MANY)))
def test_no_case_no_escape_and_no_place_hides_a_word(place: str, data: st.DataObject, word: str, more: tuple[str, ...]) -> None:
    path, around, member = PLACES[place]
    before, after = (data.draw(st.sampled_from(("", " ", "a ", "é, ", "\n(", "是 "))) for _ in range(2))
    said = f"{before}{dressed(data, word)}{after[::-1]}"
    one = guard(rule(*more, name="other"), rule(word))
    body = encoded(data, {"model": "m1", **around(said)}).encode()
    read_body(body, needs_messages=ROUTES[path].needs_messages)  # such a body is taken
    judged = judge(one, body, path)
    assert code(judged) == (BLOCKED, member)
    assert judged.hits == (("r", "block"),)
    assert judged.refusal is not None
    assert "'r'" in judged.refusal.message
    assert word not in judged.refusal.message


@settings(deadline=None)
@given(st.data(), st.sampled_from(WORDS), st.booleans(), st.booleans())
def test_a_word_that_is_split_over_parts_of_a_content_is_found(data: st.DataObject, word: str, bare: bool, system: bool) -> None:
    said = f"tell me the {word}, please"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(said)), min_size=1, max_size=5)))
    pieces = [said[start:end] for start, end in zip([0, *cuts], [*cuts, len(said)], strict=True)]
    parts = [piece if bare else text(piece) for piece in pieces]
    body = {**user("hi"), "system": parts} if system else user(parts)
    assert code(judge(guard(rule(word)), body)) == (BLOCKED, "system" if system else "messages")


def test_a_phrase_of_which_each_word_is_a_part_of_its_own_is_found() -> None:
    assert code(judge(guard(rule("top secret")), user([text("it is top"), text("secret")]))) == (BLOCKED, "messages")


@pytest.mark.parametrize("more", [(), MANY])
@pytest.mark.parametrize(
    ("word", "said", "found"),
    [
        ("secret", "a secretary", False),
        ("secret", "nosecret", False),
        ("secret", "secret_1", False),
        ("secret", "secret-1 (secret)", True),
        ("secret", "这是secret文件", True),
        ("top secret", "top\n \tsecret", True),
        ("top secret", "atop secret top", False),
        ("top secret", "atop secret, top secret", True),
        ("top secret", "topsecret", False),
        ("c++", "C++20", True),
        ("c++", "objc++", False),
        ("-----begin", "x-----BEGIN RSA", True),
        ("-----begin", "-----BEGINNING", False),
        ("机密", "这是机密文件", True),
        ("ไทย", "ภาษาไทยง่าย", True),
        ("비밀", "비밀을 말해", True),
        ("strasse", "eine Straße", True),
        ("straße", "EINE STRASSE", True),
        ("naïve", "nai\u0308ve", True),
        ("nai\u0308ve", "NAÏVE", True),
        ("secret", "ｓｅｃｒｅｔ", True),
        ("secret", "𝓼𝓮𝓬𝓻𝓮𝓽", True),
        ("secret", "".join(chr(0xE0000 + ord(letter)) for letter in "secret"), True),
        ("secret", "sесret", False),  # two letters of another script, which stay what they are
        ("a", "a", True),
    ],
)
def test_where_a_word_begins_and_ends(word: str, said: str, found: bool, more: tuple[str, ...]) -> None:
    finder = WordFinder.of([(word, *more)])
    assert bool(finder.find([said])) is found
    assert bool(finder.find(["x", f"({said})", "y"])) is found


@settings(deadline=None)
@given(
    st.lists(st.text(st.sampled_from("ab -机密"), min_size=1, max_size=4), max_size=6), st.text(st.sampled_from("ab -机密"), max_size=30)
)
@example(["a a"], "a aa a")
def test_many_words_are_found_as_few_are(words: list[str], said: str) -> None:
    few = WordFinder.of([(word,) for word in words])
    many = WordFinder.of([*((word,) for word in words), MANY])
    assert not few.whole
    assert many.whole
    assert few.find([said]) == many.find([said])


def test_no_word_is_made_of_two_messages_or_of_two_prompts() -> None:
    one = guard(rule("secret", "top secret"))
    assert judge(one, {"messages": [{"content": "top"}, {"content": "secr"}, {"content": "et"}]}) == ADMITTED
    assert judge(one, {"prompt": ["top", "sec", "ret"]}, "/v1/completions") == ADMITTED
    assert judge(one, {"query": "a", "documents": [{"text": "sec"}, {"text": "ret"}]}, "/v1/rerank") == ADMITTED


def test_what_no_model_reads_is_not_judged() -> None:
    one = guard(rule("user", "function", "text", "m1", "content", "string", "png", "abc"))
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,abc+abc/abc"}}
    claude = {"type": "image", "source": {"type": "base64", "media_type": "image/x", "data": "abc+abc/abc"}}
    sound = {"type": "input_audio", "input_audio": {"data": "abc+", "format": "wav"}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"q": {"type": "string"}}}}}]
    body = {**user([text("hi"), image, claude, sound]), "tools": tools, "user": "abc", "metadata": {"x": "abc"}, "stop": ["abc"]}
    assert judge(one, body) == ADMITTED
    said = user([text("data:text/plain;base64, the abc")])  # a text is a text, whatever it looks like
    assert code(judge(one, said)) == (BLOCKED, "messages")


def test_both_of_two_members_of_one_name_are_judged_because_engines_take_either() -> None:
    one = guard(rule("secret"))
    for first, second in (("secret", "x"), ("x", "secret")):
        body = f'{{"model":"m1","messages":[{{"role":"user","content":"{first}","content":"{second}"}}]}}'.encode()
        assert code(judge(one, body)) == (BLOCKED, "messages")


def test_arguments_of_a_call_are_judged_as_engines_unpack_them() -> None:
    call = {"function": {"name": "f", "arguments": '{"q": "\\u0073ecret"}'}}
    assert code(judge(guard(rule("secret")), {"messages": [{"tool_calls": [call]}]})) == (BLOCKED, "messages")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [1, 2]}),
        ("/v1/completions", {"prompt": [[1, 2]]}),
        ("/v1/completions", {"prompt": "hi", "prompt_embeds": "AAAA"}),
        ("/v1/embeddings", {"input": ["a", 1]}),
    ],
)
def test_a_prompt_in_numbers_is_refused_where_a_rule_would_block_words_and_nowhere_else(path: str, body: dict[str, Any]) -> None:
    refused = judge(guard(rule("secret")), body, path)
    assert code(refused) == ("guard_needs_text", "prompt_embeds" if "prompt_embeds" in body else next(iter(body)))
    assert judge(guard(rule("secret", action="flag")), body, path) == ADMITTED
    assert judge(guard(rule("secret", models=("m2",))), body, path) == ADMITTED
    assert judge(guard(max_output_tokens=5), body, path) == ADMITTED


def test_half_a_surrogate_pair_and_a_number_without_end_hide_nothing() -> None:
    one = guard(rule("secret"), max_messages=2, max_output_tokens=5)
    for odd in (b'"\\ud800"', b"1e999", b"9" * 5000):
        body = b'{"model":"m1","x":' + odd + b',"messages":[{"content":"secret"}]}'
        assert code(judge(one, body)) == (BLOCKED, "messages")
        many = body.replace(b'[{"content":"secret"}]', b"[{},{},{}]")
        assert code(judge(one, many)) == ("too_many_messages", "messages")
        tokens = body.replace(b'"x"', b'"max_tokens":6,"x"')
        assert code(judge(one, tokens)) == ("too_many_output_tokens", "max_tokens")


# --- which rules


def test_the_first_blocking_rule_is_told_and_every_hit_is_counted() -> None:
    rules = (rule("one", name="f", action="flag"), rule("zero", name="a"), rule("one", name="b"), rule("one", name="c"))
    judged = judge(guard(*rules), user("one"))
    assert judged.hits == (("f", "flag"), ("b", "block"), ("c", "block"))
    assert judged.refusal is not None
    assert "'b'" in judged.refusal.message
    assert judged.flags == ("f",)
    flagged = judge(guard(rules[0]), user("one"))
    assert (flagged.refusal, flagged.flags) == (None, ("f",))


NAMES = ("a", "b", "fast", "slow", "a:latest")


@settings(deadline=None)
@given(
    st.dictionaries(st.sampled_from(NAMES), st.sampled_from(("a", "b")), max_size=3),
    st.lists(st.sampled_from(NAMES), max_size=2),
    st.sampled_from(NAMES),
)
def test_a_rule_judges_the_model_it_names_by_every_alias_and_no_other_model(aliases: dict[str, str], models: list[str], asked: str) -> None:
    table = build_table(EndpointList((Endpoint(EndpointId("e"), "http://e", ("a", "b"), aliases=aliases, engine="ollama"),)))
    target = table.find(asked)
    if target is None:
        return
    judged = judge(guard(rule("secret", models=tuple(models))), user("secret"), names=(target.model, target.name))
    if "fast" not in models and "slow" not in models and "a:latest" not in models:  # models only, no alias
        assert (judged.refusal is not None) == (target.model in models)
    else:
        assert (judged.refusal is not None) == (target.model in models or target.name in models)


def test_a_rule_for_some_keys_is_for_no_other_and_for_nobody_without_one() -> None:
    one = guard(rule("secret", keys=("team",)))
    assert code(judge(one, user("secret"), key="team")) == (BLOCKED, "messages")
    assert judge(one, user("secret"), key="other") == ADMITTED
    assert judge(one, user("secret"), key="") == ADMITTED
    assert judge(guard(rule("secret", keys=("",))), user("secret"), key="") == ADMITTED
    assert code(judge(guard(rule("secret")), user("secret"), key="")) == (BLOCKED, "messages")


def test_what_this_build_does_not_enforce_is_named_and_does_nothing() -> None:
    later = (
        rule("x", name="completion", on="completion"),
        rule("x", name="redact", action="redact"),
        rule("x", name="of a later build", action="mask"),
        GuardRule("regex", match="x"),
    )
    assert judge(guard(*later), user("x")) == ADMITTED
    assert guard(*later, max_messages=0).looks_from == float("inf")
    half = GuardRule("half", match="y", words=("x",))
    assert not_in_force(GuardPolicy(rule=(*later, half, rule("x")))) == ["completion", "redact", "of a later build", "regex", "half"]
    assert code(judge(guard(half), user("x"))) == (BLOCKED, "messages")


# --- limits


@settings(deadline=None)
@given(
    st.integers(1, 6),
    st.lists(st.sampled_from(({"role": "user"}, {"content": [{}, {}]}, {"content": ",,,{{{"})), max_size=9),
    st.booleans(),
)
def test_one_message_over_the_limit_is_refused_and_none_below(most: int, messages: list[Any], responses: bool) -> None:
    path, member = ("/v1/responses", "input") if responses else ("/v1/chat/completions", "messages")
    judged = judge(guard(max_messages=most), json.dumps({member: messages}, separators=(",", ":")).encode(), path)
    assert code(judged) == (("too_many_messages", member) if len(messages) > most else None)


def test_a_body_that_cannot_hold_so_many_messages_is_not_looked_at() -> None:
    usual = guard()
    assert usual.policy.max_messages == 2048
    shortest = b'{"messages":[' + b",".join([b"{}"] * 2049) + b"]}"
    assert len(shortest) > usual.looks_from
    assert code(judge(usual, shortest)) == ("too_many_messages", "messages")
    assert judge(usual, b"this is not even JSON" * 10) == ADMITTED
    assert judge(guard(max_messages=0), shortest) == ADMITTED


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict", "max_\\u0074okens"])
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("5", None),
        ("5.0", None),
        ("0", None),
        ("null", None),
        ("6", "too_many_output_tokens"),
        ("5.5", "too_many_output_tokens"),
        ("-1", "too_many_output_tokens"),
        ("1e400", "too_many_output_tokens"),
        ("9" * 400, "too_many_output_tokens"),
        ('"6"', "invalid_type"),
        ("true", "invalid_type"),
        ("[6]", "invalid_type"),
    ],
)
def test_tokens_that_are_asked_for(name: str, value: str, expected: str | None) -> None:
    body = f'{{"model":"m1","messages":[],"n":3,"{name}":{value}}}'.encode()
    plain = name.encode().decode("unicode-escape")
    assert code(judge(guard(max_output_tokens=5), body)) == (None if expected is None else (expected, plain))
    assert judge(guard(), body) == ADMITTED


def test_a_number_of_tokens_that_is_no_wish_of_the_request_is_not_judged() -> None:
    one = guard(max_output_tokens=5)
    tool = {"function": {"parameters": {"properties": {"max_tokens": {"type": "integer"}}}}}
    for more in ({"tools": [tool]}, {"metadata": {"max_tokens": 6}}, {"x": {"max_tokens": 6}, "max_tokens": 5}):
        assert judge(one, {**user('"max_tokens": 6'), **more}) == ADMITTED
    assert code(judge(one, {"x": {"max_tokens": 5}, "max_tokens": 6})) == ("too_many_output_tokens", "max_tokens")


def test_a_limit_that_is_named_twice_is_refused_because_engines_take_either() -> None:
    body = b'{"model":"m1","max_tokens":900,"messages":[],"max_\\u0074okens":1}'
    assert code(judge(guard(max_output_tokens=5), body)) == ("duplicate_key", "max_tokens")
    assert judge(guard(), body) == ADMITTED


URL = {"url": "http://i/1.png"}
PICTURE = {"type": "image_url", "image_url": URL}
CLAUDE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}
INPUTS = [{"type": "input_image", "image_url": "http://i"}, {"type": "input_image", "file_id": "x"}]
SCREEN = {"type": "computer_call_output", "output": {"type": "computer_screenshot", "image_url": "x"}}
TOOL = {"parameters": {"properties": {"image_url": {"type": "image"}}}}
IMAGES: dict[str, tuple[str, dict[str, Any], int]] = {
    "none": ("/v1/chat/completions", user("an image, image_url, an image"), 0),
    "chat": ("/v1/chat/completions", user([text("a"), PICTURE, PICTURE]), 2),
    "without a type": ("/v1/chat/completions", user([{"image_url": URL}, {"image_url": "http://i/2"}]), 2),
    "over messages": ("/v1/chat/completions", {"messages": user([PICTURE])["messages"] * 3}, 3),
    "responses": ("/v1/responses", {"input": [{"content": INPUTS}]}, 2),
    "a result": ("/v1/responses", {"input": [SCREEN]}, 1),
    "messages": ("/v1/messages", user([CLAUDE]), 1),
    "in a tool's result": ("/v1/messages", user([{"type": "tool_result", "content": [CLAUDE, CLAUDE]}]), 2),
    "a tool that makes images": ("/v1/chat/completions", {**user("a"), "tools": [TOOL]}, 0),
}


@pytest.mark.parametrize("name", IMAGES)
def test_images_are_counted_in_every_family(name: str) -> None:
    path, body, count = IMAGES[name]
    raw = json.dumps({"model": "m1", **body}).encode()
    assert sum(read_prompt(raw).images.values()) == count
    escaped = raw.replace(b"image", b"\\u0069mage")
    for most in (1, 2, 3):
        expected = ("too_many_images", "input" if path == "/v1/responses" else "messages") if count > most else None
        assert code(judge(guard(max_images=most), raw, path)) == expected
        assert code(judge(guard(max_images=most), escaped, path)) == expected


# --- cost


def steps(work: Callable[[], object]) -> int:
    """Lines of our own code that `work` runs through."""
    count = 0

    def trace(frame: types.FrameType, event: str, _: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace if "llmgw" in frame.f_code.co_filename else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


HOSTILE: dict[str, Callable[[int], dict[str, Any]]] = {
    "a long text": lambda n: user("a b " * n),
    "blanks": lambda n: user(" " * n),
    "blanks of every kind": lambda n: user(" \u3000\n" * n),
    "a phrase that never stands alone": lambda n: user("xtop secret" * n),
    "marks over marks": lambda n: user("a" + "\u0301\u0327" * n),
    "what nobody sees": lambda n: user("\u200b" * n),
    "characters that grow": lambda n: user("\ufdfaﬃ" * n),
    "many parts": lambda n: user([text("sec")] * n),
    "many messages": lambda n: {"messages": user("secre")["messages"] * n},
    "many members": lambda n: {**user("x"), **{f"m{number}": "x" for number in range(n)}},
    "many tools": lambda n: {**user("x"), "tools": [{"function": {"parameters": {"q": "x"}}}] * n},
    "many calls": lambda n: {"messages": [{"tool_calls": [{"function": {"arguments": '{"a": "\\u0073"}'}}]}] * n},
    "other scripts": lambda n: user("填机" * n),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("more", [(), MANY])
def test_no_body_costs_more_than_in_proportion_to_its_size(name: str, more: tuple[str, ...]) -> None:
    one = guard(rule("secret", "top secret", "机密", *more), max_images=1, max_output_tokens=1)
    judge(one, json.dumps({"model": "m1", **HOSTILE[name](1)}).encode())  # what a process builds once is no cost of a body
    taken, sizes = [], []
    for size in (200, 400, 800):
        body = json.dumps({"model": "m1", **HOSTILE[name](size)}).encode()
        taken.append(steps(lambda body=body: judge(one, body)))
        sizes.append(sum(len(said) for texts in read_prompt(body).texts.values() for said in texts))  # what words are looked for in
        assert sizes[-1] <= 4 * len(body)
    assert taken[2] - taken[1] <= 2.2 * (taken[1] - taken[0]) + 100  # twice the growth, twice the steps
    assert sizes[2] - sizes[1] <= 2.2 * (sizes[1] - sizes[0]) + 100


def test_a_folded_text_is_at_most_three_times_as_long() -> None:
    assert max(len(fold(chr(code))) for code in range(sys.maxunicode + 1)) == 3


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_folding_twice_changes_nothing_more_and_leaves_no_white_space_but_single_blanks(said: str) -> None:
    once = fold(said)
    assert once == " ".join(once.split())
    assert fold(once) == once


# --- the gate


def test_the_gate_swaps_one_reference_and_keeps_a_guard_that_did_not_change() -> None:
    gate = Gate(Policy())
    before = gate.guard
    gate.replace(Policy(auth_required=False))
    assert gate.guard is before
    gate.replace(Policy(guard=GuardPolicy(rule=(rule("secret"),))))
    assert code(judge(gate.guard, user("secret"))) == (BLOCKED, "messages")
    assert judge(before, user("secret")) == ADMITTED  # whoever took the one before is judged by it


def test_every_route_that_is_relayed_is_guarded() -> None:
    one = guard(rule("secret"))
    for route in ROUTES.values():
        assert isinstance(route, Route)
        assert judge(one, {"input": "secret"}, route.path).refusal is not None


@pytest.mark.parametrize("filler", ["", "w " * 4000, "{,}" * 4000], ids=["dense", "text", "braces in a text"])
@pytest.mark.parametrize("most", [1, 3, 40])
@pytest.mark.parametrize("over", [-1, 0, 1])
def test_the_count_of_messages_is_exact_whatever_stands_between_them(filler: str, most: int, over: int) -> None:
    messages = [{"role": "user", "content": filler} for _ in range(most + over)]
    judged = judge(guard(max_messages=most), json.dumps({"model": "m", "messages": messages}).encode())
    assert code(judged) == (("too_many_messages", "messages") if over > 0 else None)
