"""`/store/copy`: the store as one file, of one instant, for a backup; from any control plane while it runs."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import IO, Final

import trio

from llmgw.admin.calls import Call, Reply, Route
from llmgw.control.controller import Controller
from llmgw.domain.errors import Overloaded
from llmgw.domain.files import unusable
from llmgw.store.admin_tokens import Role
from llmgw.store.copies import CopiedStore, copy_unit

PIECE: Final = 256 * 1024
NAME_BYTES: Final = 8
CONTENT_TYPE: Final = "application/vnd.sqlite3"
SHA256: Final = "X-Content-SHA256"  # of the whole answer, so that one that was cut or changed on its way is no backup
MODE: Final = "X-Store-Mode"
AGE: Final = "X-Store-Age-S"  # how old the rows are; left out where that is not known
AGAIN_S: Final = 5.0


def routes(controller: Controller) -> tuple[Route, ...]:
    turn = trio.Lock()  # a copy takes as much of the disk as the store; of several at once none might fit

    async def copy(call: Call) -> Reply:
        if turn.locked():
            raise Overloaded("another copy of the store is being made", retry_after_s=AGAIN_S)
        async with turn:
            store = controller.store
            if isinstance(store, CopiedStore):
                await store.catch_up()
            age_s = store.age_s()
            path = controller.data_dir / f"copy-{controller.machine.fresh_hex(NAME_BYTES)}.tmp"
            await store.read(copy_unit, path)
            file, size, sha256 = await controller.machine.run_sync(lambda: _open_nameless(path))
        headers = {
            "Content-Length": str(size),
            SHA256: sha256,
            MODE: "none" if controller.file else store.mode,
            **({} if age_s is None else {AGE: f"{age_s:.1f}"}),
        }

        async def pieces() -> AsyncGenerator[bytes, None]:
            try:
                while piece := await controller.machine.run_sync(lambda: file.read(PIECE)):
                    yield piece
            finally:
                file.close()

        return Reply(stream=pieces, headers=headers, content_type=CONTENT_TYPE)

    return (
        Route("GET", "/api/v1/store/copy", copy, "The store of this control plane as one SQLite file, for a backup", Role.ADMIN,
              remembered=False, local=True, late=True),
    )  # fmt: skip


def _open_nameless(path: Path) -> tuple[IO[bytes], int, str]:
    """The file, which is gone with its last reader; its size and its SHA-256. Raises Invalid, Unavailable."""
    try:
        file = path.open("rb")
        try:
            path.unlink()
            digest, size = hashlib.sha256(), 0
            while piece := file.read(PIECE):
                digest.update(piece)
                size += len(piece)
            file.seek(0)
        except BaseException:  # re-raised: only the descriptor is let go of
            file.close()
            raise
    except OSError as err:
        raise unusable(err, "the copy of the store", path) from err
    return file, size, digest.hexdigest()
