"""Tries a machine's file together with a settings document in a process of its own, before this process restarts on them.

What a start would stumble over is found there: a fault of either, keys that do not fit together, a certificate or a token file
that cannot be read. The process gets the two texts as JSON on its standard input; exit 0, or the fault's code with its words on
standard output.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import structlog
import trio

from llmgw.admin.serve import bind_admin
from llmgw.agent import own_modules
from llmgw.domain.errors import EXIT_OK, Invalid, LlmgwError
from llmgw.domain.files import words
from llmgw.lease.timings import LeaseTimings
from llmgw.replication import programs
from llmgw.router.listener import public_tls
from llmgw.settings.address import TcpAddress, parse_listen
from llmgw.settings.document import parse_document
from llmgw.settings.layers import effective
from llmgw.settings.load import Role, load_bytes
from llmgw.settings.object_place import ObjectPlace
from llmgw.settings.secrets import resolve

DRY_LOAD_S: Final = 30.0  # chosen: an interpreter starts in well under a second; a machine that swaps takes a few
WHY_MAX: Final = 2000
log = structlog.get_logger("llmgw.settings")


async def dry_load(file: bytes, document: str, source: str = "", running: Sequence[str] = (), limit_s: float = DRY_LOAD_S) -> str:
    """Why the two do not load on this machine; "" when they do. Also what keeps it from being tried is a reason not to restart.

    `running` are the addresses that this process listens on by itself: those are taken, and will be free. The process has ended
    when this returns; one that is not done after `limit_s` is ended.
    """
    asked = json.dumps(
        {"file": file.decode("utf-8", "surrogateescape"), "document": document, "source": source, "running": list(running)}
    ).encode()
    try:
        with trio.fail_after(limit_s):
            command = own_modules.command_line("llmgw.wiring.dry_load")
            done = await trio.run_process(command, stdin=asked, capture_stdout=True, capture_stderr=True, check=False)
    except trio.TooSlowError:
        return f"trying it took longer than {limit_s:g} s on this machine"
    except (OSError, subprocess.SubprocessError) as err:
        return f"it could not be tried on this machine: {words(err)}"
    if done.returncode == EXIT_OK:
        return ""
    said = done.stdout.decode("utf-8", "replace").strip()
    if not said:
        log.error("a settings version could not be tried", exit=done.returncode, stderr=done.stderr.decode("utf-8", "replace")[-WHY_MAX:])
    return said[:WHY_MAX] or f"trying it on this machine ended with {done.returncode}; the log says more"


def main() -> int:
    """What the process of its own does."""
    asked = json.loads(sys.stdin.buffer.read())
    try:
        _load(asked["file"].encode("utf-8", "surrogateescape"), asked["document"], asked["source"], asked["running"])
    except LlmgwError as err:
        print(str(err))
        return err.exit_code
    return EXIT_OK


def _load(data: bytes, document: str, source: str, running: Sequence[str]) -> None:
    """Everything that a start reads, without its effects. Raises LlmgwError."""
    file = load_bytes(data, source=source or "the file", role=Role.SERVER)
    settings = effective(file, parse_document(document, "the settings") if document else None)
    lease = settings.lease
    LeaseTimings.of(lease.ttl_s, lease.renew_s, lease.poll_s)
    if settings.store is not None and settings.store.replica:
        ObjectPlace.of(settings.store).read_credentials()
        programs.find()
    if settings.metrics.token:
        resolve(settings.metrics.token, "metrics.token")
    if settings.tls.certificate:
        public_tls(settings.tls.certificate, settings.tls.key)
    if settings.router.embedded and settings.router.tls_certificate:
        public_tls(settings.router.tls_certificate, settings.router.tls_key)
    folder = Path(settings.server.data_dir)
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise Invalid(f"server.data_dir: {folder} is no folder that this user may write to", param="server.data_dir")
    wanted = {"server.admin_listen": settings.server.admin_listen}
    if settings.router.embedded:
        wanted["router.listen"] = settings.router.listen
    for key, listen in wanted.items():
        if listen not in running and isinstance(parse_listen(listen), TcpAddress):
            try:
                for one in bind_admin(listen):
                    one.close()
            except LlmgwError as err:
                raise Invalid(f"{key}: {err.message}", param=key) from err


if __name__ == "__main__":
    sys.exit(main())
