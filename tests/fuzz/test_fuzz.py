"""The short form of `make fuzz`: every seed, every input that once failed, and some thousands of mutations that are the same each time."""

from __future__ import annotations

import random
import re

import pytest

from llmgw.router import body, http1, sse
from tests.fuzz.inputs import SEEDS, kept, mutated
from tests.fuzz.targets import TARGETS

MUTATIONS = 10_000  # each takes 20 to 200 us


@pytest.mark.parametrize("target", TARGETS)
def test_seeds_and_what_once_failed_keep_every_promise(target: str) -> None:
    for data in SEEDS[target] + kept(target):
        TARGETS[target](data)


@pytest.mark.parametrize("target", TARGETS)
def test_thousands_of_mutations_keep_every_promise(target: str) -> None:
    rng = random.Random(f"seed of {target}")
    for _ in range(MUTATIONS):
        data = mutated(target, rng)
        try:
            TARGETS[target](data)
        except Exception as err:
            raise AssertionError(f"{target} broke a promise: {err!r}\n{data!r}") from err


def _as_if_nothing_were_twice(patch: pytest.MonkeyPatch) -> None:
    def first(data: bytes, long: tuple[int, int]) -> dict[bytes, tuple[int, int]]:
        pair = body._MODEL_PAIR.search(data)
        return {} if pair is None else {b"model": pair.span(1)}

    patch.setattr(body, "_where", first)


def _as_if_any_chunk_size_were_one(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(http1, "_CHUNK_SIZE", re.compile(rb"(?:0x)?([0-9A-Fa-f]{1,15})"))


def _as_if_no_length_counted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(http1, "_DIGITS", re.compile(rb"(?!)"))


def _as_if_lines_ended_in_line_feeds_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sse, "_EVENT_END", re.compile(rb"\n\n"))


BITES = {
    "bodies": _as_if_nothing_were_twice,
    "requests": _as_if_any_chunk_size_were_one,
    "answers": _as_if_no_length_counted,
    "events": _as_if_lines_ended_in_line_feeds_alone,
}


@pytest.mark.parametrize("target", BITES)
def test_a_reader_without_one_of_its_rules_is_found_out(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BITES[target](monkeypatch)
    rng = random.Random(f"bites {target}")
    with pytest.raises(AssertionError):
        for _ in range(MUTATIONS):
            TARGETS[target](mutated(target, rng))
