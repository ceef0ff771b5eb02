"""The routes of /v1 and the error shapes of their API families. Values in, bytes out."""

from __future__ import annotations

import enum
import json
import re
from typing import Any, Final

import attrs

from llmgw.domain.errors import LlmgwError, Overloaded, Unavailable, UpstreamFailed

# Control characters and halves of surrogate pairs. Escapes for `re`, because half a pair in a literal is none that C can hold.
_UNSHOWN: Final = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
TEXT_MAX: Final = 1024  # characters of an engine's text in an error of ours (router.md 3)


class Family(enum.Enum):
    """Whose error shape a route speaks, and how its streams end."""

    OPENAI = "openai"
    RESPONSES = "responses"
    ANTHROPIC = "anthropic"


@attrs.frozen
class Route:
    """A JSON route that is relayed. `done`: its streams end with `[DONE]`. `needs_messages`: a body without a list is refused."""

    path: str
    family: Family = Family.OPENAI
    done: bool = False
    needs_messages: bool = False


_ROUTES: Final = (
    Route("/v1/chat/completions", done=True, needs_messages=True),
    Route("/v1/completions", done=True),
    Route("/v1/responses", Family.RESPONSES),
    Route("/v1/embeddings"),
    Route("/v1/messages", Family.ANTHROPIC, needs_messages=True),
    Route("/v1/messages/count_tokens", Family.ANTHROPIC, needs_messages=True),
    Route("/v1/rerank"),
    Route("/v1/score"),
    Route("/v1/classify"),
    Route("/v1/tokenize"),
    Route("/v1/detokenize"),
    Route("/v1/images/generations"),
    Route("/v1/audio/speech"),
    Route("/v1/audio/transcriptions"),
    Route("/v1/audio/translations"),
    Route("/v1/images/edits"),
)
ROUTES: Final = {route.path: route for route in _ROUTES}
NOT_OFFERED: Final = (
    "batches", "files", "uploads", "realtime", "fine_tuning", "fine-tunes", "assistants", "threads", "vector_stores",
)  # fmt: skip

# What ends a stream of a family that knows no `[DONE]`: the name of its last event.
LAST_EVENTS: Final = {
    Family.RESPONSES: frozenset({b"response.completed", b"response.incomplete", b"response.failed", b"error"}),
    Family.ANTHROPIC: frozenset({b"message_stop", b"error"}),
}

_OPENAI_TYPES: Final = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "invalid_request_error",
    405: "invalid_request_error", 408: "timeout_error", 413: "invalid_request_error", 415: "invalid_request_error",
    429: "rate_limit_error", 431: "invalid_request_error", 500: "server_error", 501: "server_error", 502: "upstream_error",
    503: "unavailable_error", 504: "timeout_error",
}  # fmt: skip
_ANTHROPIC_TYPES: Final = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


def family_of(path: str) -> Family:
    """The family whose shape an error on that path has, also where no such route exists."""
    route = ROUTES.get(path)
    if route is not None:
        return route.family
    return Family.ANTHROPIC if path.startswith("/v1/messages") else Family.OPENAI


def not_offered(path: str) -> str | None:
    """The name of an API that llmgw leaves out on purpose, when `path` belongs to it."""
    first = path.removeprefix("/v1/").split("/", 1)[0] if path.startswith("/v1/") else ""
    return first if first in NOT_OFFERED else None


@attrs.frozen
class Problem:
    """An error as a client is told it. `upstream`: the engine failed, not we. `retry_after_s` None: no hint is given."""

    status: int
    code: str
    message: str
    param: str | None = None
    upstream: bool = False
    retry_after_s: float | None = None
    headers: tuple[tuple[bytes, bytes], ...] = ()


def problem_of(error: LlmgwError) -> Problem:
    """The error table's entry, as a client is told it."""
    retry = error.retry_after_s if isinstance(error, Overloaded | Unavailable) else None
    headers: tuple[tuple[bytes, bytes], ...] = ((b"accept-encoding", b"gzip"),) if error.status == 415 else ()
    return Problem(
        error.status,
        error.code,
        error.message,
        getattr(error, "param", None),
        isinstance(error, UpstreamFailed),
        retry,
        headers,
    )


def _openai_type(problem: Problem) -> str:
    if problem.upstream:
        return "upstream_error"
    return _OPENAI_TYPES.get(problem.status, "server_error" if problem.status >= 500 else "invalid_request_error")


def _anthropic_type(problem: Problem) -> str:
    return _ANTHROPIC_TYPES.get(problem.status, "api_error" if problem.status >= 500 else "invalid_request_error")


def _value(problem: Problem, family: Family) -> dict[str, Any]:
    if family is Family.ANTHROPIC:
        return {"type": "error", "error": {"type": _anthropic_type(problem), "message": problem.message, "code": problem.code}}
    inner = {"message": problem.message, "type": _openai_type(problem), "param": problem.param, "code": problem.code}
    return {"error": inner}


def error_body(problem: Problem, family: Family) -> bytes:
    """The JSON body of an error answer in the family's shape."""
    return json.dumps(_value(problem, family), ensure_ascii=True).encode()


def error_event(problem: Problem, family: Family) -> bytes:
    """The one event that tells a client of a started stream that it broke."""
    value = _value(problem, family)
    if family is Family.ANTHROPIC:
        return b"event: error\ndata: " + json.dumps(value).encode() + b"\n\n"
    if family is Family.RESPONSES:  # its own event tells the fields at the top; the object is there for readers of the other shape
        value = {"type": "error", "code": problem.code, "message": problem.message, "param": problem.param, **value}
        return b"event: error\ndata: " + json.dumps(value).encode() + b"\n\n"
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def cut(text: str, limit: int = TEXT_MAX) -> str:
    """Somebody else's text for a message of ours: bounded, without control characters."""
    return _UNSHOWN.sub("\ufffd", text[:limit]) + ("…" if len(text) > limit else "")


# What engines call an error that they tell without an HTTP status: OpenAI's types and codes, Anthropic's, and vLLM's exceptions.
_STATUS_OF: Final = {
    "invalid_request_error": 400, "BadRequestError": 400, "context_length_exceeded": 400, "exceed_context_size_error": 400,
    "authentication_error": 401, "AuthenticationError": 401, "invalid_api_key": 401, "permission_error": 403,
    "not_found_error": 404, "NotFoundError": 404, "model_not_found": 404, "request_too_large": 413,
    "rate_limit_error": 429, "rate_limit_exceeded": 429, "RateLimitError": 429, "overloaded_error": 503,
}  # fmt: skip


def engine_problem(error: Any) -> Problem:
    """What an engine's error value (the first event of a stream, say) means as an HTTP answer: its own code where it is one.

    A client's own fault must not read as the engine's: that would be tried elsewhere, and count against the endpoint.
    """
    message, code, status = "the engine reported an error", "upstream_error", 502
    if isinstance(error, dict):
        told = error.get("message")
        if isinstance(told, str) and told:
            message = cut(told)
        named = next(
            (_STATUS_OF[name] for name in (error.get("type"), error.get("code")) if isinstance(name, str) and name in _STATUS_OF), None
        )
        status = named or status
        told_code = error.get("code", error.get("status"))
        if isinstance(told_code, int) and not isinstance(told_code, bool) and 400 <= told_code <= 599:
            status = told_code
        elif isinstance(told_code, str) and told_code.isascii() and told_code.isdigit() and 400 <= int(told_code[:9]) <= 599:
            status = int(told_code)
        elif isinstance(told_code, str) and told_code:
            code = cut(told_code, 100)
    elif isinstance(error, str) and error:
        message = cut(error)
    return Problem(status, code, message, upstream=True)
