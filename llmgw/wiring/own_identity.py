"""A control plane's own certificate, by the CA whose key it has: made at its start, renewed while it runs, shown by its ports."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import structlog

from llmgw.control.identities import Identities
from llmgw.domain.errors import Conflict, Invalid, LlmgwError
from llmgw.domain.identity import MachineIdentity
from llmgw.domain.ports import Machine
from llmgw.identity.ca import Authority, address_fault
from llmgw.identity.trust import Trust
from llmgw.settings.address import TcpAddress, parse_listen
from llmgw.settings.schema import Settings
from llmgw.wiring.identity_files import as_issued, issue_own

LOOK_S: Final = 3_600.0  # a certificate is renewed a month before its end: an hour is soon enough
EVERYWHERE: Final = frozenset({"0.0.0.0", "::"})
HERE: Final = ("localhost", "127.0.0.1", "::1")
log = structlog.get_logger("llmgw.identity")


class OwnIdentity:
    """Built by `make`, which does the first step. `trust` is what this control plane believes and shows, and changes at renewal."""

    def __init__(self, machine: Machine, settings: Settings, folder: Path, ca: Authority, identity: MachineIdentity) -> None:
        self._machine = machine
        self._folder = folder
        self._ca = ca
        self._identity = identity
        self._addresses = own_addresses(settings)
        self._others = settings.tls.ca
        self._system = bool(settings.tls.certificate)  # the other control planes may have certificates of their own as well
        self._contexts: list[ssl.SSLContext] = []
        self.trust = Trust()
        self.renew_at_wall_s = 0.0

    async def make(self, identities: Identities, *, anew: bool = False) -> None:
        """A certificate that fits, in all contexts that show it. Raises Invalid, Unavailable."""
        held, made = await self._machine.run_sync(
            lambda: issue_own(self._machine, self._folder, self._ca, self._identity, self._addresses, anew=anew)
        )
        self.renew_at_wall_s = held.leaf.renew_at_wall_s
        self.trust = Trust(held.ca_pem, self._others, self._system, held.certificate_file, held.key_file)
        for context in self._contexts:
            self.trust.present_in(context)
        identities.own(made or as_issued(held), self._addresses)

    def admin_context(self) -> ssl.SSLContext:
        """For the admin port. Raises Invalid."""
        return self._kept(self.trust.server())

    def public_context(self) -> ssl.SSLContext:
        """For /v1, whose clients are nobody's machines. Raises Invalid."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        self.trust.present_in(context)
        return self._kept(context)

    def _kept(self, context: ssl.SSLContext) -> ssl.SSLContext:
        self._contexts.append(context)
        return context

    async def run(self, identities: Identities) -> None:
        """Until cancelled: renews in time."""
        while True:
            await self._machine.sleep_until(self._machine.now_s() + LOOK_S)
            await self.renew_if_due(identities)

    async def renew_if_due(self, identities: Identities) -> bool:
        """True where a new certificate was made. What fails is logged, and tried again."""
        if self._machine.wall_s() < self.renew_at_wall_s:
            return False
        try:
            await self.make(identities, anew=True)
            log.info("this control plane's certificate was renewed", of=self._identity.label)
            await identities.record_own()
        except LlmgwError as err:
            log.warning("this control plane's certificate could not be renewed, or noted; tried again later", why=err.message)
            return False
        return True


def check_authority(ca: Authority | None, folder: Path, cluster: str, pin: str, *, needed: bool) -> None:
    """Is this the CA of this store's cluster? `pin` is the store's, "" where it knows none. Raises Invalid, Conflict."""
    if ca is None:
        if needed and pin:
            raise Conflict(
                f"this cluster has a CA, and its key is not in {folder}: bring that folder over from another control plane of it",
                code="no_ca_key",
            )
        return
    if ca.cluster != cluster:
        raise Invalid(
            f"the CA in {folder} is of cluster {ca.cluster}, and the store is of {cluster}: one of the two is misplaced", code="bad_ca"
        )
    if pin and ca.pin != pin:
        raise Invalid(f"the CA in {folder} is not the one that this cluster's machines have joined by: put that one back", code="bad_ca")


def own_addresses(settings: Settings) -> tuple[str, ...]:
    """The names and addresses that this control plane's ports are reached at, as far as its file and its machine tell."""
    found = [urlsplit(settings.server.advertise).hostname or ""] if settings.server.advertise else []
    for listen in (settings.server.admin_listen, settings.router.listen if settings.router.embedded else ""):
        where = parse_listen(listen) if listen else None
        if isinstance(where, TcpAddress) and where.host not in EVERYWHERE:
            found.append(where.host)
    found += [socket.gethostname(), *HERE]
    return tuple(dict.fromkeys(one.lower() for one in found if one and address_fault(one) is None))


def told_address(settings: Settings, bound_port: int) -> str:
    """Where other machines are told to find this control plane's admin port, "" where its file does not say, or where it is no TLS."""
    where = parse_listen(settings.server.admin_listen)
    if not settings.tls.secures(loopback=where.loopback):
        return ""
    if settings.server.advertise:
        return settings.server.advertise.rstrip("/")
    if not isinstance(where, TcpAddress) or where.host in EVERYWHERE:
        return ""
    return f"https://{TcpAddress(where.host, bound_port)}"
