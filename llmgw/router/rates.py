"""What a key may use in a minute: requests, and tokens. Pure; time is passed in. How many run at a time is `limits`' to say.

A request is counted when it is let in, and one that is refused costs nothing. Its tokens are not known then: it is charged an
estimate, as OpenAI and Azure do, and the difference when the engine has said what it used. Counts are this router's own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from llmgw.domain.errors import Overloaded
from llmgw.domain.policy import ApiKey
from llmgw.router.window import Entry, Window

RATE_LIMITED: Final = "rate_limit_exceeded"  # OpenAI's own code, which clients look for
BYTES_PER_TOKEN: Final = 4  # what the field takes for English text before it is counted


class KeyUse:
    """What one key has used. A limit that changes finds what was used under the one before; what has no limit is not counted."""

    __slots__ = ("requests", "tokens")

    def __init__(self) -> None:
        self.requests = Window()
        self.tokens = Window()


class Charge:
    """The tokens that one request was charged."""

    __slots__ = ("_entry", "_reserved", "_window")

    def __init__(self, window: Window, entry: Entry, reserved: int) -> None:
        self._window = window
        self._entry: Entry | None = entry
        self._reserved = reserved

    def settle(self, tokens: int, now_s: float) -> None:
        """It has used so many; counts once. A charge that is never settled stays as it was estimated."""
        entry, self._entry = self._entry, None
        if entry is None:
            return
        if tokens < self._reserved:
            self._window.give_back(entry, self._reserved - tokens)
        elif tokens > self._reserved:
            self._window.take(now_s, tokens - self._reserved)


class Rates:
    """By the key's name: an edit of a key's other fields keeps its counts."""

    def __init__(self) -> None:
        self._uses: dict[str, KeyUse] = {}

    def use(self, name: str) -> KeyUse:
        found = self._uses.get(name)
        if found is None:
            found = self._uses[name] = KeyUse()
        return found

    def admit(self, key: ApiKey, tokens: int, now_s: float) -> Charge | None:
        """Lets a request of the key in that is taken for so many tokens (`estimate`); the charge, None where they have no limit.

        Raises Overloaded, nothing counted.
        """
        requests_max, tokens_max = key.requests_per_minute, key.tokens_per_minute
        if not (requests_max or tokens_max):
            return None
        use = self.use(key.name)
        if requests_max and (wait_s := use.requests.wait_s(now_s, 1, requests_max)):
            text = f"the key {key.name!r} may make {requests_max} requests a minute, and has made them; the next may come in {wait_s:.1f} s"
            raise Overloaded(text, retry_after_s=wait_s, code=RATE_LIMITED)
        charge = None
        if tokens_max:
            # One that alone is taken for more than the limit is let in where nothing else counts: estimates may be far off.
            reserved = tokens if tokens < tokens_max else tokens_max
            if wait_s := use.tokens.wait_s(now_s, reserved, tokens_max):
                text = (
                    f"the key {key.name!r} may use {tokens_max} tokens a minute, of which {use.tokens.used(now_s)} are used; "
                    f"this request is taken for {reserved} and may come in {wait_s:.1f} s"
                )
                raise Overloaded(text, retry_after_s=wait_s, code=RATE_LIMITED)
            charge = Charge(use.tokens, use.tokens.take(now_s, reserved), reserved)
        if requests_max:
            use.requests.take(now_s, 1)
        return charge

    def keep(self, names: Iterable[str], now_s: float) -> None:
        """Of keys that are gone nothing is kept, once nothing of them counts."""
        known = set(names)
        for name, use in list(self._uses.items()):
            if name not in known and not (use.requests.used(now_s) or use.tokens.used(now_s)):
                del self._uses[name]


def estimate(body_bytes: int, output_tokens: int) -> int:
    """Tokens that a request may use: its bytes, four to a token, and as many of output as it asks for at most."""
    return body_bytes // BYTES_PER_TOKEN + output_tokens
