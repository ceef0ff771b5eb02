"""When a control plane that cannot be followed is worth a line in the log: once when it is lost, and when a person can help.

A control plane that ends is met twice by whoever follows it: the session ends, and then nobody listens at its address. For an
operator that is one loss. A refused token, a certificate that does not check or another cluster is a cause of its own, and is
told though the loss was.
"""

from __future__ import annotations

from typing import Final

from llmgw.domain.errors import LlmgwError

_ABSENCE: Final = "it is away"
_OF_ABSENCE: Final = frozenset({"unavailable", "channel_closed"})  # codes of what passes by itself once it is back


class Loss:
    """What was told of one control plane since the last session with it was agreed upon."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def is_news(self, err: LlmgwError | None) -> bool:
        """Is this end of a session, or of a try (None: it ended without a word), to be told? Counts as told from here on."""
        cause = _ABSENCE if err is None or err.code in _OF_ABSENCE else err.code
        news = cause not in self._told and not (cause == _ABSENCE and self._told)
        self._told.add(cause)
        return news

    def over(self) -> None:
        """A session with it was agreed upon."""
        self._told.clear()
