"""The task that keeps Litestream running for one epoch: starts the child, starts it again, asks it to upload, tells how it fares.

    keeper = Litestream(machine, place, prefix, folder)
    await nursery.start(keeper.run)      # started when its socket answers; ends with `end`, or a cancel, and the child with it
    await keeper.sync()                  # everything committed before the call is in the bucket; raises Unavailable
    await keeper.end()                   # when writes have ended and before the lease is released

A child that dies is started again on the same folder, which is safe: nobody else has this prefix. It decides nothing about leading:
a replica that cannot be reached is a blip. Logs transitions only.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import attrs
import structlog
import trio

from llmgw.domain.errors import Invalid, LlmgwError, Unavailable
from llmgw.domain.files import unusable
from llmgw.domain.ports import Machine
from llmgw.replication import rules
from llmgw.replication.children import Child, environment, how_ended
from llmgw.replication.configuration import configuration
from llmgw.replication.control_socket import ControlSocket, Failed, Synced
from llmgw.replication.folders import SOCKET, Folder
from llmgw.replication.prefix_store import PrefixStore, StoreFailed
from llmgw.replication.programs import Found, find
from llmgw.replication.rules import Rules
from llmgw.replication.troubles import Trouble, trouble
from llmgw.settings.object_place import Credentials, ObjectPlace

SYNC_S: Final = 5.0  # what a write waits for its upload; clients of the admin API give up near 10 s
START_S_MAX: Final = 10.0  # until its socket answers, measured at 50 to 90 ms
START_LOOK_S: Final = 0.01
AGAIN_S: Final = 0.1  # after a refusal of a sync, and after a child's first death
AGAIN_S_MAX: Final = 5.0
POKE_S: Final = 5.0  # of itself it waits up to 5 minutes after an outage; asked, it uploads at once (R-B44)
LIVED_S: Final = 60.0  # a child that lived as long was well
END_GRACE_S: Final = 2.0  # what must be uploaded was asked for before; TERM takes 5 ms where the store answers
LAST_WORDS_S: Final = 1.0  # what it said last is in the pipe already
_LEVELS: Final = ("WARN", "ERROR")
log = structlog.get_logger("llmgw.replication")


@attrs.frozen
class Report:
    """For metrics and status, times on the machine's own clock. `since_s` is of the trouble, None while there is none; `success_s` is
    when everything was last known to be in the bucket, None before the first time."""

    alive: bool
    restarts: int
    txid: int
    replicated_txid: int
    trouble: str
    needs_repair: bool
    since_s: float | None
    began_s: float
    success_s: float | None
    program: str
    version: str

    @property
    def lag(self) -> int:
        """Transactions that are known here and not known to be in the bucket."""
        return max(0, self.txid - self.replicated_txid)


class Litestream:
    def __init__(
        self,
        machine: Machine,
        place: ObjectPlace,
        prefix: str,
        folder: Folder,
        *,
        program: Found | None = None,
        protect: Rules = rules.RULES,
    ) -> None:
        """`program` None: looked for at the start."""
        self._machine = machine
        self._place = place
        self._prefix = prefix
        self._folder = folder
        self._program = program
        self._rules = protect
        self._socket = ControlSocket(folder.path, SOCKET)
        self._turn = trio.Lock()  # a sync that hangs holds others up inside Litestream anyhow
        self._up = trio.Event()  # replaced when the child ends
        self._scope = trio.CancelScope()
        self._began = self._started = False
        self._ended = trio.Event()
        self._credentials: Credentials | None = None
        self._stale = trio.Event()  # other credentials are at hand; replaced with each child
        self._restarts = 0
        self._txid = self._replicated = 0
        self._trouble: Trouble | None = None
        self._since_s: float | None = None
        self._silent = False  # the last failure did not say why
        self._began_s = machine.now_s()
        self._success_s: float | None = None
        self._told: set[str] = set()
        self.child_pid: int | None = None

    @property
    def report(self) -> Report:
        trouble = self._trouble
        return Report(
            alive=self._up.is_set(),
            restarts=self._restarts,
            txid=self._txid,
            replicated_txid=self._replicated,
            trouble="" if trouble is None else trouble.why,
            needs_repair=trouble is not None and trouble.needs_repair,
            since_s=self._since_s,
            began_s=self._began_s,
            success_s=self._success_s,
            program="" if self._program is None else str(self._program.path),
            version="" if self._program is None else self._program.version,
        )

    # --- what is asked of it

    async def sync(self) -> None:
        """Everything committed before this call is in the bucket when it returns. Under SYNC_S and a little. Raises Unavailable."""
        until_s = self._machine.now_s() + SYNC_S
        async with self._turn:
            # A call that waited for another's turn has its own time: what that one met says nothing of this one.
            until_s = max(until_s, self._machine.now_s() + SYNC_S / 2)
            while True:
                try:
                    return await self._sync_once(until_s - self._machine.now_s())
                except Failed as err:
                    self._failed(err.trouble)
                    left_s = until_s - self._machine.now_s() - AGAIN_S
                    if err.trouble.needs_repair or left_s <= 0:
                        raise Unavailable(f"not in the bucket: {err.trouble.why}", code="replica_unavailable") from err
                await self._machine.sleep_until(self._machine.now_s() + AGAIN_S)

    async def _sync_once(self, within_s: float) -> None:
        up = self._up
        if self._scope.cancel_called:
            raise Failed(Trouble("Litestream has been ended", needs_repair=True))
        with trio.move_on_after(within_s) as scope:
            await up.wait()
        if scope.cancelled_caught:
            raise Failed(self._trouble or Trouble("Litestream is not running"))
        synced: Synced = await self._socket.sync(self._folder.database, max(within_s, AGAIN_S))
        self._txid, self._replicated = synced.txid, synced.replicated_txid
        if not self._rules.uploaded(synced.txid, synced.replicated_txid):
            why = f"Litestream says that transaction {synced.replicated_txid} is in the bucket, and {synced.txid} is the last one"
            raise Failed(Trouble(why))
        self._works()

    async def end(self) -> None:
        """No upload begins once this has returned. What must be uploaded is asked for before."""
        self._scope.cancel()
        if self._began:
            await self._ended.wait()

    # --- the loop

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Says started() once the child's socket answers. Raises Invalid, Unavailable for what keeps the first child from that."""
        self._began = True
        try:
            with self._scope:
                if self._program is None:
                    self._program = await self._machine.run_sync(find)
                await self._keep(self._program, task_status)
        finally:
            self._up = trio.Event()
            self._ended.set()
        if not self._started:
            raise Unavailable("Litestream was ended before it ran", code="replica_down")

    async def _keep(self, program: Found, task_status: trio.TaskStatus[None]) -> None:
        again_s = AGAIN_S
        while True:
            began_s = self._machine.now_s()
            try:
                why = await self._live(program, None if self._started else task_status)
            except LlmgwError as err:
                if not self._started:
                    raise
                why = err.message
            if why:
                self._failed(Trouble(f"Litestream does not run: {why}"))
            self._restarts += 1
            again_s = AGAIN_S if not why or self._machine.now_s() - began_s >= LIVED_S else again_s
            await self._machine.sleep_until(self._machine.now_s() + again_s)
            again_s = min(again_s * 2, AGAIN_S_MAX)

    async def _live(self, program: Found, task_status: trio.TaskStatus[None] | None) -> str:
        """One child from its start to its end; why it ended, "" when it was to. Raises LlmgwError when it does not begin to answer."""
        child = await self._start(program)
        ended: list[int] = []
        said = _Said()
        answers = False
        self.child_pid = child.pid
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._read_log, child, said)
                nursery.start_soon(_watch, child, said, ended, nursery.cancel_scope)
                with trio.move_on_after(START_S_MAX):
                    answers = await self._answers()
                if answers:
                    self._up.set()
                    if task_status is not None:
                        task_status.started()
                        self._started = True
                    log.info("the store is replicated", prefix=self._prefix, place=str(self._place), litestream=program.version)
                    nursery.start_soon(self._poke)
                    await self._stale.wait()
                nursery.cancel_scope.cancel()
        finally:
            self._up = trio.Event()
            self.child_pid = None
            await child.end(END_GRACE_S if answers else 0.0)
        if ended:
            why = how_ended(ended[0]) + (f": {said.last}" if said.last else "")
        else:
            why = "" if answers else f"it does not answer within {START_S_MAX:g} s of its start"
        if not answers:
            raise Unavailable(f"Litestream ({program.path}) does not start: {why}", code="replica_down")
        return why

    async def _start(self, program: Found) -> Child:
        folder = self._folder

        def prepare() -> Credentials:
            try:
                folder.socket.unlink(missing_ok=True)
                text = configuration(self._place, self._prefix, folder.database, folder.meta, SOCKET)
                self._machine.disk.write(folder.configuration, text)
            except OSError as err:
                raise unusable(err, "Litestream's configuration", folder.configuration) from err
            return self._place.read_credentials()

        self._credentials = await self._machine.run_sync(prepare)
        self._stale = trio.Event()
        argv: list[str | Path] = [program.path, "replicate", "-config", folder.configuration, "-no-expand-env"]
        return Child.start(argv, folder.path, environment(self._credentials))

    async def _answers(self) -> bool:
        while True:
            try:
                await self._socket.version()
            except Failed:
                await self._machine.sleep_until(self._machine.now_s() + START_LOOK_S)
            else:
                return True

    async def _poke(self) -> None:
        """Uploads what nobody waits for, as soon as that works again; and looks whether other credentials are at hand."""
        while True:
            await self._machine.sleep_until(self._machine.now_s() + POKE_S)
            try:
                async with self._turn:
                    self._txid = max(self._txid, await self._socket.txid(self._folder.database))
                if self._trouble is not None or self._txid > self._replicated:
                    await self.sync()
                else:  # nothing was written since
                    self._success_s = self._machine.now_s()
            except Unavailable as err:
                log.debug("not uploaded yet", why=err.message)
            if self._silent:
                await self._ask_store()
            if self._trouble is not None and self._trouble.of_credentials:
                await self._look_for_credentials()

    async def _ask_store(self) -> None:
        """Litestream repeats a request for minutes before it says why; one of our own, which is not repeated, tells."""
        store = PrefixStore(self._place)
        try:
            await self._machine.run_sync(lambda: store.has(self._prefix))
        except StoreFailed as err:
            found = err.failure
            self._failed(Trouble(f"of the object store: {found.why}", found.needs_repair, found.of_credentials))
        except Invalid as err:
            self._failed(Trouble(err.message, needs_repair=True, of_credentials=True))

    async def _look_for_credentials(self) -> None:
        try:
            found = await self._machine.run_sync(self._place.read_credentials)
        except Invalid as err:
            log.debug("no other credentials", why=err.message)
            return
        if found != self._credentials:
            self._stale.set()

    # --- telling

    async def _read_log(self, child: Child, said: _Said) -> None:
        async for line in child.lines():
            try:
                entry = json.loads(line)
            except ValueError:
                entry = {"msg": line}
            if not isinstance(entry, dict):
                entry = {"msg": line}
            self._tell_log(entry, said)
        said.done.set()

    def _tell_log(self, entry: dict[str, Any], said: _Said) -> None:
        message, error, level = str(entry.get("msg", "")), str(entry.get("error", "")), entry.get("level")
        if level is None or error:
            said.last = trouble(error or message).why
        if level not in _LEVELS:
            log.debug("litestream", said=message)
            return
        why = trouble(error).why if error else ""
        # It says the same each second for as long as the store is gone.
        tell = log.debug if message in self._told else log.warning
        self._told.add(message)
        tell("litestream", said=message, **({"why": why} if why else {}))

    def _failed(self, found: Trouble) -> None:
        now_s = self._machine.now_s()
        if self._trouble is None:
            self._since_s = now_s
        if self._trouble is None or (found.needs_repair and found.why != self._trouble.why):
            log.warning("what is written does not reach the replica", why=found.why, place=str(self._place))
        self._silent = found.silent
        if not found.silent or self._trouble is None:  # silence says less than what is known already
            self._trouble = found

    def _works(self) -> None:
        if self._trouble is not None and self._since_s is not None:
            log.info("what is written reaches the replica again", after_s=round(self._machine.now_s() - self._since_s, 1))
        self._trouble, self._since_s, self._silent = None, None, False
        self._success_s = self._machine.now_s()
        self._told.clear()


@attrs.define(eq=False)
class _Said:
    """The last word of failure in a child's log; `done` once the log is read to its end."""

    last: str = ""
    done: trio.Event = attrs.Factory(trio.Event)


async def _watch(child: Child, said: _Said, ended: list[int], scope: trio.CancelScope) -> None:
    ended.append(await child.wait())
    with trio.move_on_after(LAST_WORDS_S):
        await said.done.wait()
    scope.cancel()
