"""Who has joined this cluster, by which certificate, and who may join: the owner that the admin API calls.

Makes certificates with the CA's key, where this control plane has it; keeps who holds which, and what was revoked. Secrets are
made here, handed out once, and never kept or logged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import structlog
import trio
from cryptography.hazmat.primitives.asymmetric import ec

from llmgw.control.event_log import EventLog
from llmgw.domain.errors import Conflict, Denied, Invalid
from llmgw.domain.event import Level
from llmgw.domain.identity import MachineIdentity, MachineRole, Presented
from llmgw.domain.ids import ClusterId
from llmgw.domain.ports import Machine
from llmgw.domain.setting import needed_name_fault
from llmgw.identity import admission, ca
from llmgw.identity.admission import Ended
from llmgw.identity.ca import Authority, Issued
from llmgw.identity.join_tokens import ADDRESSES_MAX, LIFE_S_MAX, LIFE_S_MIN, SECRET_BYTES, JoinToken, hash_secret, print_token, token_id
from llmgw.store import identities as stored
from llmgw.store.audit import CLUSTER, Origin
from llmgw.store.connection import Store
from llmgw.store.identities import SELF, IdentityRows, StoredIdentity, StoredToken

NO_CA: Final = "no_ca"
log = structlog.get_logger("llmgw.identities")


class Identities:
    """`authority` is set by `wiring` where this control plane has the CA's key; `reaches` tells the addresses that new machines are told.

    `told()` is called after each change, so that the other control planes look. `changed` is an event, replaced at each change of
    what was revoked: sessions wait for it.
    """

    def __init__(
        self,
        machine: Machine,
        store: Store,
        cluster_id: ClusterId,
        epoch: Callable[[], int],
        events: EventLog,
        told: Callable[[], None],
    ) -> None:
        self._machine = machine
        self._store = store
        self._cluster_id = cluster_id
        self._epoch = epoch
        self._events = events
        self._told = told
        self._rows = IdentityRows()
        self._ended = Ended()
        self._own: Issued | None = None
        self._own_addresses: tuple[str, ...] = ()
        self.authority: Authority | None = None
        self.reaches: Callable[[], Sequence[str]] = tuple
        self.takes_servers: Callable[[], str] = str  # why another machine's control plane cannot join now, "" where it can
        self.changed = trio.Event()

    # --- what there is

    @property
    def tokens(self) -> tuple[StoredToken, ...]:
        return self._rows.tokens

    @property
    def held(self) -> tuple[StoredIdentity, ...]:
        """Every certificate that is kept, revoked and expired ones among them."""
        return self._rows.identities

    @property
    def durability(self) -> str:
        return self._store.durability

    async def reload(self) -> None:
        """What another leader may have changed."""
        self._take(await stored.load(self._store))

    def refusal(self, shown: Presented, *allowed: MachineRole) -> tuple[str, str] | None:
        """(code, words) where the holder of this certificate may not come in as one of these, or None."""
        return admission.refusal(shown, self._cluster_id, allowed, self._ended, self._machine.wall_s())

    def servers(self) -> frozenset[str]:
        """The control planes that have a certificate which is valid now."""
        now_wall_s = self._machine.wall_s()
        return frozenset(one.name for one in self.held if one.role is MachineRole.SERVER and state_of(one, now_wall_s) == "valid")

    def own_fault(self) -> str:
        """Why this control plane may not lead: it was removed, and has not joined anew. "" for every other."""
        if self._own is None:
            return ""
        own = self._own
        shown = Presented(own.identity, own.serial, own.not_before_wall_s, own.not_after_wall_s, ca.key_hash_of(own.pem))
        fault = self.refusal(shown, MachineRole.SERVER)
        return fault[1] if fault is not None and fault[0] == admission.REVOKED else ""

    def removed(self, role: MachineRole, name: str) -> bool:
        """Was that machine removed, and has it not joined anew? For whoever shows no certificate."""
        return self._ended.removed(role, name)

    def needed_authority(self) -> Authority:
        """Raises Conflict where certificates cannot be made here."""
        if self.authority is None:
            raise Conflict(
                "this control plane has no certificate authority, so no machine can join: it listens on loopback only; set [server] "
                "admin_listen to an address that other machines reach, and [server] advertise to how they call it",
                code=NO_CA,
            )
        return self.authority

    # --- what changes it

    async def lead(self) -> None:
        """The leader puts into the store what it has made itself: the CA's certificate, and its own.

        Raises StaleEpoch, Unavailable, and Denied where it was removed, which a copy of before did not say.
        """
        await self.reload()
        if fault := self.own_fault():
            raise Denied(fault, code=admission.REVOKED)
        if self.authority is not None:
            pin = await stored.ensure_ca(self._store, self._epoch(), self.authority.pin, self.authority.pem)
            if pin != self.authority.pin:
                log.error("the store belongs to another CA than this control plane's", store=pin, here=self.authority.pin)
            await self.record_own()

    def own(self, issued: Issued, addresses: tuple[str, ...]) -> None:
        """This control plane's certificate, made by itself."""
        self._own, self._own_addresses = issued, addresses

    async def record_own(self) -> None:
        """For the leader. Raises StaleEpoch, Unavailable."""
        if self._own is None:
            return
        key = ca.key_hash_of(self._own.pem)
        await stored.record_own(self._store, self._epoch(), self._row(self._own, key, self._own_addresses, SELF))
        await self._reread()

    async def create_token(self, role: MachineRole, name: str, life_s: float, origin: Origin = CLUSTER) -> tuple[StoredToken, str]:
        """(the token, its printed form, which only this answer holds). Raises Invalid, Conflict, StaleEpoch, Unavailable."""
        authority = self.needed_authority()
        if not LIFE_S_MIN <= life_s <= LIFE_S_MAX:
            raise Invalid(f"a join token lasts {LIFE_S_MIN:g} to {LIFE_S_MAX:g} s", param="expires_in_s")
        if role is MachineRole.SERVER and (why := self.takes_servers()):
            raise Conflict(why, code="no_replicated_store")
        addresses = tuple(dict.fromkeys(address for address in self.reaches() if address.startswith("https://")))[:ADDRESSES_MAX]
        if not addresses:
            raise Conflict(
                "no other machine can reach this control plane over TLS: set [server] admin_listen to an address that they reach, such as "
                "0.0.0.0:8081, and [server] advertise to how they call it, such as https://ctl-1.example:8081",
                code="no_address",
            )
        secret = self._machine.fresh_hex(SECRET_BYTES)
        sha256 = hash_secret(secret)
        now_wall_s = self._machine.wall_s()
        token = StoredToken(token_id(sha256), sha256, role, name, now_wall_s, origin.who, now_wall_s + life_s)
        await stored.add_token(self._store, self._epoch(), token, origin)
        self._events.record("join_token.created", f"join-token/{token.id}", f"a join token for {_of(role, name)} was made{_by(origin)}")
        await self._reread()
        return token, print_token(JoinToken(secret, role, name, authority.pin, addresses))

    async def revoke_token(self, one: str, origin: Origin = CLUSTER) -> tuple[StoredToken, bool]:
        """(the token, whether it could still have been used). Raises NotFound."""
        token, ended = await stored.revoke_token(self._store, self._epoch(), one, origin)
        if ended:
            self._events.record("join_token.revoked", f"join-token/{one}", f"join token {one} was revoked{_by(origin)}")
        await self._reread()
        return token, ended

    async def join(
        self, secret: str, role: MachineRole, name: str, request: str, addresses: tuple[str, ...], origin: Origin = CLUSTER
    ) -> Issued:
        """A certificate for the machine that brings this token. Raises Denied, Invalid, Conflict, StaleEpoch, Unavailable."""
        if (fault := needed_name_fault(name)) is not None:
            raise Invalid(f"name: {fault}", param="name")
        if all(token.sha256 != hash_secret(secret) for token in self.tokens):
            raise Denied("the join token is not known here", code="join_token_unknown")  # before strangers make us sign or write
        key = ca.read_request(request)
        issued = self._issue(key, MachineIdentity(self._cluster_id, role, name), addresses)
        row = self._row(issued, ca.key_hash(key), addresses, "")
        try:
            await stored.join(self._store, self._epoch(), hash_secret(secret), row, origin)
        except Denied as err:
            log.warning("a machine was not let in", role=role.value, name=name, peer=origin.peer, why=err.message)
            raise
        text = f"{_of(role, name)} has joined from {origin.peer}; its certificate has the serial {issued.serial}"
        self._events.record("machine.joined", f"{role.value}/{name}", text)
        await self._reread()
        return issued

    async def renew(self, shown: Presented, request: str, addresses: tuple[str, ...], origin: Origin = CLUSTER) -> Issued:
        """Another certificate for whoever shows this one, under the same role and name. Raises Denied, Invalid, StaleEpoch, Unavailable."""
        if (fault := self.refusal(shown, *MachineRole)) is not None:
            raise Denied(fault[1], code=fault[0])
        key = ca.read_request(request)
        issued = self._issue(key, shown.identity, addresses)
        await stored.renew(self._store, self._epoch(), shown.serial, self._row(issued, ca.key_hash(key), addresses, ""), origin)
        log.info("a certificate was renewed", of=shown.identity.label, serial=issued.serial)
        await self._reread()
        return issued

    async def revoke(self, role: MachineRole, name: str, origin: Origin = CLUSTER) -> tuple[int, int]:
        """Ends every certificate of that machine, its sessions with them, and the join tokens by its name: (how many were valid, how
        many tokens were open). Raises NotFound, and Conflict for the one that leads."""
        if role is MachineRole.SERVER and self._own is not None and self._own.identity.name == name:
            raise Conflict(f"control plane {name} leads; it hands over before it is removed: `llmgw ctl leader hand-over`", code="leads")
        ended, tokens = await stored.revoke(self._store, self._epoch(), role, name, origin)
        if ended:
            text = f"the certificates of {_of(role, name)} were revoked{_by(origin)}"
            self._events.record("machine.revoked", f"{role.value}/{name}", text, Level.WARNING)
        if tokens:
            text = f"the join tokens for {_of(role, name)} were revoked{_by(origin)}"
            self._events.record("join_token.revoked", f"{role.value}/{name}", text)
        await self._reread()
        return ended, tokens

    def _issue(self, key: ec.EllipticCurvePublicKey, identity: MachineIdentity, addresses: tuple[str, ...]) -> Issued:
        authority = self.needed_authority()
        if len(addresses) > ca.ADDRESSES_MAX:
            raise Invalid(f"a machine has at most {ca.ADDRESSES_MAX} addresses", param="addresses")
        for address in addresses:
            if (fault := ca.address_fault(address)) is not None:
                raise Invalid(f"addresses: {fault}", param="addresses")
            if identity.role is not MachineRole.SERVER and address.lower() in self._of_servers():
                # Whoever may join as a router must not get a certificate by which it could stand in for a control plane.
                raise Denied(f"{address} is an address of a control plane, and {identity.label} is none", code="address_taken")
        return ca.issue(authority, key, identity, addresses, self._machine.wall_s(), self._machine.fresh_hex(ca.SERIAL_BYTES))

    def _of_servers(self) -> frozenset[str]:
        known = {one.lower() for held in self.held if held.role is MachineRole.SERVER for one in held.addresses}
        return frozenset(known | {one.lower() for one in self._own_addresses})

    def _row(self, issued: Issued, key: str, addresses: tuple[str, ...], issued_for: str) -> StoredIdentity:
        identity = issued.identity
        return StoredIdentity(
            issued.serial, identity.role, identity.name, key, addresses, self._machine.wall_s(), issued_for, issued.not_after_wall_s
        )

    async def _reread(self) -> None:
        await self.reload()
        self._told()

    def _take(self, found: IdentityRows) -> None:
        if found == self._rows:
            return
        self._rows = found
        ended = Ended.of(found.identities)
        news = ended.serials != self._ended.serials
        self._ended = ended
        if news:
            self.changed.set()
            self.changed = trio.Event()


def state_of(held: StoredIdentity, now_wall_s: float) -> str:
    """valid, revoked or expired."""
    if held.revoked_wall_s is not None:
        return "revoked"
    return "expired" if now_wall_s > held.not_after_wall_s else "valid"


def token_state(token: StoredToken, now_wall_s: float) -> str:
    """valid, used, revoked or expired."""
    if token.used_wall_s is not None:
        return "used"
    if token.revoked_wall_s is not None:
        return "revoked"
    return "expired" if now_wall_s >= token.expires_wall_s else "valid"


def _of(role: MachineRole, name: str) -> str:
    return f"{role.value} {name}" if name else f"a machine as {role.value}"


def _by(origin: Origin) -> str:
    return f" by {origin.who}" if origin.who else ""
