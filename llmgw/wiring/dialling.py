"""How agents and routers reach their control planes: over WebSocket, with the certificate they joined by, else the token of a file."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import attrs

from llmgw.domain.errors import Denied, Invalid, Unavailable
from llmgw.domain.files import unusable, words
from llmgw.domain.identity import MachineRole
from llmgw.domain.ports import Machine
from llmgw.identity.trust import Trust
from llmgw.protocol.channel import Channel
from llmgw.protocol.websocket import ROUTER_SESSION_PATH, SESSION_PATH, dial
from llmgw.settings.address import is_loopback
from llmgw.settings.schema import Settings
from llmgw.wiring.identity_files import CA_CERTIFICATE, CA_FOLDER, IDENTITY_FOLDER, load_held
from llmgw.wiring.tokens import parse_token

AGENT_TOKEN_FILE: Final = "agent-token"  # as `wiring.server` writes it
WHOSE: Final = "the agents' token"
COPY_IT: Final = "copy the control plane's agent-token there"
PATHS: Final = {MachineRole.AGENT: SESSION_PATH, MachineRole.ROUTER: ROUTER_SESSION_PATH}
Dial = Callable[[str], AbstractAsyncContextManager[Channel]]


def default_token_file(settings: Settings) -> Path:
    """Where this machine's control plane keeps the token for agents: beside a store's file that it shares, else in its data directory."""
    folder = Path(settings.server.data_dir).expanduser()
    if settings.store is not None and settings.store.path and not settings.store.replica:
        folder = (folder / settings.store.path).parent
    return folder / AGENT_TOKEN_FILE


def identity_folder(data_dir: Path) -> Path:
    """Where what a machine joined by is kept."""
    return data_dir / IDENTITY_FOLDER


def dialler(machine: Machine, token_file: Path, ca: str = "", role: MachineRole = MachineRole.AGENT, joined: Path | None = None) -> Dial:
    """Opens sessions of that role. What it shows is read at each dial: it may have been renewed, or replaced.

    `joined` is the folder of what this machine joined by; where nothing is there, the token in `token_file` is shown. `ca` is a file
    of further certificates that control planes are checked against. Raises `Invalid` when that cannot be used.
    """
    if ca:
        trusting(ca)

    @asynccontextmanager
    async def open_session(url: str) -> AsyncIterator[Channel]:
        shown = await machine.run_sync(lambda: _shown(machine, url, token_file, ca, role, joined))
        async with dial(url, shown.token, shown.trust, PATHS[role]) as channel:
            yield channel

    return open_session


@attrs.frozen
class _Shown:
    token: str = attrs.field(repr=False)
    trust: Trust


def _shown(machine: Machine, url: str, token_file: Path, ca: str, role: MachineRole, joined: Path | None) -> _Shown:
    """Blocking. Raises `Invalid`, `Denied` and `Unavailable`, which name the file and what helps."""
    where = urlsplit(url)
    held = None if joined is None or where.scheme != "https" else load_held(machine, joined, role)
    if held is not None:
        return _Shown("", held.trust(ca))
    if where.scheme != "https" and joined is not None and not is_loopback(where.hostname or "") and load_held(machine, joined, role):
        raise Denied(f"{url} is dialled without TLS, and this machine has joined by certificate: https:// is asked for", code="tls_needed")
    return _Shown(read_token(machine, token_file), Trust(_own_ca(machine, token_file), ca, system=not ca))


def _own_ca(machine: Machine, token_file: Path) -> str:
    """The CA of the control plane of this machine, whose token is shown: it stands beside it. "" where there is none."""
    try:
        data = machine.disk.read(token_file.parent / CA_FOLDER / CA_CERTIFICATE)
    except OSError:  # whoever may not read it checks by what `tls.ca` and the system say
        return ""
    return "" if data is None else data.decode("ascii", "replace")


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
