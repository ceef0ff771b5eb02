"""What a request may hold: the policy's limits and its rules on prompts, judged before an endpoint is chosen. Pure.

A request is judged by the guard that was in force when its body was whole; a later one is swapped in by one reference and is the
next request's. What is not asked for costs nothing: a body is not looked at where it cannot be over any limit. Owns `Gate`,
`Guard` and `Judgement`. Never keeps, tells or logs what a prompt holds.
"""

from __future__ import annotations

import math
import re
from typing import Any, Final

import attrs
import msgspec

from llmgw.domain.errors import Invalid
from llmgw.domain.fold import fold
from llmgw.domain.policy import GuardPolicy, GuardRule, Policy
from llmgw.router.body import duplicate, may_escape_names, named_twice
from llmgw.router.families import Family, Route
from llmgw.router.guard_rules import WordFinder
from llmgw.router.members import LIMITED, OUTPUT_TOKENS, LimitedMembers
from llmgw.router.prompt import Prompt, plain_members, read_prompt

EVERY: Final = "*"
BLOCK: Final = "block"
FLAG: Final = "flag"
_LIMITED: Final = tuple(name.encode() for name in (*OUTPUT_TOKENS, "input"))  # `messages` was looked at by read_body
_QUOTED: Final = tuple(b'"%b"' % name.encode() for name in OUTPUT_TOKENS)
_NUMBER: Final = re.compile(rb"[ \t\r\n]*:[ \t\r\n]*([0-9]{1,10})[ \t\r\n]*[,}]")
_ELEMENT_BYTES: Final = 2  # the least that one more message takes in a list: a digit and a comma


_LIST: Final = msgspec.json.Decoder(list[msgspec.Raw])


@attrs.frozen
class Judgement:
    """What became of one request: the rules that hit, as (name, action), and the refusal, None where it may go on."""

    hits: tuple[tuple[str, str], ...] = ()
    refusal: Invalid | None = None

    @property
    def flags(self) -> tuple[str, ...]:
        return tuple(name for name, action in self.hits if action == FLAG)


ADMITTED: Final = Judgement()


def in_force(rule: GuardRule) -> bool:
    """Does this build do anything for the rule? A rule on words and a regular expression is in force for its words."""
    return rule.on == "prompt" and rule.action in (BLOCK, FLAG) and any(map(fold, rule.words))


def not_in_force(policy: GuardPolicy) -> list[str]:
    """Names of rules that this build does nothing for, or not all that they say."""
    return [rule.name for rule in policy.rule if rule.match or not in_force(rule)]


@attrs.frozen(eq=False)
class Guard:
    """A guard policy made ready. Bodies of fewer than `looks_from` bytes can be against nothing in it."""

    policy: GuardPolicy
    rules: tuple[GuardRule, ...]
    looks_from: float
    _finder: WordFinder

    @classmethod
    def of(cls, policy: GuardPolicy) -> Guard:
        """Takes about 10 us a word."""
        rules = tuple(rule for rule in policy.rule if in_force(rule))
        if rules or policy.max_output_tokens > 0 or policy.max_images > 0:
            looks_from = 0.0
        elif policy.max_messages > 0:
            looks_from = float(_ELEMENT_BYTES * (policy.max_messages + 1))
        else:
            looks_from = math.inf
        return cls(policy, rules, looks_from, WordFinder.of([rule.words for rule in rules]))

    def admit(self, route: Route, body: bytes, names: tuple[str, ...], key: str) -> Judgement:
        """`body` as `read_body` took it; `names` of the model: its own and the one it was asked by; `key`: the caller's, by name."""
        if len(body) < self.looks_from:
            return ADMITTED
        try:
            self._check_counts(route, body)
            return self._read(body, names, key)
        except Invalid as refusal:
            return Judgement(refusal=refusal)

    # --- limits that a look at the top level settles

    def _check_counts(self, route: Route, body: bytes) -> None:
        policy = self.policy
        # Each message is an object, and all but the first follow a comma: where those do not suffice, nobody looks where they stand.
        most = policy.max_messages
        many = most > 0 and _has_more(body, b"{", most) and _has_more(body, b",", most - 1)
        asks = policy.max_output_tokens > 0 and (may_escape_names(body) or not _plainly_within(body, policy.max_output_tokens))
        if not many and not asks:
            return
        twice = named_twice(body, _LIMITED)
        if twice is not None:
            raise duplicate(twice)
        try:
            members = LIMITED.decode(body)
        except (msgspec.DecodeError, RecursionError):  # half a surrogate pair, or a number beyond what a float holds
            members = _members_plainly(body)
        if many:
            listed = "input" if route.family is Family.RESPONSES else "messages"
            count = _length(getattr(members, listed))
            if count > policy.max_messages:
                text = f"the request has {count} messages, and the limit here is {policy.max_messages}"
                raise Invalid(text, param=listed, code="too_many_messages")
        if asks:
            for name in OUTPUT_TOKENS:
                _check_tokens(name, getattr(members, name), policy.max_output_tokens)

    # --- what must be read for

    def _read(self, body: bytes, names: tuple[str, ...], key: str) -> Judgement:
        images_max = self.policy.max_images
        many_images = images_max > 0 and (may_escape_names(body) or body.count(b"image") > images_max)  # every image is called one
        concerned = [place for place, rule in enumerate(self.rules) if _is_for(rule, names, key)]
        if not many_images and not concerned:
            return ADMITTED
        prompt = read_prompt(body)
        images = sum(prompt.images.values())
        if 0 < images_max < images:
            text = f"the request has {images} images, and the limit here is {images_max}"
            raise Invalid(text, param=next(iter(prompt.images)), code="too_many_images")
        return self._judge(prompt, concerned) if concerned else ADMITTED

    def _judge(self, prompt: Prompt, concerned: list[int]) -> Judgement:
        where: dict[int, str] = {}
        for member, texts in prompt.texts.items():
            for place in self._finder.find(texts):
                where.setdefault(place, member)
        hits = tuple((rule.name, rule.action) for place in concerned if place in where for rule in (self.rules[place],))
        for place in concerned:
            rule = self.rules[place]
            if rule.action != BLOCK:
                continue
            if place in where:
                text = f"the rule {rule.name!r} of this gateway does not let the request pass"
                return Judgement(hits, Invalid(text, param=where[place], code="guard_blocked"))
            if prompt.numbered:
                text = f"a prompt in numbers cannot be judged by the rule {rule.name!r} of this gateway: send it as text"
                return Judgement(hits, Invalid(text, param=prompt.numbered, code="guard_needs_text"))
        return Judgement(hits)


class Gate:
    """Holds the guard that is in force now."""

    def __init__(self, policy: Policy) -> None:
        self.guard = Guard.of(policy.guard)

    def replace(self, policy: Policy) -> None:
        """In force for the next request. A policy with the same guard as before costs nothing."""
        if policy.guard != self.guard.policy:
            self.guard = Guard.of(policy.guard)


def _is_for(rule: GuardRule, names: tuple[str, ...], key: str) -> bool:
    if EVERY not in rule.models and not any(name in rule.models for name in names):
        return False
    return EVERY in rule.keys or (key != "" and key in rule.keys)


_LOOK_BYTES: Final = 256  # between two hits, where a look for the next costs as much as counting what is between


def _has_more(body: bytes, mark: bytes, most: int) -> bool:
    """Does the byte `mark` stand in `body` more than `most` times? In a text where it is rare, looks cost a third of a count."""
    at, found = -1, 0
    while found <= most:
        if found * _LOOK_BYTES > len(body):
            return found + body.count(mark, at + 1) > most
        at = body.find(mark, at + 1)
        if at < 0:
            return False
        found += 1
    return True


def _members_plainly(body: bytes) -> LimitedMembers:
    known = set(LimitedMembers.__struct_fields__)
    return LimitedMembers(**{name: value for name, value in plain_members(body) if name in known})


def _length(value: Any) -> int:
    """Elements of a list, 0 for what is none."""
    if isinstance(value, list):
        return len(value)
    if not isinstance(value, msgspec.Raw) or bytes(value).lstrip()[:1] != b"[":
        return 0
    return len(_LIST.decode(value))


def _plainly_within(body: bytes, limit: int) -> bool:
    """Is each number of tokens that is named anywhere in the body named once, and one that the limit allows? Decodes nothing."""
    for name in _QUOTED:
        at = body.find(name)
        if at < 0:
            continue
        number = _NUMBER.match(body, at + len(name))
        if number is None or int(number[1]) > limit or body.find(name, at + 1) >= 0:
            return False
    return True


def _check_tokens(name: str, value: Any, limit: int) -> None:
    """Raises Invalid. Below 0 is llama.cpp's word for no end; a number in quotes is one for some engines."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Invalid(f"{name} must be a number", param=name, code="invalid_type")
    if value < 0 or value > limit:
        raise Invalid(f"{name} must be between 0 and {limit} here", param=name, code="too_many_output_tokens")
