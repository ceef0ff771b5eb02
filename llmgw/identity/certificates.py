"""A machine's certificate: what it says, what is wrong with it in words, and when it is renewed. Opens no file and reads no clock."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from typing import Final

import attrs
from cryptography import x509
from cryptography.exceptions import InvalidSignature

from llmgw.domain.errors import Invalid
from llmgw.domain.identity import MachineIdentity, MachineRole, Presented, parse_uri, plain_serial
from llmgw.identity.ca import RENEW_AT, general_name, public_key_of

EXPIRED: Final = "certificate_expired"
NOT_YET: Final = "certificate_not_yet_valid"
FOREIGN: Final = "certificate_foreign"
WRONG_ROLE: Final = "certificate_role"
REVOKED: Final = "certificate_revoked"
NONE: Final = "certificate_missing"
WRONG_KEY: Final = "certificate_key"


@attrs.frozen
class Leaf:
    """A machine's certificate, read. `addresses` are the names and IP addresses that it is for."""

    certificate: x509.Certificate
    identity: MachineIdentity
    addresses: frozenset[str]

    @property
    def presented(self) -> Presented:
        return Presented(self.identity, plain_serial(f"{self.certificate.serial_number:x}"), self.not_before_wall_s, self.not_after_wall_s)

    @property
    def not_before_wall_s(self) -> float:
        return self.certificate.not_valid_before_utc.timestamp()

    @property
    def not_after_wall_s(self) -> float:
        return self.certificate.not_valid_after_utc.timestamp()

    @property
    def renew_at_wall_s(self) -> float:
        return renew_at(self.not_before_wall_s, self.not_after_wall_s)


def renew_at(not_before_wall_s: float, not_after_wall_s: float) -> float:
    """When a certificate is old enough to be replaced: at two thirds of its life."""
    return not_before_wall_s + (not_after_wall_s - not_before_wall_s) * RENEW_AT


def read_leaf(pem: bytes) -> Leaf:
    """Raises Invalid for what is no certificate of a machine of ours."""
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound) as err:
        raise Invalid("the certificate cannot be read: it is damaged, or not one that llmgw made", code=FOREIGN) from err
    found = [one for uri in names.get_values_for_type(x509.UniformResourceIdentifier) if (one := parse_uri(uri)) is not None]
    if len(found) != 1:
        raise Invalid("the certificate names no machine of a cluster: it is not one that llmgw made", code=FOREIGN)
    hosts = {*names.get_values_for_type(x509.DNSName), *(str(one) for one in names.get_values_for_type(x509.IPAddress))}
    return Leaf(certificate, found[0], frozenset(hosts))


def check_leaf(leaf: Leaf, key_pem: str, ca: x509.Certificate, now_wall_s: float, role: MachineRole) -> None:
    """Is it good to present now, by a machine of that role? Raises Invalid, in words and with a code of its own for each fault."""
    if public_key_of(key_pem) != leaf.certificate.public_key():
        raise Invalid("the key is not that of the certificate", code=WRONG_KEY)
    try:
        leaf.certificate.verify_directly_issued_by(ca)
    except (ValueError, TypeError, InvalidSignature) as err:
        raise Invalid("the certificate was not made by the CA that stands beside it", code=FOREIGN) from err
    if leaf.identity.role is not role:
        raise Invalid(f"the certificate is of {leaf.identity.label}, and this is a machine's that runs as {role.value}", code=WRONG_ROLE)
    if (fault := time_fault(leaf.not_before_wall_s, leaf.not_after_wall_s, now_wall_s)) is not None:
        code, words = fault
        raise Invalid(words, code=code)


def time_fault(not_before_wall_s: float, not_after_wall_s: float, now_wall_s: float) -> tuple[str, str] | None:
    """(code, words) where it is not valid now, or None."""
    if now_wall_s < not_before_wall_s:
        return NOT_YET, f"the certificate is valid from {day(not_before_wall_s)} on: is this machine's clock right?"
    if now_wall_s > not_after_wall_s:
        expired = f"the certificate has expired at {day(not_after_wall_s)}, unless this machine's clock is wrong"
        return EXPIRED, f"{expired}: it joins anew, by a new join token"
    return None


def covers(leaf: Leaf, addresses: Iterable[str]) -> bool:
    """Is it for all of these?"""
    return {_plain(address) for address in addresses} <= {_plain(address) for address in leaf.addresses}


def _plain(address: str) -> str:
    return str(general_name(address).value).lower()


def day(wall_s: float) -> str:
    """A time for people."""
    return datetime.datetime.fromtimestamp(wall_s, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
