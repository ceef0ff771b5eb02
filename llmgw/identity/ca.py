"""The cluster's own CA: its key and certificate, and the certificates that it gives to our machines.

Values in, values out: nothing here reads a file or a clock, and serial numbers are the caller's; only keys are drawn here. Owns
the terms *CA* (the cluster's, there is one) and *leaf* (a certificate of one machine).
"""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import re
from collections.abc import Iterable
from typing import Final

import attrs
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from llmgw.domain.errors import Invalid
from llmgw.domain.identity import MachineIdentity, MachineRole, plain_serial
from llmgw.identity.pin import pin_of

DAY_S: Final = 86_400.0
CA_DAYS: Final = 3_653  # ten years: a CA outlives the machines that trust it, and nobody replaces it by the way
LEAF_DAYS: Final = 90  # as public CAs do: short enough that a lost key ends by itself, long enough for machines that are away for weeks
BACKDATED_S: Final = 300.0  # clocks of machines differ by minutes; what was made now is valid there too
RENEW_AT: Final = 2 / 3  # of its life: a month is left to try again in
SERIAL_BYTES: Final = 16  # 128 bits of randomness (RFC 5280 allows 20 bytes)
COMMON_NAME_MAX: Final = 64  # RFC 5280, ub-common-name
ADDRESSES_MAX: Final = 20  # of one machine: more than any has
REQUEST_BYTES_MAX: Final = 8_192  # a request for an EC key has 500
_DNS: Final = re.compile(r"(?=.{1,253}\Z)[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?)*\Z")


@attrs.frozen
class Authority:
    """The CA with its key, which is never shown: only where it stands can certificates be made."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey = attrs.field(repr=False)

    @property
    def cluster(self) -> str:
        return cluster_of(self.certificate)

    @property
    def pin(self) -> str:
        return pin_of(self.certificate)

    @property
    def pem(self) -> str:
        return pem_of(self.certificate)

    @property
    def key_pem(self) -> str:
        return key_text(self.key)


@attrs.frozen
class Issued:
    """A leaf that was just made. `serial` is as `plain_serial` writes it; times are wall time."""

    pem: str
    serial: str
    identity: MachineIdentity
    not_before_wall_s: float
    not_after_wall_s: float


def make_ca(cluster: str, now_wall_s: float, serial_hex: str) -> Authority:
    """A new CA for that cluster."""
    return _certify(ec.generate_private_key(ec.SECP256R1()), cluster, now_wall_s, serial_hex)


def certify(key_pem: bytes, cluster: str, now_wall_s: float, serial_hex: str) -> Authority:
    """A CA of a key that is there already. Raises Invalid."""
    return _certify(_private_key(key_pem), cluster, now_wall_s, serial_hex)


def _certify(key: ec.EllipticCurvePrivateKey, cluster: str, now_wall_s: float, serial_hex: str) -> Authority:
    name = x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, "llmgw"),
            x509.NameAttribute(NameOID.COMMON_NAME, cluster[:COMMON_NAME_MAX]),
        ]
    )
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(_serial(serial_hex))
        .not_valid_before(_date(now_wall_s - BACKDATED_S))
        .not_valid_after(_date(now_wall_s + CA_DAYS * DAY_S))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return Authority(certificate, key)


def read_authority(key_pem: bytes, certificate_pem: bytes) -> Authority:
    """Raises Invalid, in words, for what is no CA of ours."""
    key = _private_key(key_pem)
    certificate = read_ca(certificate_pem)
    if key.public_key() != certificate.public_key():
        raise Invalid("the CA's key is not that of its certificate")
    return Authority(certificate, key)


def read_ca(pem: bytes) -> x509.Certificate:
    """A CA's certificate. Raises Invalid."""
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
    except (ValueError, x509.ExtensionNotFound) as err:
        raise Invalid("the CA's certificate cannot be read: it is damaged, or no certificate of a CA in PEM form") from err
    if not constraints.ca:
        raise Invalid("the CA's certificate is that of a machine and not of a CA")
    return certificate


def cluster_of(certificate: x509.Certificate) -> str:
    """The cluster whose CA it is."""
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(names[0].value) if names else ""


def make_key() -> str:
    """A machine's new key, in PEM form."""
    return key_text(ec.generate_private_key(ec.SECP256R1()))


def make_request(key_pem: str) -> str:
    """A request for a certificate of that key. What the certificate is about, the CA decides: a request names nothing."""
    key = _private_key(key_pem.encode("utf-8", "surrogatepass"))
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.PEM).decode()


def read_request(pem: str) -> ec.EllipticCurvePublicKey:
    """The key that a request proves to have. Raises Invalid; nothing else of a request is looked at."""
    if len(pem) > REQUEST_BYTES_MAX:
        raise Invalid(f"a request for a certificate has at most {REQUEST_BYTES_MAX} bytes", param="request")
    try:
        request = x509.load_pem_x509_csr(pem.encode("utf-8", "surrogatepass"))
        key = request.public_key()
        proven = request.is_signature_valid
    except (ValueError, TypeError, InvalidSignature) as err:
        raise Invalid("the request for a certificate cannot be read (PEM, PKCS #10)", param="request") from err
    if not proven or not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise Invalid("the request for a certificate is not signed by a key on the curve P-256", param="request")
    return key


def issue(
    ca: Authority, key: ec.EllipticCurvePublicKey, identity: MachineIdentity, addresses: Iterable[str], now_wall_s: float, serial_hex: str
) -> Issued:
    """A leaf for the holder of `key`, valid for LEAF_DAYS. `addresses` are names and IP addresses it is reached at.

    An agent's is good for dialling only: it listens to nobody, so that whoever has it cannot stand in for a control plane.
    """
    not_before, not_after = _date(now_wall_s - BACKDATED_S), _date(now_wall_s + LEAF_DAYS * DAY_S)
    not_after = min(not_after, ca.certificate.not_valid_after_utc)
    uses = [ExtendedKeyUsageOID.CLIENT_AUTH]
    if identity.role is not MachineRole.AGENT:
        uses.append(ExtendedKeyUsageOID.SERVER_AUTH)
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(identity.uri)]
    names += [general_name(address) for address in dict.fromkeys(addresses)]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, identity.label[:COMMON_NAME_MAX])]))
        .issuer_name(ca.certificate.subject)
        .public_key(key)
        .serial_number(_serial(serial_hex))
        .not_valid_before(not_before)
        .not_valid_after(not_after)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca.key.public_key()), critical=False)
        .sign(ca.key, hashes.SHA256())
    )
    return Issued(pem_of(certificate), plain_serial(f"{_serial(serial_hex):x}"), identity, not_before.timestamp(), not_after.timestamp())


def public_key_of(key_pem: str) -> ec.EllipticCurvePublicKey:
    """Raises Invalid."""
    return _private_key(key_pem.encode("utf-8", "surrogatepass")).public_key()


def _private_key(pem: bytes) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(pem, None)
    except (ValueError, TypeError) as err:
        raise Invalid("the key cannot be read: it is damaged, encrypted, or no key in PEM form") from err
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise Invalid("the key is of a kind that llmgw does not make")
    return key


def key_hash(key: ec.EllipticCurvePublicKey) -> str:
    """What the store knows a key by: hex."""
    data = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(data).hexdigest()


def key_hash_of(certificate_pem: str) -> str:
    """That of the key in a certificate that was made here."""
    key = x509.load_pem_x509_certificate(certificate_pem.encode()).public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey), "we made it"
    return key_hash(key)


def address_fault(text: str) -> str | None:
    """Why `text` is no host name or IP address for a certificate, or None."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return None if _DNS.match(text) else f"{text[:100]!r} is no host name and no IP address"
    return None


def general_name(address: str) -> x509.GeneralName:
    """An address that `address_fault` has passed, as a certificate holds it."""
    try:
        return x509.IPAddress(ipaddress.ip_address(address))
    except ValueError:
        return x509.DNSName(address)


def pem_of(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def key_text(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()).decode()


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _serial(random_hex: str) -> int:
    """A positive number of at most 20 bytes from `SERIAL_BYTES` of randomness."""
    return max(1, int(random_hex, 16) >> 1)


def _date(wall_s: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(int(wall_s), datetime.UTC)
