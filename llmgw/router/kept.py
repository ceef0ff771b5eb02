"""What a following router keeps in its data directory: the name it goes by, and what leaders have pushed to it so far.

A disk that fails takes nothing from the routing: it ends in a line of the log, and another try.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import attrs
import structlog
import trio

from llmgw.domain.endpoint import EndpointList, ListStamp
from llmgw.domain.errors import Invalid
from llmgw.domain.files import reason
from llmgw.domain.ids import EndpointId
from llmgw.domain.lease import Fence, FencingToken, fence
from llmgw.domain.model import Catalog
from llmgw.domain.policy import Policy
from llmgw.domain.ports import Machine
from llmgw.protocol.router_messages import EPOCH_MAX
from llmgw.router.state_file import decode_state, encode_state

log = structlog.get_logger("llmgw.router.kept")

DISK_AGAIN_S: Final = 5.0  # between tries to write to a disk that refused
STATE_FILE: Final = "pushed.json"
STATE_FORMAT: Final = 1
ID_FILE: Final = "router-id"
ID_BYTES: Final = 4
ID_LENGTH_MAX: Final = 100


@attrs.frozen
class Pushed:
    """What leaders have pushed so far, and what is kept on disk. None: never yet.

    `highest` is the highest token met; `stamp` that of `endpoints`, which may be of an epoch before, and `push` its sender's
    count. `withdrawn` are endpoints that a leader took off its lists, the newest last; `control_planes` are those that it told of.
    """

    highest: FencingToken | None = None
    stamp: ListStamp | None = None
    push: int = 0
    endpoints: EndpointList = EndpointList()
    withdrawn: tuple[EndpointId, ...] = ()
    catalog: Catalog | None = None
    policy: Policy | None = None
    control_planes: tuple[str, ...] = ()


class KeptState:
    """One per router process. `state` gives what is to be kept now; `saved` is what is on disk, as far as is known."""

    def __init__(self, machine: Machine, folder: Path, state: Callable[[], Pushed]) -> None:
        self._machine = machine
        self._path = folder / STATE_FILE
        self._state = state
        self._dirty = trio.Event()
        self._turn = trio.Lock()
        self._failed = False
        self.saved = Pushed()

    async def load(self) -> Pushed | None:
        """What was kept last. None where there is none, or none that can be used, which is told."""
        try:
            data = await self._machine.run_sync(lambda: self._machine.disk.read(self._path))
            if data is None:
                return None
            self.saved = _decode(data)
        except (OSError, Invalid) as err:
            why = err.message if isinstance(err, Invalid) else reason(err)
            log.error(
                "what was last pushed cannot be read; the file is the seed until a control plane is heard", file=str(self._path), why=why
            )
            return None
        return self.saved

    async def save(self) -> bool:
        """Is the state on disk now? A disk that refuses is told once, and so is the end of it."""
        async with self._turn:
            state = self._state()
            if state == self.saved:
                return True
            try:
                await self._machine.run_sync(lambda: self._machine.disk.write(self._path, encode_state(state, STATE_FORMAT)))
            except OSError as err:
                if not self._failed:
                    log.error("what was pushed cannot be kept on disk; it is acted on all the same", file=str(self._path), why=reason(err))
                self._failed = True
                return False
            if self._failed:
                log.info("what was pushed is on disk again", file=str(self._path))
            self._failed = False
            self.saved = state
            return True

    def save_soon(self) -> None:
        """`run` saves it, once for however many changes there are until then."""
        self._dirty.set()

    async def run(self) -> None:
        """Saves what `save_soon` was said of, until cancelled."""
        while True:
            await self._dirty.wait()
            self._dirty = trio.Event()
            if not await self.save():
                await self._machine.sleep_until(self._machine.now_s() + DISK_AGAIN_S)
                self._dirty.set()


def kept_id(machine: Machine, folder: Path, name: str, instead: str) -> str:
    """The router's id, made of `name` once and kept; with `instead` where the disk keeps none. Blocking."""
    path = folder / ID_FILE
    try:
        text = (machine.disk.read(path) or b"").decode("utf-8", "replace").strip()
        if text and text.isprintable() and len(text) <= ID_LENGTH_MAX:
            return text
        made = f"{name}-{machine.fresh_hex(ID_BYTES)}"[-ID_LENGTH_MAX:]
        machine.disk.write(path, made.encode() + b"\n")
    except OSError as err:
        log.error("the router's id cannot be kept on disk", file=str(path), why=reason(err))
        return f"{name}-{instead}"
    return made


def _decode(data: bytes) -> Pushed:
    """Raises Invalid."""
    found = decode_state(data, Pushed, STATE_FORMAT)
    if found.stamp is not None and (found.highest is None or fence(found.stamp.token, found.highest) is not Fence.OBEY):
        raise Invalid("a list above the highest token met")
    if found.highest is not None and not 0 <= found.highest.epoch <= EPOCH_MAX:
        raise Invalid(f"{found.highest.epoch} is no epoch")
    return found
