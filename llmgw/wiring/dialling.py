"""How agents and routers reach their control planes: over WebSocket, with the token of a file."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Final

from llmgw.domain.errors import Invalid, Unavailable
from llmgw.domain.files import unusable, words
from llmgw.domain.ports import Machine
from llmgw.protocol.channel import Channel
from llmgw.protocol.websocket import SESSION_PATH, dial
from llmgw.settings.schema import Settings
from llmgw.wiring.tokens import parse_token

AGENT_TOKEN_FILE: Final = "agent-token"  # as `wiring.server` writes it
WHOSE: Final = "the agents' token"
COPY_IT: Final = "copy the control plane's agent-token there"
Dial = Callable[[str], AbstractAsyncContextManager[Channel]]


def default_token_file(settings: Settings) -> Path:
    """Where this machine's control plane keeps the token for agents: beside a store's file that it shares, else in its data directory."""
    folder = Path(settings.server.data_dir).expanduser()
    if settings.store is not None and settings.store.path and not settings.store.replica:
        folder = (folder / settings.store.path).parent
    return folder / AGENT_TOKEN_FILE


def dialler(machine: Machine, token_file: Path, ca: str = "", path: str = SESSION_PATH) -> Dial:
    """Opens sessions at `path` with the token in that file, which is read at each dial: it may have been replaced.

    Raises `Invalid` when the file of `ca` cannot be used.
    """
    tls = trusting(ca) if ca else None

    @asynccontextmanager
    async def open_session(url: str) -> AsyncIterator[Channel]:
        token = await machine.run_sync(lambda: read_token(machine, token_file))
        async with dial(url, token, tls, path) as channel:
            yield channel

    return open_session


def trusting(ca: str) -> ssl.SSLContext:
    """What verifies peers by the certificates in the file `ca`. Raises Invalid."""
    try:
        return ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as err:
        raise Invalid(f"tls.ca: {ca} cannot be used: {words(err)}", param="tls.ca") from err


def read_token(machine: Machine, path: Path) -> str:
    """The agents' token. Blocking. Raises `Invalid` and `Unavailable`, which name the file and what helps."""
    try:
        data = machine.disk.read(path)
    except OSError as err:
        raise unusable(err, f"the file of {WHOSE}", path, f"move it away and {COPY_IT}") from err
    if data is None:
        raise Unavailable(f"{path}, the file of {WHOSE}, is missing: {COPY_IT}", code="token_missing")
    return parse_token(data, path, WHOSE, COPY_IT)
