"""What the guard adds to a request: a router's own CPU time, by what the policy asks for and how large the body is."""

from __future__ import annotations

import json
import random

from benchmarks.measure import Row, cpu_ms
from llmgw.domain.policy import GuardPolicy, GuardRule
from llmgw.router.families import ROUTES
from llmgw.router.gate import Guard

ROUNDS = 7
SMALL_TIMES = 2000  # a small body is judged so often in one round: the clock of CPU time is no finer
WORDS = 20_000
SENTENCE = "The quick brown fox, who is no heron, jumps over the lazy dog. "


def _body(size: int, messages: int) -> bytes:
    content = (SENTENCE * (size // len(SENTENCE) + 1))[: size // messages]
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": content}] * messages, "max_tokens": 16}).encode()


def _words() -> tuple[str, ...]:
    rng = random.Random(1)
    latin = ("".join(rng.choices("abcdefghij", k=7)) for _ in range(WORDS // 2))
    han = ("".join(chr(rng.randrange(0x4E00, 0x9FFF)) for _ in range(3)) for _ in range(WORDS // 2))
    return (*latin, *han)


def rows() -> list[Row]:
    policies = (
        ("the defaults", GuardPolicy()),
        ("limits on tokens and images", GuardPolicy(max_output_tokens=4096, max_images=8)),
        ("a rule of 4 words", GuardPolicy(rule=(GuardRule("r", words=("secret", "top secret", "c++", "blue heron")),))),
        (f"a rule of {WORDS:,} words", GuardPolicy(rule=(GuardRule("r", words=_words()),))),
    )
    route, small, large = ROUTES["/v1/chat/completions"], _body(500, 1), _body(1_000_000, 100)
    found = []
    for name, policy in policies:
        guard = Guard.of(policy)

        def judge(body: bytes, times: int, guard: Guard = guard) -> None:
            for _ in range(times):
                assert guard.admit(route, body, ("m",), "k").refusal is None

        few_us = cpu_ms(lambda judge=judge: judge(small, SMALL_TIMES), ROUNDS) * 1000 / SMALL_TIMES
        large_ms = cpu_ms(lambda judge=judge: judge(large, 1), ROUNDS)
        found.append(Row(f"{name}: a body of 0.5 KB / of 1 MB", f"{few_us:.1f} µs / {large_ms:.1f} ms CPU"))
    return found
