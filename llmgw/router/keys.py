"""Who calls: the keys of clients, found by their hash. Pure; a key's text is never kept, logged or echoed.

A key is looked up by its SHA-256, so the time of a look-up says nothing about the text of any key.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from typing import Final

import attrs

from llmgw.domain.errors import Unauthenticated
from llmgw.domain.policy import ApiKey, Policy

ANONYMOUS: Final = ApiKey(name="", sha256="")
_HINT: Final = "send a valid key as `Authorization: Bearer KEY` or `x-api-key: KEY`"


@attrs.frozen(eq=False)
class Keyring:
    """The keys of one policy. Built once per policy, shared by all requests under it."""

    required: bool
    by_hash: dict[str, ApiKey]

    @classmethod
    def of(cls, policy: Policy) -> Keyring:
        return cls(policy.auth_required, {key.sha256.lower(): key for key in policy.keys})

    def authenticate(self, headers: Iterable[tuple[bytes, bytes]], wall_s: float) -> ApiKey:
        """The caller's key, ANONYMOUS where none is asked for. Raises Unauthenticated; its text is the same class for all reasons."""
        try:
            presented = presented_key(headers)
        except Unauthenticated:
            if self.required:
                raise
            return ANONYMOUS
        if presented is None:
            if self.required:
                raise Unauthenticated(f"no key was given; {_HINT}", code="invalid_api_key")
            return ANONYMOUS
        digest = hashlib.sha256(presented).hexdigest()
        key = self.by_hash.get(digest)
        if key is None or not hmac.compare_digest(key.sha256.lower(), digest):
            if not self.required:
                return ANONYMOUS
            raise Unauthenticated(f"the key is not valid; {_HINT}", code="invalid_api_key")
        if key.expires_wall_s is not None and wall_s >= key.expires_wall_s:
            if not self.required:
                return ANONYMOUS
            raise Unauthenticated(f"the key has expired; {_HINT}", code="invalid_api_key")
        return key


def presented_key(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """The key that the headers show, None when they show none. Raises Unauthenticated for another scheme or two different keys."""
    found: list[bytes] = []
    for name, value in headers:
        if name == b"authorization":
            scheme, _, rest = value.partition(b" ")
            text = rest.strip(b" \t")
            if scheme.lower() != b"bearer" or not text:
                raise Unauthenticated(f"the Authorization header shows no bearer key; {_HINT}", code="invalid_api_key")
            found.append(text)
        elif name == b"x-api-key":
            text = value.strip(b" \t")
            if text:
                found.append(text)
    if not found:
        return None
    if any(not hmac.compare_digest(found[0], other) for other in found[1:]):
        raise Unauthenticated(f"two different keys were given; {_HINT}", code="invalid_api_key")
    return found[0]
