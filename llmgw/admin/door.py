"""Who may come in at the admin port without being a person: agents, routers and other control planes.

A certificate of the cluster's CA decides where one is shown; the tokens of files count where nobody else can listen in. Each
refusal is one line in the log, until that peer is let in or is refused for another reason. Knows nothing of sessions.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import structlog
import trio

from llmgw.admin.auth import FailureLimit, is_token
from llmgw.domain.errors import Denied, LlmgwError, Unauthenticated
from llmgw.domain.identity import MachineRole, Presented
from llmgw.identity.admission import NOT_JOINED, REVOKED
from llmgw.settings.address import is_loopback

PRESENTED: Final = "llmgw.presented"  # in a connection's state: whose certificate TLS has checked
TOLD_MAX: Final = 1_000  # peers of which it is remembered what was told; the oldest are forgotten first
NEEDS_CERTIFICATE: Final = "a certificate of this cluster is needed here: this machine joins by a join token, `llmgw join`"
PEER_NEEDS_CERTIFICATE: Final = (
    "it shows no certificate of this cluster, and its control-token counts on this machine only: it joins by a join token, "
    "`llmgw server add` here and `llmgw join` there"
)
PEER_REMOVED: Final = (
    "control plane {} was removed from this cluster: it joins anew by a join token, `llmgw server add`; on the machine of another one "
    "it may take another [server] name"
)
log = structlog.get_logger("llmgw.admin")


class Certificates(Protocol):
    """What is asked of who holds which certificate."""

    changed: trio.Event

    def refusal(self, shown: Presented, *allowed: MachineRole) -> tuple[str, str] | None: ...

    def removed(self, role: MachineRole, name: str) -> bool: ...


class Told:
    """Keeps one refusal from being told at every try of its peer."""

    def __init__(self) -> None:
        self._told: OrderedDict[tuple[str, str], None] = OrderedDict()

    def is_news(self, host: str, code: str) -> bool:
        """Is that peer refused for this reason for the first time? Counts as told from here on."""
        if (host, code) in self._told:
            return False
        self._told[host, code] = None
        if len(self._told) > TOLD_MAX:
            self._told.popitem(last=False)
        return True

    def over(self, host: str) -> None:
        """It was let in."""
        for key in [key for key in self._told if key[0] == host]:
            del self._told[key]


class Door:
    """`token` is what agents and routers of this machine present; `plain` says where it counts: "loopback", "never", "anywhere"."""

    def __init__(self, certificates: Certificates, token: Callable[[], str], failures: FailureLimit, plain: str = "anywhere") -> None:
        self.certificates = certificates
        self._token = token
        self._failures = failures
        self._plain = plain
        self._told = Told()

    def admit(self, scope: Mapping[str, Any], role: MachineRole) -> Presented | None:
        """Whose session it is; None: that of whoever has the token. Raises Unauthenticated, Denied, Overloaded."""
        host, port = scope.get("client") or ("local", 0)
        try:
            shown = presented_in(scope)
            if shown is not None:
                if (fault := self.certificates.refusal(shown, role)) is not None:
                    raise Denied(fault[1], code=fault[0])
            else:
                self._check_token(scope, role)
        except LlmgwError as err:
            if self._told.is_news(str(host), err.code):
                log.warning("a peer was refused", who=role.value, peer=_peer(str(host), port), code=err.code, why=err.message)
            if err.code == "token_invalid":
                self._failures.failed(str(host))
            raise
        self._told.over(str(host))
        return shown

    def counts_tokens_of(self, scope: Mapping[str, Any]) -> bool:
        """Do the tokens of files count for whoever sent this? Not beside a certificate: that one decides."""
        if presented_in(scope) is not None:
            return False
        return self._plain == "anywhere" or (self._plain == "loopback" and is_of_this_machine(scope))

    def vouches(self, scope: Mapping[str, Any]) -> bool:
        """Has another control plane of this cluster shown its certificate?"""
        shown = presented_in(scope)
        return shown is not None and self.certificates.refusal(shown, MachineRole.SERVER) is None

    def let_in_peer(self, scope: Mapping[str, Any]) -> None:
        """A control plane was let in: if it is refused again, that is told again."""
        self._told.over(_host(scope))

    def check_peer(self, scope: Mapping[str, Any], name: str) -> None:
        """For whoever calls itself the control plane `name`, before any token is looked at. Raises Unauthenticated."""
        if (fault := self._peer_fault(scope, name)) is None:
            return
        host, port = scope.get("client") or ("local", 0)
        if self._told.is_news(str(host), fault[0]):
            log.warning("a peer was refused", who=MachineRole.SERVER.value, peer=_peer(str(host), port), code=fault[0], why=fault[1])
        raise Unauthenticated(fault[1], code=fault[0])

    def _peer_fault(self, scope: Mapping[str, Any], name: str) -> tuple[str, str] | None:
        shown = presented_in(scope)
        if shown is not None:
            return self.certificates.refusal(shown, MachineRole.SERVER)
        if not self.counts_tokens_of(scope):
            return NOT_JOINED, PEER_NEEDS_CERTIFICATE
        if self.certificates.removed(MachineRole.SERVER, name):
            # The token's file is of the machine and cannot be ended for one of its control planes.
            return REVOKED, PEER_REMOVED.format(name)
        return None

    def _check_token(self, scope: Mapping[str, Any], role: MachineRole) -> None:
        if not self.counts_tokens_of(scope):
            raise Unauthenticated(NEEDS_CERTIFICATE, code="certificate_missing")
        if not is_token(scope["headers"], self._token()):
            raise Unauthenticated(f"the {role.value}'s token is not valid here", code="token_invalid")


def is_of_this_machine(scope: Mapping[str, Any]) -> bool:
    """Was it sent from loopback, or from the very address that it was sent to?"""
    client, server = scope.get("client"), scope.get("server")
    return client is None or is_loopback(str(client[0])) or (server is not None and client[0] == server[0])


def presented_in(scope: Mapping[str, Any]) -> Presented | None:
    """Whose certificate came with the connection of this request."""
    found = (scope.get("state") or {}).get(PRESENTED)
    return found if isinstance(found, Presented) else None


def _host(scope: Mapping[str, Any]) -> str:
    return str((scope.get("client") or ("local", 0))[0])


def _peer(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
