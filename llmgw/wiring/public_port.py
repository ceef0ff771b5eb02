"""Keeps the public port on a certificate that is renewed in its files while it serves: by us, or by whatever an operator has for that."""

from __future__ import annotations

import os
import ssl
from typing import Final

import structlog

from llmgw.domain.errors import LlmgwError
from llmgw.domain.ports import Machine
from llmgw.router.listener import public_tls

FRESH_LOOK_S: Final = 600.0  # a certificate is renewed days before its end
log = structlog.get_logger("llmgw.router")


async def keep_fresh(machine: Machine, context: ssl.SSLContext, certificate: str, key: str) -> None:
    """Until cancelled: shows a certificate that was renewed in its file. Connections that are open keep theirs."""
    seen = _state_of(certificate)
    while True:
        await machine.sleep_until(machine.now_s() + FRESH_LOOK_S)
        if (now := _state_of(certificate)) == seen:
            continue
        try:
            public_tls(certificate, key)  # tried apart: a pair that does not fit yet must not spoil what is shown
            context.load_cert_chain(certificate, key)
        except (LlmgwError, OSError) as err:
            log.warning("the renewed certificate cannot be used; the one before it is shown on", file=certificate, why=str(err))
        else:
            seen = now
            log.info("the renewed certificate is shown", file=certificate)


def _state_of(file: str) -> tuple[int, int]:
    try:
        found = os.stat(file)
    except OSError:
        return (0, 0)
    return (found.st_ino, found.st_mtime_ns)
