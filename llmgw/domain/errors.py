"""The kinds of failure, and the one table that says what each means on HTTP and on the command line.

Each error carries a stable `code`, its fields as attributes, and a sentence that tells only its own layer's story;
the cause rides on `raise ... from err`.
"""

from __future__ import annotations

from typing import ClassVar, Final

import attrs

EXIT_OK: Final = 0
EXIT_BROKEN: Final = 1
EXIT_USAGE: Final = 2
EXIT_INVALID: Final = 3
EXIT_CONFLICT: Final = 4
EXIT_DENIED: Final = 5
EXIT_UNAVAILABLE: Final = 6
EXIT_UNWELL: Final = 7  # `ctl status --check` when something needs a person


@attrs.frozen
class Fault:
    """One thing that is wrong with an input: where (a dotted path, "" for the whole) and why.

    `looked_at` are the paths of the keys that it compares, where that is not `path` alone: it says nothing where one of them
    is at fault by itself.
    """

    path: str
    reason: str
    looked_at: tuple[str, ...] = attrs.field(default=(), eq=False, repr=False)

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}" if self.path else self.reason


class LlmgwError(Exception):
    """Root of every error that llmgw raises on purpose. `status` is HTTP's, `exit_code` the command line's."""

    status: ClassVar[int] = 500
    exit_code: ClassVar[int] = EXIT_BROKEN
    default_code: ClassVar[str] = "broken"

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code


class Invalid(LlmgwError):
    """The caller can fix it. `faults` lists everything that is wrong, each with its path; `param` names one field."""

    status = 400
    exit_code = EXIT_INVALID
    default_code = "invalid"

    def __init__(self, message: str, *, faults: tuple[Fault, ...] = (), param: str | None = None, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.faults = faults
        self.param = param

    @classmethod
    def of(cls, what: str, faults: tuple[Fault, ...]) -> Invalid:
        """One error for many faults; the message holds them all, a line each."""
        lines = "\n".join(f"  {fault}" for fault in faults)
        return cls(f"{what}:\n{lines}", faults=faults)


class TooLarge(Invalid):
    """A body or a header beyond its limit."""

    status = 413
    default_code = "too_large"


class Denied(LlmgwError):
    """Who the caller is (`status` 401), or what it may do (403)."""

    status = 403
    exit_code = EXIT_DENIED
    default_code = "denied"


class Unauthenticated(Denied):
    """No credentials, or wrong ones."""

    status = 401
    default_code = "unauthenticated"


class NotFound(LlmgwError):
    """No such thing."""

    status = 404
    exit_code = EXIT_CONFLICT
    default_code = "not_found"


class Conflict(LlmgwError):
    """The revision moved, or the state forbids it."""

    status = 409
    exit_code = EXIT_CONFLICT
    default_code = "conflict"


class PreconditionFailed(Conflict):
    """The revision moved and the caller had named the one it edits (`If-Match`)."""

    status = 412
    default_code = "revision_moved"


class PreconditionRequired(Invalid):
    """An edit that must name the revision it edits did not."""

    status = 428
    default_code = "if_match_required"


class Overloaded(LlmgwError):
    """A queue is full or a quota reached; try again after `retry_after_s`."""

    status = 429
    exit_code = EXIT_UNAVAILABLE
    default_code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.retry_after_s = retry_after_s


class Unavailable(LlmgwError):
    """Nothing ready, peer unreachable, a write not known to be durable, a deadline passed before any answer."""

    status = 503
    exit_code = EXIT_UNAVAILABLE
    default_code = "unavailable"

    def __init__(self, message: str, *, retry_after_s: float | None = None, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.retry_after_s = retry_after_s


class OutcomeUnknown(Unavailable):
    """A write that is stored here and not known to be durable: it may come to be, or die with its epoch. Safe to send again."""

    default_code = "outcome_unknown"

    def __init__(self) -> None:
        super().__init__("stored, outcome unknown, retry with the same key")


class TimedOut(Unavailable):
    """The peer was there and said nothing in time."""

    status = 504
    default_code = "timeout"


class UpstreamFailed(LlmgwError):
    """The engine answered and failed; its status and body are kept for the client."""

    status = 502
    exit_code = EXIT_UNAVAILABLE
    default_code = "upstream_failed"

    def __init__(self, message: str, *, upstream_status: int | None = None, body: bytes = b"", code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.upstream_status = upstream_status
        self.body = body


class StaleEpoch(LlmgwError):
    """Fenced off: a higher epoch, or an equal one of another owner, was met. `epoch` and `owner` are the highest met."""

    status = 409
    exit_code = EXIT_CONFLICT
    default_code = "stale_epoch"

    def __init__(self, message: str, *, epoch: int, owner: str) -> None:
        super().__init__(message)
        self.epoch = epoch
        self.owner = owner


class Broken(LlmgwError):
    """One of our own invariants is false: let the task die and be seen."""
