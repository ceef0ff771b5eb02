"""Whether this control plane leads, under which epoch, and what its claim may do now.

Here a control plane leads by definition: it has its store, or its file, to itself. The epoch still rises with every start,
from a counter file in the data directory, and travels with every command, so that agents and routers are fenced from the
first day. What is outside of this class stays when a lease decides inside it.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import structlog
import trio

from llmgw.control import powers
from llmgw.domain.errors import Conflict, Invalid, Unavailable
from llmgw.domain.files import unusable
from llmgw.domain.ids import ClusterId, OwnerId
from llmgw.domain.lease import FencingToken, Power
from llmgw.domain.plan import Action
from llmgw.domain.ports import Machine

EPOCH_FILE: Final = "epoch"
EPOCH_DIGITS_MAX: Final = 18  # what the store's 64-bit column takes; epochs rise by one
_WHAT: Final = "the file of the last epoch"
# The store counts too, and is asked: only with both gone could an epoch come again.
_REMEDY: Final = "move it away if the store is still the old one; else put a number there that is no lower than an agent's fence.json has"
OnLead = Callable[[int], Awaitable[None]]
log = structlog.get_logger("llmgw.leadership")


class Leadership:
    """`raise_epoch(epoch)` writes a new epoch where store writes check it, before it is used; it may wait.

    `heard()` returns (nodes heard, nodes that count), for the powers of an unconfirmed claim.
    """

    def __init__(
        self,
        machine: Machine,
        data_dir: Path,
        cluster_id: ClusterId,
        owner: OwnerId,
        raise_epoch: Callable[[int], Awaitable[int]],
        heard: Callable[[], tuple[int, int]],
    ) -> None:
        self._machine = machine
        self._file = data_dir / EPOCH_FILE
        self._raise_epoch = raise_epoch
        self._heard = heard
        self._hooks: list[OnLead] = []
        self._leads = False
        self._left = False  # stepped down: never again in this process
        self._epoch = 0
        self._met = 0  # the highest epoch that any agent or router reported
        self._again = trio.Event()
        self.cluster_id = cluster_id
        self.owner = owner
        self.changed = trio.Event()  # replaced at each change of role or epoch

    @property
    def is_leader(self) -> bool:
        return self._leads

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def token(self) -> FencingToken:
        """What goes with every command. Raises Unavailable while this control plane does not lead."""
        if not self._leads:
            raise Unavailable("this control plane does not lead", code="not_leader")
        return FencingToken(self.cluster_id, self._epoch, self.owner)

    def power(self, now_s: float) -> Power | None:
        """What the claim may do at this instant; None while it does not lead."""
        if not self._leads:
            return None
        return Power.CONFIRMED if self.confirmed(now_s) else Power.UNCONFIRMED

    def confirmed(self, now_s: float) -> bool:
        """Is the right to lead proven at this instant? Asked at each use, never kept."""
        return self._leads

    def allows(self, action: Action, now_s: float) -> bool:
        power = self.power(now_s)
        return power is not None and powers.allows(power, action, *self._heard())

    def on_lead(self, hook: OnLead) -> None:
        """`hook(epoch)` re-reads what a leader before may have changed. Run one after another before the first plan."""
        self._hooks.append(hook)

    def meet(self, epoch: int) -> None:
        """An agent or a router reported this epoch. One that is not below ours, from elsewhere, makes us acquire above it."""
        if epoch > self._met:
            self._met = epoch
        if self._leads and epoch >= self._epoch:
            self._again.set()

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Leads until cancelled. Says started() once the first term's hooks are done."""
        await self._acquire()
        task_status.started()
        while True:
            await self._again.wait()
            self._again = trio.Event()
            if not self._left:
                log.warning("a higher epoch was met; acquiring above it", met=self._met, epoch=self._epoch)
                await self._acquire()

    async def _acquire(self) -> None:
        self._leads = False
        stored = self._stored_epoch()
        epoch = 1 + max(stored, self._met, self._epoch)
        epoch = max(epoch, await self._raise_epoch(epoch))
        try:
            await self._machine.run_sync(lambda: self._machine.disk.write(self._file, f"{epoch}\n".encode()))
        except OSError as err:
            raise unusable(err, _WHAT, self._file, _REMEDY) from err
        self._epoch = epoch
        for hook in self._hooks:
            await hook(epoch)
        self._leads = True
        log.info("leading", epoch=epoch, owner=self.owner)
        self._tell()

    def _stored_epoch(self) -> int:
        try:
            data = self._machine.disk.read(self._file)
        except OSError as err:
            raise unusable(err, _WHAT, self._file, _REMEDY) from err
        raw = b"0" if data is None else data.strip()
        if len(raw) > EPOCH_DIGITS_MAX or re.fullmatch(rb"[0-9]+", raw) is None:
            # Starting again from 0 could send an epoch that agents have met from somebody else.
            raise Invalid(f"{self._file} does not hold the last epoch, a whole number; {_REMEDY}", code="bad_epoch_file")
        return int(raw)

    def _tell(self) -> None:
        self.changed.set()
        self.changed = trio.Event()

    def step_down(self) -> None:
        """Leaving: this process never leads again. Called before agents are let go."""
        self._left = True
        if self._leads:
            self._leads = False
            log.info("stepped down", epoch=self._epoch)
            self._tell()

    def hand_over(self, *, force: bool = False) -> None:
        """Release and stay. A lone control plane has nobody to hand over to: with `force` it takes a new epoch itself.

        Raises Conflict without force.
        """
        if not force:
            raise Conflict(
                "this is the only control plane: there is nobody to hand over to (--force takes a new epoch)", code="lone_control_plane"
            )
        self._again.set()
