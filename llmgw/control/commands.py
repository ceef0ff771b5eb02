"""Commands to agents: an id and the fencing token for each, the take-over barrier, and what the answers mean.

Sending never waits: a session's outbox takes the command or the session is gone. What was hoped for is never planned from:
an order counts as pending until its agent reports it or says no.
"""

from __future__ import annotations

import contextlib
from typing import Final

import structlog

from llmgw.control.event_log import EventLog
from llmgw.control.inventory import Inventory
from llmgw.control.leadership import Leadership
from llmgw.control.sessions import Sessions
from llmgw.domain.errors import Unavailable
from llmgw.domain.event import Level
from llmgw.domain.ids import CommandId, NodeId
from llmgw.domain.ports import Machine
from llmgw.protocol.messages import Command, CommandResult, ForgetReplica, LeaderHello, Order, Outcome, StartReplica, StopReplica

COMMAND_ID_BYTES: Final = 8
OUTSTANDING_MAX: Final = 10_000  # commands whose answer is awaited; the oldest are given up with a warning
UNKNOWN_REPLICA: Final = "unknown_replica"  # what an agent answers when it has no record of it
log = structlog.get_logger("llmgw.commands")


class Commands:
    def __init__(self, machine: Machine, leadership: Leadership, sessions: Sessions, inventory: Inventory, events: EventLog) -> None:
        self._machine = machine
        self._leadership = leadership
        self._sessions = sessions
        self._inventory = inventory
        self._events = events
        self._outstanding: dict[CommandId, tuple[NodeId, Order]] = {}
        sessions.on_open(self.hello)
        sessions.on_result(self.result)

    def hello(self, node: NodeId) -> None:
        """The barrier: ask the node for the inventory that makes it known to this leader."""
        if self._leadership.is_leader:
            self._sessions.send_nowait(node, LeaderHello(self._leadership.token))
            self._sessions.tell_planes(node)

    def hello_all(self) -> None:
        """A new epoch: every connected node is asked anew."""
        for node in self._sessions.connected():
            with contextlib.suppress(Unavailable):  # a session that takes nothing has ended; the next one begins with a hello
                self.hello(node)

    def send(self, node: NodeId, order: Order, generation: int) -> CommandId:
        """One order under this leader's token. Raises Unavailable when the node has no session or we do not lead."""
        token = self._leadership.token
        command = Command(token, CommandId(self._machine.fresh_hex(COMMAND_ID_BYTES)), generation, order)
        self._sessions.send_nowait(node, command)
        self._outstanding[command.command_id] = (node, order)
        if len(self._outstanding) > OUTSTANDING_MAX:
            oldest = next(iter(self._outstanding))
            log.warning("no answer to a command", command=oldest, node=self._outstanding.pop(oldest)[0])
        if isinstance(order, StartReplica):
            self._inventory.order(node, order.order)
        elif isinstance(order, StopReplica):
            self._inventory.stop_sent(order.replica)
        return command.command_id

    def end_term(self) -> None:
        """Somebody else leads from here on: no answer is waited for."""
        self._outstanding.clear()

    def result(self, node: NodeId, result: CommandResult) -> None:
        """What an agent answered. A higher epoch makes us acquire above it; a "no" is believed."""
        sent = self._outstanding.pop(result.command_id, None)
        if result.outcome is Outcome.DONE or sent is None:
            return
        order = sent[1]
        name = self._sessions.name(node)
        if result.outcome is Outcome.STALE:
            log.warning("an agent has met a higher epoch", node=name, epoch=result.epoch, owner=result.owner)
            self._leadership.met(result.epoch, result.owner)
        elif result.outcome is Outcome.FOREIGN:
            self._events.record("node.foreign", f"node/{name}", f"node {name} belongs to another cluster: {result.text}", Level.WARNING)
        if isinstance(order, StartReplica):
            if result.outcome is Outcome.REFUSED:
                text = f"node {name} refused to start it: {result.text}"
                self._events.record("replica.refused", f"replica/{order.order.id}", text, Level.WARNING)
                self._inventory.refuse(node, order.order.id, result.code, result.text)
            else:
                self._inventory.gone(node, order.order.id)
        elif isinstance(order, StopReplica):
            if result.code == UNKNOWN_REPLICA:
                self._inventory.gone(node, order.replica)
            else:
                self._inventory.stop_sent(order.replica, sent=False)
        elif isinstance(order, ForgetReplica) and result.code == UNKNOWN_REPLICA:
            self._inventory.gone(node, order.replica)
