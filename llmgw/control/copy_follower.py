"""The copy of a replicated store on a standby: it asks the leader for what is new, and reads the replica while no leader tells.

Only rows that are durable come this way. What the copy shows may be old, and says how old; nobody leads from it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import structlog

from llmgw.control.leadership import Leadership
from llmgw.control.peers import PeerLink, Peers
from llmgw.domain.errors import LlmgwError
from llmgw.domain.ports import Machine
from llmgw.protocol.waiting import wait_woken
from llmgw.store.copies import CopiedStore, Position

ASK_AGAIN_S: Final = 1.0  # after a question that was not answered; one that was is asked again at once
RESTORE_S: Final = 30.0  # while no leader tells anything, what is published is read as often (reference D.5)
log = structlog.get_logger("llmgw.replication")


class CopyFollower:
    """`told()` is called whenever there is something new to read."""

    def __init__(
        self, machine: Machine, leadership: Leadership, peers: Peers, link: PeerLink, store: CopiedStore, told: Callable[[], None]
    ) -> None:
        self._machine = machine
        self._leadership = leadership
        self._peers = peers
        self._link = link
        self._store = store
        self._told = told
        self._trouble = ""

    async def run(self) -> None:
        """Until cancelled. A leader's own copy follows what it writes."""
        heard_s = self._machine.now_s()
        while True:
            changed = self._leadership.changed
            if self._leadership.may_write:
                await changed.wait()
                heard_s = self._machine.now_s()
                continue
            if await self._ask():
                heard_s = self._machine.now_s()
                continue
            if self._machine.now_s() - heard_s >= RESTORE_S:
                await self._restore()
                heard_s = self._machine.now_s()
            await wait_woken(self._machine, changed, self._machine.now_s() + ASK_AGAIN_S)

    async def _ask(self) -> bool:
        """Did the leader answer?"""
        address = self._peers.leader_address()
        record = self._leadership.record
        if not address or record is None:
            return False
        position = self._store.position
        try:
            # Of an epoch before, the whole is wanted: what its leader wrote last may have died with it.
            news = await self._link.news(address, position if position.epoch == record.epoch else Position())
            if news.position.epoch < record.epoch:
                return False  # it has been succeeded and does not know it yet
            fresh = await self._store.follow(news)
        except LlmgwError as err:
            if err.code != self._trouble:
                log.info("the leader's changes do not come; what was read last is shown", address=address, why=err.message)
            self._trouble = err.code
            if err.code == "copy_diverged":
                await self._restore()
            return False
        if self._trouble:
            self._trouble = ""
            log.info("the leader's changes come again", address=address)
        if fresh:
            self._told()
        return True

    async def _restore(self) -> None:
        record = self._leadership.record
        if record is None or not record.base:
            return
        try:
            await self._store.restore_copy(record.base)
        except LlmgwError as err:
            log.warning("what the replica has published cannot be read; what was read last is shown", base=record.base, why=err.message)
        else:
            self._told()
