"""What an engine says of its own load: read out of its Prometheus text, set beside our count, and when to ask again. Pure.

Owns: engine load, others (requests at an engine that are not this router's). It knows the metric names of vLLM, SGLang and
llama.cpp; a text without any of them says nothing about the load, and that is no fault.
"""

from __future__ import annotations

import math
import re
from typing import Final

import attrs

POLL_S: Final = 1.0  # router.md 4: an engine's figure is about a second old at most
POLLS_PER_S_MAX: Final = 500  # measured: a poll of 60 KB costs 0.1 ms, so that this is a twentieth of a core; more endpoints wait longer
# A figure counts until the next one but one should have been there: a poll may be late by its whole period (many endpoints, a
# busy engine) without the choice flipping between two views, and older ones are forgotten rather than believed.
FRESH_PERIODS: Final = 2
AGAIN_MAX_S: Final = 10.0  # chosen: an engine that could not be asked is seen again within that
NONE_AGAIN_MAX_S: Final = 300.0  # chosen: an engine without these metrics gets them with a restart at the earliest
LINE_MAX: Final = 65_536  # bytes; longer lines are passed over (a line of interest has a few hundred)
COUNT_MAX: Final = 1_000_000  # above any engine's queue; more is no count of requests

# For each kind of engine: how its names begin, then those of requests it works on and of requests that wait inside it.
# vLLM: docs.vllm.ai, usage/metrics. SGLang: docs.sglang.io, references/production_metrics. llama.cpp: tools/server/README.md.
FAMILIES: Final = (
    (b"vllm:num_requests_", b"running", b"waiting"),
    (b"sglang:num_", b"running_reqs", b"queue_reqs"),
    (b"llamacpp:requests_", b"processing", b"deferred"),
)
# SGLang with priority scheduling gives the total under an empty priority, and beside it each priority's part of it.
_PART: Final = re.compile(rb'[{,]\s*priority="[^"]')


@attrs.frozen
class EngineLoad:
    """What an engine told: `running` and `waiting` inside it, all told. `others`: how many of them are not ours.

    It counts until `until_s`, on the machine's clock.
    """

    running: int
    waiting: int
    others: int
    until_s: float


def period_s(endpoints: int) -> float:
    """Seconds from one poll of an endpoint to the next, with so many to ask."""
    return max(POLL_S, endpoints / POLLS_PER_S_MAX)


def engine_load(running: int, waiting: int, own: int, sent_s: float, period_s: float) -> EngineLoad:
    """`own`: our requests at the engine while it was asked, the highest there were; `sent_s`: when it was asked.

    What the engine says holds our requests too, and is old when it comes; our own count is never old. So others' requests are
    what is left without ours, and load is that plus our count of now. The larger of the two would hold on to our own burst for
    a second after its end, and the sum would count us twice. Ours are taken at their highest, so that none of them, sent or
    ended while the engine was asked, passes for somebody else's.
    """
    return EngineLoad(running, waiting, max(running + waiting - own, 0), sent_s + FRESH_PERIODS * period_s)


def again_s(failures: int, period_s: float, *, lasting: bool) -> float:
    """Seconds from one poll to the next after so many that gave nothing, in a row. `lasting`: it has no such figures at all."""
    return min(period_s * 2.0 ** min(failures, 30), max(NONE_AGAIN_MAX_S if lasting else AGAIN_MAX_S, period_s))


class LoadText:
    """Reads a Prometheus text piece by piece for the few names of interest, summed over label sets; keeps no more than a line.

    Searched for as bytes, not line by line: a text has a thousand lines, and two of them matter.
    """

    def __init__(self) -> None:
        self._rest = b"\n"  # begins with the line feed before it, so that a name is found where a line begins
        self._families: tuple[tuple[bytes, bytes, bytes], ...] = FAMILIES  # once one has been found, the others are not looked for
        self._sums: dict[bytes, float] = {}
        self._broken = False

    def feed(self, data: bytes) -> None:
        block = self._rest + data
        end = block.rfind(b"\n")
        if end >= 0:
            self._read(block[:end])
            block = block[end:]
        self._rest = block if len(block) <= LINE_MAX else b""

    def load(self) -> tuple[int, int] | None:
        """Running and waiting, once the text has come to its end. None where it does not tell, or tells nonsense."""
        self._read(self._rest)
        self._rest = b""
        _, running, waiting = self._families[0]
        if self._broken or running not in self._sums:
            return None
        return int(self._sums[running]), int(self._sums.get(waiting, 0.0))

    def _read(self, lines: bytes) -> None:
        for family in self._families:
            begin, *names = family
            mark = b"\n" + begin
            at = lines.find(mark)
            while at >= 0:
                end = lines.find(b"\n", at + 1)
                line = lines[at + len(mark) : end if end >= 0 else len(lines)]
                for name in names:
                    if line.startswith(name) and line[len(name) : len(name) + 1] in (b"{", b" ", b"\t"):
                        self._families = (family,)
                        self._sample(name, line[len(name) :])
                at = lines.find(mark, at + 1)
            if len(self._families) == 1:
                return

    def _sample(self, name: bytes, rest: bytes) -> None:
        """What stands behind a name: labels, the value, perhaps a time."""
        if rest[:1] == b"{":
            labels, _, rest = rest.rpartition(b"}")  # a label's text may hold a brace, a value holds none
            if _PART.search(labels) is not None:
                return
        fields = rest.split()
        try:
            value = float(fields[0]) if fields else math.nan
        except ValueError:
            value = math.nan
        total = self._sums.get(name, 0.0) + value
        if not 0 <= value <= COUNT_MAX or total > COUNT_MAX:
            self._broken = True
            return
        self._sums[name] = total
