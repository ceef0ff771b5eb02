"""The one shape of every error of the admin API, also of those that the web stack finds."""

from __future__ import annotations

import math
from typing import Any, Final

from werkzeug.exceptions import HTTPException

from llmgw.domain.errors import (
    Conflict,
    Denied,
    Fault,
    Invalid,
    LlmgwError,
    NotFound,
    Overloaded,
    StaleEpoch,
    Unavailable,
    UpstreamFailed,
)

# the first that fits names the kind
_TYPES: Final[tuple[tuple[type[LlmgwError], str], ...]] = (
    (StaleEpoch, "conflict"),
    (Invalid, "invalid"),
    (Denied, "denied"),
    (NotFound, "not_found"),
    (Conflict, "conflict"),
    (Overloaded, "overloaded"),
    (Unavailable, "unavailable"),
    (UpstreamFailed, "upstream_failed"),
)
_OF_STATUS: Final = {
    400: ("invalid", "invalid"),
    404: ("not_found", "not_found"),
    405: ("invalid", "method_not_allowed"),
    408: ("invalid", "timeout"),
    413: ("invalid", "too_large"),
}


def error_body(kind: str, code: str, message: str, param: str | None = None, faults: tuple[Fault, ...] = ()) -> dict[str, Any]:
    error: dict[str, Any] = {"message": message, "type": kind, "param": param, "code": code}
    if faults:
        error["faults"] = [{"path": fault.path, "reason": fault.reason} for fault in faults]
    return {"error": error}


def body_of(err: LlmgwError) -> dict[str, Any]:
    kind = next((name for error_type, name in _TYPES if isinstance(err, error_type)), "broken")
    faults = err.faults if isinstance(err, Invalid) else ()
    param = err.param if isinstance(err, Invalid) else None
    return error_body(kind, err.code, err.message, param, faults)


def headers_of(err: LlmgwError) -> dict[str, str]:
    headers = {}
    retry_after_s = getattr(err, "retry_after_s", None)
    if retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(retry_after_s)))
    if err.status == 401:
        headers["WWW-Authenticate"] = 'Bearer realm="llmgw admin"'
    return headers


def of_http(err: HTTPException, path: str, method: str) -> tuple[int, dict[str, Any], dict[str, str]]:
    """(status, body, headers) for what the web framework refused by itself."""
    status = err.code or 500
    kind, code = _OF_STATUS.get(status, ("invalid" if status < 500 else "broken", "refused" if status < 500 else "broken"))
    headers = {}
    if status == 404:
        message = f"there is nothing at {path[:200]}"
        if path.startswith("/v1/"):
            message += ": /v1 is at the router's port, [router] listen, by default 8080"
    elif status == 405:
        allowed = sorted(getattr(err, "valid_methods", None) or ())
        headers["Allow"] = ", ".join(allowed)
        message = f"{method[:20]} is not offered at {path[:200]}; it takes {', '.join(allowed) or 'nothing'}"
    elif status == 413:
        message = "the request's body is too large"
    elif status == 408:
        message = "the request's body did not arrive in time"
    else:
        message = "the request was refused" if status < 500 else "something went wrong on this control plane; its log says what"
    return status, error_body(kind, code, message), headers
