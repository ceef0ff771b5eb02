"""Tells the history when a node is lost and when it is back, without a flood when many go at once.

The leader's own look at what it observed; it decides nothing and makes no plan.
"""

from __future__ import annotations

from typing import Final

import attrs

from llmgw.control.event_log import EventLog
from llmgw.control.observed import Observed
from llmgw.domain.event import Level
from llmgw.domain.ids import NodeId
from llmgw.domain.node import NodeState

NODES: Final = "nodes"  # what an event of several nodes is about
EACH_MAX: Final = 3  # so many at once are told one by one
NAMED_MAX: Final = 5  # names in an event of many
# What went by one cause is noticed within one heartbeat interval of 10 s. The first of them are told at once, the rest together.
GATHER_S: Final = 10.0


@attrs.frozen
class _Silence:
    """`heard_s`: when the node last spoke, on this machine's clock. `told`: its loss is in the history."""

    name: str
    heard_s: float
    told: bool = False


class NodeWatch:
    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._lost: dict[NodeId, _Silence] = {}
        self._back: dict[NodeId, tuple[str, float]] = {}  # name, and for how many seconds it was silent
        self._lost_next_s = float("-inf")
        self._back_next_s = float("-inf")

    def look(self, observed: Observed) -> None:
        """One look of a leader; to be called at least once a tick."""
        lost = self._lost
        for node in observed.nodes:
            if node.state is NodeState.LOST:
                if node.id not in lost:
                    lost[node.id] = _Silence(node.name, node.heard_s)
            elif node.id in lost and node.state is NodeState.READY:
                gone = lost.pop(node.id)
                if gone.told:  # of one that was back before it was told there is nothing to tell
                    self._back[node.id] = (gone.name, observed.now_s - gone.heard_s)
        if len(lost) > len(observed.nodes):
            self._lost = {node.id: lost[node.id] for node in observed.nodes if node.id in lost}
        self._tell_lost(observed.now_s)
        self._tell_back(observed.now_s)

    def _tell_lost(self, now_s: float) -> None:
        if now_s < self._lost_next_s:
            return
        found = {node: gone for node, gone in self._lost.items() if not gone.told}
        if not found:
            return
        self._lost_next_s = now_s + GATHER_S
        self._lost.update({node: attrs.evolve(gone, told=True) for node, gone in found.items()})
        silent = sorted((gone.name, now_s - gone.heard_s) for gone in found.values())
        if len(silent) <= EACH_MAX:
            for name, silent_s in silent:
                self._events.record("node.lost", f"node/{name}", f"node {name} is lost: silent for {silent_s:.0f} s", Level.WARNING)
            return
        least_s = min(silent_s for _, silent_s in silent)
        text = f"{len(silent)} nodes are lost: silent for {least_s:.0f} s or longer: {some([name for name, _ in silent])}"
        self._events.record("node.lost", NODES, text, Level.WARNING)

    def _tell_back(self, now_s: float) -> None:
        if not self._back or now_s < self._back_next_s:
            return
        self._back_next_s = now_s + GATHER_S
        back = sorted(self._back.values())
        self._back = {}
        if len(back) <= EACH_MAX:
            for name, silent_s in back:
                self._events.record("node.back", f"node/{name}", f"node {name} is back; it was silent for {silent_s:.0f} s")
            return
        longest_s = max(silent_s for _, silent_s in back)
        text = f"{len(back)} nodes are back; they were silent for up to {longest_s:.0f} s: {some([name for name, _ in back])}"
        self._events.record("node.back", NODES, text)


def some(names: list[str]) -> str:
    """The first few names, and how many more there are."""
    more = len(names) - NAMED_MAX
    return ", ".join(names[:NAMED_MAX]) + (f" and {more} more" if more > 0 else "")
