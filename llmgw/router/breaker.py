"""Takes an endpoint out when it fails, and lets one trial in after a while. Times are passed in; nothing here waits.

A refused connect opens at once: nothing listens there. Broken connections and 5xx answers open after so many in a row. A
first-byte time-out after so many makes the endpoint *slow*: others are preferred, but a model's only endpoint stays in use,
because a long prompt is no crash. A client's own fault (4xx) counts as an answer.
"""

from __future__ import annotations

import enum

import attrs

from llmgw.domain.words import counted


class Health(enum.Enum):
    """How an endpoint stands."""

    CLOSED = 0  # in use
    TRIAL = 1  # out, and its one trial is due or running
    OPEN = 2  # out


class Outcome(enum.Enum):
    """How an attempt at an endpoint ended."""

    ANSWERED = "answered"  # any answer that is not the engine's failure
    FAILED = "failed"  # 5xx, or the connection broke
    REFUSED = "refused"  # nothing listens
    SILENT = "silent"  # no first byte in time
    LEFT = "left"  # given up for a reason that says nothing about the endpoint


@attrs.frozen
class Breaker:
    """`open_until_s` None: closed. `trial`: one request is trying now. `slow`: only time-outs opened it. `refused`: nothing listened."""

    failures: int = 0
    open_until_s: float | None = None
    trial: bool = False
    slow: bool = False
    refused: bool = False

    def why_out(self) -> str:
        """For whoever reads the log, of one that is open."""
        if self.refused:
            return "it refuses connections"
        if self.slow:
            return f"no first byte in time, {counted(self.failures, 'request')} in a row; a model's only endpoint stays in use"
        return f"{counted(self.failures, 'request')} in a row failed: its connections break, or it answers with 5xx"

    def health(self, now_s: float) -> Health:
        if self.open_until_s is None:
            return Health.CLOSED
        return Health.OPEN if now_s < self.open_until_s else Health.TRIAL

    def admits(self, now_s: float) -> bool:
        """May a request be sent there now? After the cool-down one may, until its outcome is known."""
        return self.open_until_s is None or (now_s >= self.open_until_s and not self.trial)

    def began(self, now_s: float) -> Breaker:
        """A request is being sent there."""
        if self.open_until_s is None or now_s < self.open_until_s:
            return self
        return attrs.evolve(self, trial=True)

    def ended(self, outcome: Outcome, now_s: float, *, failures_max: int, cooldown_s: float) -> Breaker:
        """What is known after an attempt ended."""
        if outcome is Outcome.ANSWERED:
            return CLOSED
        if outcome is Outcome.LEFT:
            return attrs.evolve(self, trial=False) if self.trial else self
        failures = self.failures + 1
        if outcome is Outcome.REFUSED:
            return Breaker(failures, now_s + cooldown_s, refused=True)
        if failures >= failures_max or self.open_until_s is not None:
            slow = outcome is Outcome.SILENT and (self.open_until_s is None or self.slow)
            return Breaker(failures, now_s + cooldown_s, slow=slow)
        return Breaker(failures)


CLOSED = Breaker()
