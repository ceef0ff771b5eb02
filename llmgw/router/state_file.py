"""The form in which a router keeps a value on its disk: JSON with the number of its form. Pure."""

from __future__ import annotations

import json
from typing import TypeVar

from llmgw.domain.errors import Invalid
from llmgw.protocol.codec import structure, unstructure

T = TypeVar("T")


def encode_state(state: object, form: int) -> bytes:
    """`state` is an attrs value."""
    return json.dumps({"format": form, **unstructure(state)}).encode()


def decode_state(data: bytes, kind: type[T], form: int) -> T:
    """Raises Invalid for what is no state of that form and kind."""
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as err:
        raise Invalid(f"not JSON: {err}") from err
    if not isinstance(raw, dict) or raw.get("format") != form:
        raise Invalid(f"not a state of this build (format {form})")
    found = structure(raw, kind)
    assert isinstance(found, kind)
    return found
