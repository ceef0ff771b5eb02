"""An agent's or a router's certificate, renewed in time by whichever control plane answers.

The key stays; the file of the certificate is replaced whole, and what dials takes it from there at its next dial.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import structlog

from llmgw.domain.errors import LlmgwError
from llmgw.domain.identity import MachineRole
from llmgw.domain.ports import Machine
from llmgw.identity import ca, certificates
from llmgw.wiring.identity_files import Held, load_held, save_certificate
from llmgw.wiring.joining import RENEW_PATH, post

LOOK_S: Final = 3_600.0  # a certificate is renewed a month before its end: an hour is soon enough
log = structlog.get_logger("llmgw.identity")


async def keep_renewed(machine: Machine, folder: Path, role: MachineRole, control_planes: Callable[[], Sequence[str]], others: str) -> None:
    """Until cancelled. `control_planes` tells those that are known now; it may block.

    What fails is logged once for each reason, and tried again; a machine that has not joined has nothing to renew.
    """
    told = ""
    while True:
        try:
            if await machine.run_sync(lambda: renew_if_due(machine, folder, role, control_planes(), others)):
                log.info("this machine's certificate was renewed", role=role.value)
            told = ""
        except (LlmgwError, OSError, ValueError) as err:  # an agent does not end for it: a month is left
            if str(err) != told:
                log.warning("this machine's certificate could not be renewed; tried again later", why=str(err))
            told = str(err)
        await machine.sleep_until(machine.now_s() + LOOK_S)


def renew_if_due(machine: Machine, folder: Path, role: MachineRole, control_planes: Sequence[str], others: str) -> bool:
    """True where a new certificate was put in place. Blocking. Raises LlmgwError."""
    held = load_held(machine, folder, role)
    if held is None or machine.wall_s() < held.leaf.renew_at_wall_s:
        return False
    renew(machine, held, control_planes, others)
    return True


def renew(machine: Machine, held: Held, control_planes: Sequence[str], others: str = "") -> None:
    """Asks the control planes one after the other. Blocking. Raises what the last one answered."""
    body = {"request": ca.make_request(held.key_pem), "addresses": sorted(held.leaf.addresses)}
    answer = post([url for url in control_planes if url.startswith("https://")], RENEW_PATH, body, held.trust(others))
    pem = str(answer.get("certificate"))
    certificates.check_leaf(
        certificates.read_leaf(pem.encode()), held.key_pem, ca.read_ca(held.ca_pem.encode()), machine.wall_s(), held.identity.role
    )
    save_certificate(machine, held, pem)
