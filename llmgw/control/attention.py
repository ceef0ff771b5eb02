"""How long others have been silent is judged by a clock that stands still while this process did.

A control plane that was frozen or suspended wakes up to see every node and every router silent for as long, though it was the
one that did not listen. What they said meanwhile still waits in its sockets.
"""

from __future__ import annotations

from typing import Final

from llmgw.domain.ports import Machine

# Asked at least once a second by whoever runs beside it; a longer pause than this is none of a loaded machine's.
PAUSE_S: Final = 3.0


class Attention:
    """A clock for silence. Has to be asked at least once a second, or it takes the time between for a pause."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._asked_s = machine.now_s()
        self._paused_s = 0.0
        self._longest_s = 0.0

    def now_s(self) -> float:
        """This machine's `now_s` less the pauses of this process."""
        now_s = self._machine.now_s()
        gap_s = now_s - self._asked_s
        self._asked_s = now_s
        if gap_s > PAUSE_S:
            self._paused_s += gap_s
            self._longest_s = max(self._longest_s, gap_s)
        return now_s - self._paused_s

    def take_pause(self) -> float:
        """The longest pause since this was last asked, in seconds; 0 for none."""
        self.now_s()
        longest_s, self._longest_s = self._longest_s, 0.0
        return longest_s
