"""Tells each agent what the routers see of its engines: it judges by that those without counters, and those that answer nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from llmgw.control.leadership import Leadership
from llmgw.control.sessions import Sessions
from llmgw.domain.endpoint import EndpointUse
from llmgw.domain.errors import Unavailable
from llmgw.domain.ids import EndpointId, NodeId, ReplicaId
from llmgw.domain.lease import FencingToken
from llmgw.domain.ports import Machine
from llmgw.domain.replica import ReplicaReport, ReplicaState
from llmgw.protocol.messages import EngineSeen

WATCH_S: Final = 1.0  # an engine that stands still is judged after tens of seconds; a second is fine enough
TELL_SILENCE_S: Final = 1.0  # shorter pauses between tokens are not worth a message each second
# That bytes come is told more rarely: it keeps an engine from being called stalled that is too busy for its agent's looks. A
# third of `agent.progress.SEEN_FRESH_S`, so that two may be lost.
TELL_BUSY_S: Final = 10.0


async def watch_engines(
    machine: Machine,
    leadership: Leadership,
    sessions: Sessions,
    find: Callable[[ReplicaId], tuple[NodeId, ReplicaReport] | None],
    use: Callable[[], Mapping[EndpointId, EndpointUse]],
) -> None:
    """Until cancelled. `find` says where a replica is; an endpoint of a replica has its id."""
    told_s: dict[EndpointId, float] = {}
    while True:
        await machine.sleep_until(machine.now_s() + WATCH_S)
        if not leadership.is_leader:
            continue
        token, now_s = leadership.token, machine.now_s()
        before_s, told_s = told_s, {}
        for endpoint, of in use().items():
            last_s = before_s.get(endpoint)
            if of.silent_s < TELL_SILENCE_S and not of.failures and not of.unanswered:
                if not of.in_flight:
                    continue
                if last_s is not None and now_s - last_s < TELL_BUSY_S:
                    told_s[endpoint] = last_s
                    continue
            told_s[endpoint] = now_s
            found = find(ReplicaId(endpoint))
            if found is None or found[1].state is not ReplicaState.READY:
                continue
            try:
                sessions.send_nowait(found[0], _seen(token, ReplicaId(endpoint), of))
            except Unavailable:
                continue  # the session has just ended; what is seen will be seen again


def _seen(token: FencingToken, replica: ReplicaId, of: EndpointUse) -> EngineSeen:
    return EngineSeen(token, replica, of.in_flight, of.silent_s, of.answers, of.failures, of.unanswered, of.heard_s)
