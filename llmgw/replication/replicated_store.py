"""The store of a cluster whose control planes are on different machines: one working file of the leader's, replicated as it is
written, and on every control plane a copy of what is durable.

Reads are of the copy, on the leader too: nothing is planned from, applied or shown before it is durable (control.md 3). Only the
leader of a term writes. What a standby reads carries its age.

    store = await ReplicatedStore.begin(machine, replica, data_dir, place, base)
    await nursery.start(store.run)
    await store.lead(claim)      # a leader gets ready; `await store.end_lead(fenced)` when its term is over
    await store.follow(await leader.news(store.position))      # a standby, every second
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Concatenate, Final, ParamSpec, Protocol, TypeVar

import apsw
import structlog
import trio

from llmgw.domain.errors import Invalid, LlmgwError, Unavailable
from llmgw.domain.ports import Machine
from llmgw.protocol.waiting import wait_woken
from llmgw.replication.durable import Durability, Sync
from llmgw.replication.feed import Feed
from llmgw.replication.orders import carry_out
from llmgw.replication.rules import RULES, Rules, Step
from llmgw.replication.term import TermStore
from llmgw.store import held, meta
from llmgw.store.connection import Claim, FileStore, Use
from llmgw.store.copies import NAME_BYTES, RESTORED, SUFFIX, CopiedStore, Copy, News, Position, ReplicaReport, write_whole
from llmgw.store.held import Held
from llmgw.store.settings import newest_version

T = TypeVar("T")
P = ParamSpec("P")

LOST_SHOWN: Final = 5  # names in one line
COPIES: Final = "copies"  # in the data directory
FINAL_S_MAX: Final = 2.0  # for what a leader that leaves has not yet seen to be durable
CATCH_UP_S: Final = 3.0  # chosen: two questions of a standby to its leader, each answered within NEWS_S_MAX, and the way there and back
NEWS_S_MAX: Final = 1.0  # a standby's question is answered by then, with or without news
log = structlog.get_logger("llmgw.replication")


def has_copy(data_dir: Path) -> bool:
    """Has an earlier process left a copy here?"""
    return any((data_dir / COPIES).glob(f"*{SUFFIX}"))


class Replica(Protocol):
    """The replica as a leader uses it: Litestream and the bucket, or what stands in for them."""

    def prefix(self, epoch: int, tenure: str) -> str:
        """The name of this term's own place in the replica; never used twice."""
        ...

    async def working_file(self, epoch: int, tenure: str) -> Path:
        """Where this term's working file is to be, in a fresh folder of its own. Raises Unavailable."""
        ...

    async def restore(self, base: str, path: Path, progress: Callable[[], None]) -> None:
        """What stands under the published `base` as a new file at `path`, checked; with "" the seed, or no file.

        `progress()` is called for as long as it comes on. Raises Invalid, Unavailable.
        """
        ...

    async def keep(self, path: Path, prefix: str, task_status: trio.TaskStatus[Sync]) -> None:
        """Replicates the file until cancelled. Says started(sync) when it does. Raises Invalid, Unavailable."""
        ...

    async def clean_up(self, base: str, confirmed: Callable[[], bool]) -> None:
        """Removes prefixes that nobody needs any more."""
        ...

    @property
    def report(self) -> ReplicaReport | None:
        """How replicating fares; None where nothing was led yet."""
        ...


class ReplicatedStore(CopiedStore):
    """Built by `begin`; `run` is to run for as long as it is used."""

    def __init__(self, machine: Machine, replica: Replica, copy: Copy, place: str, protect: Rules = RULES) -> None:
        super().__init__()
        self._protect = protect
        self._machine = machine
        self._replica = replica
        self._copy = copy
        self._place = place
        self._feed = Feed()
        self._nursery: trio.Nursery | None = None
        self._term: TermStore | None = None
        self._keeping: _Keeping | None = None
        self._told_of = 0  # a leader's answers to this standby
        self._answered = trio.Event()  # replaced at each
        self._closed = False

    @classmethod
    async def begin(cls, machine: Machine, replica: Replica, data_dir: Path, place: str, base: str) -> ReplicatedStore:
        """Reads what is published under `base`: "" where nobody has led yet. Raises Invalid, Unavailable."""
        asked_s = machine.now_s()
        fill = None if not base else await _restored(machine, replica, base, data_dir / COPIES)
        copy = await Copy.open(machine, data_dir / COPIES, fill)
        if base:  # of a copy that an earlier process left nobody knows how old it is
            copy.as_of_s = asked_s
        return cls(machine, replica, copy, place)

    # --- what every store offers

    @property
    def mode(self) -> str:
        return "replicated"

    @property
    def durability(self) -> str:
        return "replicated"

    @property
    def place(self) -> str:
        return self._place

    @property
    def schema(self) -> int:
        return self._copy.schema

    @property
    def may_write(self) -> bool:
        return self._copy.may_write

    @property
    def trouble(self) -> str:
        term = self._term
        return "" if term is None else term.trouble or term.work.trouble

    async def read(self, unit: Callable[Concatenate[apsw.Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._copy.read(unit, *args, **kwargs)

    async def read_newest(self, unit: Callable[Concatenate[apsw.Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        term = self._term
        if term is None:
            return await self.read(unit, *args, **kwargs)
        result = await term.work.read(unit, *args, **kwargs)
        if term.pending:
            await term.settle()
        return result

    async def _write(self, unit: Callable[[apsw.Connection], T], *, touches: bool = False) -> T:
        term = self._term
        if term is None:
            raise Unavailable("this control plane does not lead: its copy of the store takes no writes", code="not_leader")
        return await term.write(unit, touches=touches)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            if self._keeping is not None:
                self._keeping.close()
            self._copy.close()

    # --- a leader's

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled; holds what a term needs."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            await trio.sleep_forever()

    async def lead(self, claim: Claim) -> None:
        """The working file of this term: restored from the published base, replicated under a prefix of its own, published.

        Raises StaleEpoch for an epoch met that is not below ours, Invalid and Unavailable in words for what a person repairs.
        """
        assert self._nursery is not None, "run() runs"
        await self.end_lead(fenced=True)  # of an epoch before, of the same holder
        nursery, keeping = self._nursery, _Keeping()
        self._keeping = keeping
        path = await self._replica.working_file(claim.epoch, claim.tenure)
        prefix = self._replica.prefix(claim.epoch, claim.tenure)

        async def restore() -> None:
            await self._replica.restore(claim.base, path, claim.progress)
            work = keeping.work = await FileStore.open(path, self._machine.run_sync, Use.WORKING)
            await _check(work, claim, await held.load(self), self._place)
            await work.claim_epoch(claim.epoch, claim.owner)
            if (await meta.load(work)).cluster_id is None:
                await meta.ensure_cluster_id(work, claim.epoch, claim.cluster_id)

        async def replicate() -> None:
            keeping.sync = await nursery.start(keeping.replicate, self._replica, path, prefix)

        async def upload() -> None:
            assert keeping.work is not None, "restored before"
            durability = Durability(claim.epoch, keeping.sync, claim.prove)
            await durability.acknowledge()
            keeping.term = TermStore(
                self._machine,
                claim.epoch,
                keeping.work,
                self._copy,
                self._feed,
                durability.acknowledge,
                told=self._told,
                new_version=partial(self._tell_version, keeping),
            )
            await keeping.term.begin()

        async def publish() -> None:
            # From here on the next leader begins with what this term has; before, with what it began with itself.
            keeping.publish = partial(claim.publish, prefix)
            await keeping.publish(await newest_version(self))

        steps = {Step.RESTORE: restore, Step.REPLICATE: replicate, Step.UPLOAD: upload, Step.PUBLISH: publish}
        await carry_out(self._protect.take_over, steps, done={Step.ACQUIRE})
        assert keeping.term is not None, "uploaded before"
        nursery.start_soon(keeping.settle, keeping.term)
        self._term = keeping.term
        log.info("this term's store is published", epoch=claim.epoch, prefix=prefix, base=claim.base or "none")

    async def end_lead(self, fenced: bool) -> None:
        """The term is over: nothing is written any more, and nothing replicated. `fenced`: at once."""
        keeping, term = self._keeping, self._term
        if keeping is None:
            return

        async def refuse() -> None:
            self._keeping = self._term = None
            if term is not None:
                self._copy.as_of_s = self._machine.now_s()

        async def upload() -> None:
            if fenced or term is None or not term.pending:
                return
            with trio.move_on_after(FINAL_S_MAX):
                try:
                    await term.settle()
                except LlmgwError as err:
                    log.warning("the last writes of this term are not known to be durable", pending=term.pending, why=err.message)

        async def end_child() -> None:
            with trio.CancelScope(shield=True):  # a child that goes on would keep the folder
                await keeping.end()

        async def release() -> None:
            """The lease's keeper does so, once this has returned."""

        steps = {Step.REFUSE: refuse, Step.UPLOAD: upload, Step.END_CHILD: end_child, Step.RELEASE: release}
        await carry_out(self._protect.hand_over, steps)

    async def clean_up(self, base: str, confirmed: Callable[[], bool]) -> None:
        """For a leader, once in a while."""
        await self._replica.clean_up(base, confirmed)

    @property
    def position(self) -> Position:
        return self._copy.position

    @property
    def pending(self) -> int:
        """Writes of this term that are not known to be durable."""
        return 0 if self._term is None else self._term.pending

    @property
    def replica_report(self) -> ReplicaReport | None:
        return self._replica.report

    def age_s(self) -> float | None:
        """How old what is read here may be; 0 on a leader, None for a copy that an earlier process left."""
        if self._term is not None:
            return 0.0
        as_of_s = self._copy.as_of_s
        return None if as_of_s is None else self._machine.now_s() - as_of_s

    async def news(self, position: Position) -> News:
        """For a standby that has `position`; waits up to NEWS_S_MAX for something new. Raises Unavailable where nobody leads here."""
        until_s = self._machine.now_s() + NEWS_S_MAX
        while self._term is not None:
            changed = self._feed.changed
            changes = self._feed.after(position)
            if changes is None:
                async with self._copy.turn:
                    at, whole = await self._copy.dump()
                return News(at, (), whole)
            if changes or not await wait_woken(self._machine, changed, until_s):
                return News(self._feed.position, changes)
        raise Unavailable("this control plane does not lead", code="not_leader")

    # --- a standby's

    async def follow(self, news: News) -> bool:
        """What a leader told. Returns whether anything is new. Raises Diverged, Invalid, Unavailable."""
        async with self._copy.turn:
            if self._keeping is not None:
                return False  # this one takes over: its own file is newer
            if news.whole is not None:
                await self._copy.replace(write_whole(news.whole), news.position)
            elif news.changes:
                await self._copy.apply(news.changes, news.position)
            self._copy.as_of_s = self._machine.now_s()
        self._told_of += 1
        self._answered.set()
        self._answered = trio.Event()
        return news.whole is not None or bool(news.changes)

    async def catch_up(self) -> None:
        # An answer that is on its way now may have been given before the call; the one after it was not.
        wanted, until_s = self._told_of + 2, self._machine.now_s() + CATCH_UP_S
        while self._term is None and self._told_of < wanted and await wait_woken(self._machine, self._answered, until_s):
            pass

    async def restore_copy(self, base: str) -> None:
        """While nobody leads: what is published. Raises Invalid, Unavailable."""
        asked_s = self._machine.now_s()
        fill = await _restored(self._machine, self._replica, base, self._copy.folder)
        async with self._copy.turn:
            if self._keeping is None:
                await self._copy.replace(fill, Position())
                self._copy.as_of_s = asked_s

    def _tell_version(self, keeping: _Keeping) -> None:
        """The settings have a new version: the lease is to say so, that the next leader can tell whether it was given it."""
        assert self._nursery is not None, "run() runs"
        self._nursery.start_soon(self._publish_version, keeping)

    async def _publish_version(self, keeping: _Keeping) -> None:
        try:
            await keeping.publish(await newest_version(self))
        except LlmgwError as err:  # told of a version that is there, the next leader is none the worse for the one before
            log.debug("the lease does not name the newest version of the settings", why=err.message)

    def _told(self, trouble: str) -> None:
        self._on_trouble(trouble)


async def _nothing_to_sync() -> None:
    return None


async def _nothing_to_publish(settings_version: int) -> None:
    return None


class _Keeping:
    """What a term has running, for its end."""

    def __init__(self) -> None:
        self.work: FileStore | None = None
        self.publish: Callable[[int], Awaitable[None]] = _nothing_to_publish
        self._scopes: list[trio.CancelScope] = []
        self._running = 0
        self._over = False
        self._ended = trio.Event()
        self.sync: Sync = _nothing_to_sync
        self.term: TermStore | None = None

    async def replicate(self, replica: Replica, path: Path, prefix: str, task_status: trio.TaskStatus[Sync]) -> None:
        with self._counted():
            await replica.keep(path, prefix, task_status)

    async def settle(self, term: TermStore) -> None:
        with self._counted():
            await term.run()

    async def end(self) -> None:
        """Returns when nothing of it runs any more and its file is closed."""
        self._over = True
        for scope in self._scopes:
            scope.cancel()
        while self._running:
            await self._ended.wait()
        self.close()

    def close(self) -> None:
        if self.work is not None:
            self.work.close()

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        self._running += 1
        scope = trio.CancelScope()
        self._scopes.append(scope)
        if self._over:  # begins only now
            scope.cancel()
        try:
            with scope:
                yield
        finally:
            self._running -= 1
            self._ended.set()
            self._ended = trio.Event()


async def _restored(machine: Machine, replica: Replica, base: str, folder: Path) -> Callable[[Path], None]:
    """For a copy: what is published under `base`."""
    await machine.run_sync(lambda: folder.mkdir(mode=0o700, parents=True, exist_ok=True))
    path = folder / f"{machine.fresh_hex(NAME_BYTES)}{RESTORED}"
    try:
        await replica.restore(base, path, lambda: None)
    except BaseException:
        path.unlink(missing_ok=True)
        raise

    def take(into: Path) -> None:
        path.rename(into)

    return take


async def _check(work: FileStore, claim: Claim, read: Held, place: str) -> None:
    """Is it what the lease speaks of, and where it speaks of nothing, no less than what was read here? Raises Invalid, Unavailable."""
    found = (await meta.load(work)).cluster_id
    if found is not None and found != claim.cluster_id:
        raise Invalid(
            f"the store is of cluster {found}, and the lease of {claim.cluster_id}: they do not belong together", code="foreign_cluster"
        )
    version = await newest_version(work)
    # To begin with less would take models and keys from the cluster. A file that [store] path still names may have as many versions
    # of the settings, and be of before the rest.
    if not claim.base and (lost := held.missing(read, await held.load(work))):
        more = f" and {len(lost) - LOST_SHOWN} more" if len(lost) > LOST_SHOWN else ""
        raise Invalid(
            f"the lease of {place} names no store to begin with, and this control plane has read one with {', '.join(lost[:LOST_SHOWN])}"
            f"{more}, which would be lost: the lease's record was removed, or [store] replica names another place than it did",
            code="base_gone",
        )
    if version < claim.settings_version:
        raise Unavailable(
            f"{claim.base} holds version {version} of the settings, and the last leader has kept version {claim.settings_version} there:"
            " the object store does not show what it has acknowledged",
            code="base_older",
        )
