"""The loop: read, plan, send, wait. The rules are in `planning` and the loop is short enough to trust.

Hints only wake it. It keeps the reasons of the plan it made last, which is all that `explain` prints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

import structlog
import trio

from llmgw.control.commands import Commands
from llmgw.control.event_log import EventLog
from llmgw.control.inventory import Inventory
from llmgw.control.leadership import Leadership
from llmgw.control.observed import Desired, Observed
from llmgw.control.planning import IDLE_LOOK_AGAIN_S, plan_replicas
from llmgw.domain.errors import Unavailable
from llmgw.domain.ids import NodeId
from llmgw.domain.plan import Action, Forget, Plan, Reason, Start, Stop, Withdraw
from llmgw.domain.ports import Machine
from llmgw.protocol.messages import ForgetReplica, StartReplica, StopReplica
from llmgw.protocol.waiting import wait_woken

REPLICA_RANDOM_BYTES: Final = 4
DEBOUNCE_S: Final = 0.02  # a burst of reports makes one plan; far below the 100 ms from ready to routable, which is the publisher's
log = structlog.get_logger("llmgw.reconciler")


class Reconciler:
    """`desired` and `observe` read the current values; `publish` sends the endpoint list out at once.

    `look` is shown everything that is observed here: once a tick and more often. `awake` is called before each look.
    """

    def __init__(
        self,
        machine: Machine,
        leadership: Leadership,
        commands: Commands,
        inventory: Inventory,
        events: EventLog,
        desired: Callable[[], Desired],
        observe: Callable[[], Observed],
        publish: Callable[[], None],
        tick_s: Callable[[], float],
        look: Callable[[Observed], None] = lambda observed: None,
        awake: Callable[[], None] = lambda: None,
    ) -> None:
        self._machine = machine
        self._leadership = leadership
        self._commands = commands
        self._inventory = inventory
        self._events = events
        self._desired = desired
        self._observe = observe
        self._look = look
        self._awake = awake
        self._publish = publish
        self._tick_s = tick_s
        self._wake = trio.Event()
        self._looked_at: tuple[Desired, Observed] | None = None  # what the last plan was made of
        self._reasons: Mapping[str, Reason] = {}
        self.plan = Plan((), (), 0.0)
        self.plans = 0

    @property
    def reasons(self) -> Mapping[str, Reason]:
        """The last plan's reasons by object; of several for one object the first, which is the most telling."""
        return self._reasons

    def poke(self) -> None:
        """Something changed: look again."""
        self._wake.set()

    def end_term(self) -> None:
        """Somebody else leads from here on, and knows the reasons."""
        self.plan, self._reasons, self._looked_at, self.plans = Plan((), (), 0.0), {}, None, 0

    def plan_once(self) -> Plan:
        """One look: plan, and carry out what the claim allows. Does not wait."""
        desired, observed = self._desired(), self._observe()
        self._look(observed)
        plan = plan_replicas(desired, observed, self._fresh_ids())
        self._looked_at = (desired, observed)
        reasons: dict[str, Reason] = {}
        for reason in plan.reasons:
            reasons.setdefault(reason.object, reason)
        self.plan, self._reasons = plan, reasons
        self.plans += 1
        withdrew = False
        for action in plan.actions:
            if not self._leadership.allows(action, self._machine.now_s()):  # asked at each use: it may end between two sends
                log.debug("not allowed now", action=type(action).__name__)
                continue
            try:
                withdrew |= self._carry_out(action, desired.catalog.generation)
            except Unavailable as err:
                log.debug("an action could not be sent", action=type(action).__name__, why=str(err))
        if withdrew:
            self._publish()  # withdraw before drain: routers let go before anything is stopped
            self.poke()
        return plan

    def _carry_out(self, action: Action, generation: int) -> bool:
        match action:
            case Start(node, order):
                self._commands.send(node, StartReplica(order), generation)
                devices = ", ".join(order.devices)
                text = f"{order.id} is placed on {self._name(node)} ({devices}, port {order.port}): {order.placement.text}"
                self._events.record("replica.placed", f"replica/{order.id}", text)
            case Withdraw(_, replica, why, deadline_s):
                if self._inventory.close(replica, why, deadline_s):
                    self._events.record("replica.withdrawn", f"replica/{replica}", f"{replica} gets no new requests: {why}")
                    return True
            case Stop(node, replica, why, grace_s):
                self._commands.send(node, StopReplica(replica, why, grace_s), generation)
                log.debug("stop", replica=replica, why=why)
            case Forget(node, replica, why):
                self._commands.send(node, ForgetReplica(replica), generation)
                log.debug("forget", replica=replica, why=why)
        return False

    def _name(self, node: NodeId) -> str:
        entry = self._inventory.entry(node)
        return entry.facts.name if entry else node

    def _fresh_ids(self) -> Iterator[str]:
        while True:
            yield self._machine.fresh_hex(REPLICA_RANDOM_BYTES)

    def _settled(self) -> bool:
        """Would planning now find what the last plan found: nothing to do? Looked at without planning, at rest once a second."""
        if self._looked_at is None or self.plan.look_again_after_s < IDLE_LOOK_AGAIN_S:
            return False
        desired, observed = self._looked_at
        now = self._observe()
        self._look(now)
        return now.replicas is observed.replicas and not now.closings and self._desired() == desired

    async def run(self) -> None:
        """Plans while we lead, until cancelled."""
        hinted = True
        while True:
            look_again_s = self._tick_s()
            self._leadership.beat()
            self._awake()
            if self._leadership.is_leader and (hinted or not self._settled()):
                look_again_s = min(look_again_s, self.plan_once().look_again_after_s)
            hinted = await wait_woken(self._machine, self._wake, self._machine.now_s() + look_again_s)
            if hinted:
                await self._machine.sleep_until(self._machine.now_s() + DEBOUNCE_S)
            self._wake = trio.Event()
