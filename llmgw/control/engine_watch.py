"""Tells each agent what the routers see of its engines, so that it can judge those that have no counters of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from llmgw.control.leadership import Leadership
from llmgw.control.sessions import Sessions
from llmgw.domain.endpoint import EndpointUse
from llmgw.domain.errors import Unavailable
from llmgw.domain.ids import EndpointId, NodeId, ReplicaId
from llmgw.domain.ports import Machine
from llmgw.domain.replica import ReplicaReport, ReplicaState
from llmgw.protocol.messages import EngineSeen

WATCH_S: Final = 1.0  # an engine that stands still is judged after tens of seconds; a second is fine enough
TELL_SILENCE_S: Final = 1.0  # shorter pauses between tokens are not worth a message


async def watch_engines(
    machine: Machine,
    leadership: Leadership,
    sessions: Sessions,
    find: Callable[[ReplicaId], tuple[NodeId, ReplicaReport] | None],
    use: Callable[[], Mapping[EndpointId, EndpointUse]],
) -> None:
    """Until cancelled. `find` says where a replica is; an endpoint of a replica has its id."""
    while True:
        await machine.sleep_until(machine.now_s() + WATCH_S)
        if not leadership.is_leader:
            continue
        token = leadership.token
        for endpoint, of in use().items():
            if of.silent_s < TELL_SILENCE_S and not of.failures:
                continue
            found = find(ReplicaId(endpoint))
            if found is None or found[1].state is not ReplicaState.READY:
                continue
            try:
                sessions.send_nowait(found[0], EngineSeen(token, ReplicaId(endpoint), of.in_flight, of.silent_s, of.answers, of.failures))
            except Unavailable:
                continue  # the session has just ended; what is seen will be seen again
