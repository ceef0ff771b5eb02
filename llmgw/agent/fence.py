"""The fence: the highest `(epoch, owner)` this agent has met, and the cluster it belongs to. The one place that obeys or refuses.

Both are on disk before anything is executed under them, so that a restart of the agent forgets neither.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Final

import attrs
import trio

from llmgw.domain import lease
from llmgw.domain.errors import Invalid
from llmgw.domain.files import unusable
from llmgw.domain.ids import ClusterId, OwnerId
from llmgw.domain.lease import FencingToken
from llmgw.domain.ports import Machine
from llmgw.protocol.codec import structure, unstructure

FILE: Final = "fence.json"
WHAT: Final = "the file of this node's cluster and highest epoch"
JOIN_ANEW: Final = "if this node is to join anew, move it away"
NOT_PINNED: Final = FencingToken(ClusterId(""), 0, OwnerId(""))

Rule = Callable[[FencingToken | None, FencingToken], lease.Fence]


class Fence:
    """Owns the file of the highest token. `rule` is `domain.lease.fence`; a test that removes it shows that it matters."""

    def __init__(self, machine: Machine, folder: Path, rule: Rule = lease.fence) -> None:
        self._machine = machine
        self.path = folder / FILE
        self._rule = rule
        self._highest = NOT_PINNED
        self._writing = trio.Lock()

    async def load(self) -> None:
        """Reads the file. Raises `Invalid` for one that cannot be read or understood: forgetting a token is not an option."""
        try:
            data = await self._machine.run_sync(lambda: self._machine.disk.read(self.path))
        except OSError as err:
            raise unusable(err, WHAT, self.path, JOIN_ANEW) from err
        if data is None:
            return
        try:
            self._highest = structure(json.loads(data), FencingToken)
        except (ValueError, Invalid) as err:
            raise Invalid(
                f"{self.path} cannot be understood, and without it this agent cannot tell which leader to obey; {JOIN_ANEW}",
                code="bad_fence_file",
            ) from err

    @property
    def highest(self) -> FencingToken:
        """The highest token met; `cluster_id` alone is the pin. Its epoch is 0 before a leader was met."""
        return self._highest

    async def pin(self, cluster_id: ClusterId) -> bool:
        """Is this our cluster? At first contact it becomes so. Raises OSError when that cannot be written down."""
        async with self._writing:
            if not self._highest.cluster_id:
                await self._store(attrs.evolve(self._highest, cluster_id=cluster_id))
            return self._highest.cluster_id == cluster_id

    async def admit(self, token: FencingToken) -> lease.Fence:
        """May what carries `token` be obeyed? A higher token is on disk before this says yes. Raises OSError when it cannot be."""
        async with self._writing:
            met = self._highest if self._highest.cluster_id else None
            verdict = self._rule(met, token)
            if verdict is lease.Fence.OBEY and token != self._highest:
                await self._store(token)
            return verdict

    async def _store(self, token: FencingToken) -> None:
        data = json.dumps(unstructure(token)).encode()
        await self._machine.run_sync(lambda: self._machine.disk.write(self.path, data))
        self._highest = token
