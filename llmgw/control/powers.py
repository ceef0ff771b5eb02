"""Which actions a leader's claim allows now. Pure (control.md 2.2).

CONFIRMED may do everything. UNCONFIRMED may only restore what the newest durable document already asks for, while it hears
more than half of the nodes that count, or at least one of fewer than three.
"""

from __future__ import annotations

from llmgw.domain.lease import Power
from llmgw.domain.plan import Action, Start


def hears_enough(heard: int, counted: int) -> bool:
    """`counted`: nodes that are not removed and were not lost for over an hour."""
    return heard >= 1 if counted < 3 else heard * 2 > counted


def allows(power: Power, action: Action, heard: int, counted: int) -> bool:
    """May this action be sent under this power?"""
    if power is Power.CONFIRMED:
        return True
    return isinstance(action, Start) and action.restores and hears_enough(heard, counted)
