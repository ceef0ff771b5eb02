"""An operator's order that a facility gets nothing new, or is drained."""

from __future__ import annotations

import attrs


@attrs.frozen
class Hold:
    """`until_wall_s` is wall time (seconds since 1970) because an operator gave it; None: until it is taken away."""

    facility: str
    reason: str
    drain: bool = False
    until_wall_s: float | None = None
    author: str = ""

    def active(self, wall_s: float) -> bool:
        return self.until_wall_s is None or wall_s < self.until_wall_s
