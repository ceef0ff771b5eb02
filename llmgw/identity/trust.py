"""What TLS is made of between our machines: whom to believe, and what to present. Contexts from files, and words for refusals.

A `Trust` is a value; whoever renews a certificate puts another one in its place, and connections that are made from then on
take that. TLS 1.3 only: both ends are ours. Reads no clock and knows no socket.
"""

from __future__ import annotations

import calendar
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import attrs
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from llmgw.domain.errors import Invalid
from llmgw.domain.files import words
from llmgw.domain.identity import MachineRole, Presented, parse_uri, plain_serial
from llmgw.identity.ca import key_hash

_NOT_OURS: Final = "was made by another CA than this cluster's"
# What OpenSSL says of a certificate, in ours: its own words name neither whose it is nor what helps.
_WORDS: Final[Mapping[int, tuple[str, str]]] = {
    9: ("certificate_not_yet_valid", "is not valid yet: this machine's clock is slow, or that one's was fast"),
    10: ("certificate_expired", "has expired, unless this machine's clock is wrong: that machine joins anew, by a new join token"),
    18: ("certificate_foreign", _NOT_OURS),
    19: ("certificate_foreign", _NOT_OURS),
    20: ("certificate_foreign", _NOT_OURS),
    21: ("certificate_foreign", _NOT_OURS),
    7: ("certificate_foreign", _NOT_OURS),
    26: ("certificate_role", "is not for this use: that machine has joined in another role"),
    62: ("certificate_name", "is not for this address"),
    64: ("certificate_name", "is not for this address"),
}
# Alerts by which the other end tells what it holds against our certificate.
_ALERTS: Final[Mapping[str, tuple[str, str]]] = {
    "TLSV1_ALERT_UNKNOWN_CA": ("certificate_foreign", f"this machine's certificate {_NOT_OURS}"),
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": (
        "certificate_expired",
        "this machine's certificate has expired by the clock of that one: if that clock is right, it joins anew, by a new join token",
    ),
    "TLSV1_ALERT_DECRYPT_ERROR": ("certificate_foreign", f"this machine's certificate {_NOT_OURS}"),  # a signature that is not of our CA
    "SSLV3_ALERT_BAD_CERTIFICATE": ("certificate_refused", "this machine's certificate does not check there"),
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE": ("certificate_role", "this machine's certificate is of another role"),
    "SSLV3_ALERT_CERTIFICATE_REVOKED": ("certificate_revoked", "this machine's certificate was revoked"),
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": ("certificate_refused", "this machine's certificate does not check there"),
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": ("certificate_missing", "a certificate is needed there: this machine joins, by a join token"),
}
PLAIN_TEXT: Final = "plain_text"


@attrs.frozen
class Trust:
    """`ca_pem`: who makes our machines' certificates. `others`: a file of more that may make a control plane's, "" for none;
    `system`: and so may whoever this machine's system trusts. `certificate` and `key` are files, None where this one has none.
    """

    ca_pem: str = ""
    others: str = ""
    system: bool = False
    certificate: Path | None = None
    key: Path | None = attrs.field(default=None, repr=False)

    @property
    def presents(self) -> bool:
        """Has this machine a certificate to show?"""
        return self.certificate is not None and self.key is not None

    def client(self) -> ssl.SSLContext:
        """For dialling a control plane. Raises Invalid where a file cannot be used."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if self.ca_pem:
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            _load_cas(context, cadata=self.ca_pem)
        if self.others:
            _load_cas(context, cafile=self.others)
        if self.system or not (self.ca_pem or self.others):
            context.load_default_certs(ssl.Purpose.SERVER_AUTH)
        _present(context, self.certificate, self.key)
        return context

    def server(self) -> ssl.SSLContext:
        """For an admin port: whoever shows a certificate shows one of this cluster's. Raises Invalid."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.set_alpn_protocols(["http/1.1"])
        self.ask(context)
        _present(context, self.certificate, self.key)
        return context

    def ask(self, context: ssl.SSLContext) -> None:
        """Has a server's context ask for certificates. One who shows none gets in as far as a token lets it: browsers, ctl."""
        context.verify_mode = ssl.CERT_OPTIONAL
        _load_cas(context, cadata=self.ca_pem)

    def present_in(self, context: ssl.SSLContext) -> None:
        """Puts a renewed certificate into a context that is in use: connections that are open keep theirs. Raises Invalid."""
        _present(context, self.certificate, self.key)


def _load_cas(context: ssl.SSLContext, *, cadata: str | None = None, cafile: str | None = None) -> None:
    try:
        context.load_verify_locations(cafile=cafile, cadata=cadata)
    except (OSError, ssl.SSLError) as err:
        raise Invalid(f"tls.ca: {cafile or 'the certificate of the CA'} cannot be used: {words(err)}", param="tls.ca") from err


def _present(context: ssl.SSLContext, certificate: Path | None, key: Path | None) -> None:
    if certificate is None or key is None:
        return
    try:
        context.load_cert_chain(certificate, key, _no_password)
    except (OSError, ValueError) as err:
        raise Invalid(f"the certificate {certificate} and its key {key} cannot be used: {words(err)}", code="bad_certificate") from err


def _no_password() -> str:
    """Asked for where a key is encrypted; without this the library would ask on the terminal and wait."""
    raise ValueError("the key is encrypted")


def presented(certificate: Mapping[str, Any] | None, der: bytes | None = None) -> Presented | None:
    """Whose a peer's certificate is, as `getpeercert()` tells it after TLS has checked it. None: it showed none of a machine's.

    `der` is the same one whole, for its key.
    """
    if not certificate:
        return None
    found = [one for kind, text in certificate.get("subjectAltName", ()) if kind == "URI" and (one := parse_uri(text)) is not None]
    if len(found) != 1:
        return None
    return Presented(
        found[0],
        plain_serial(str(certificate.get("serialNumber", ""))),
        _time(certificate.get("notBefore")),
        _time(certificate.get("notAfter")),
        _key(der) if der else "",
    )


def _key(der: bytes) -> str:
    key = x509.load_der_x509_certificate(der).public_key()
    return key_hash(key) if isinstance(key, ec.EllipticCurvePublicKey) else ""  # our CA makes certificates for no others


def _time(text: object) -> float:
    return float(ssl.cert_time_to_seconds(text)) if isinstance(text, str) else float(calendar.timegm((1970, 1, 1, 0, 0, 0)))


def wrong_server(certificate: Mapping[str, Any] | None) -> str:
    """Why a peer that was dialled as a control plane is none, "" where it may be: a certificate that is not of our CA is judged
    by its name alone, one of ours by its role as well."""
    found = presented(certificate)
    if found is None or found.identity.role is MachineRole.SERVER:
        return ""
    return f"shows the certificate of {found.identity.label}, which is no control plane"


def refusal(err: BaseException | None) -> tuple[str, str] | None:
    """(code, what to say of the peer's certificate) for an error of TLS in which we refuse; None for any other."""
    while err is not None:
        if isinstance(err, ssl.SSLCertVerificationError):
            return _WORDS.get(err.verify_code, ("certificate_refused", f"does not check: {err.verify_message}"))
        err = err.__cause__
    return None


def refused(err: BaseException | None) -> tuple[str, str] | None:
    """(code, words) for an error of TLS by which the other end refuses our certificate; None for any other."""
    while err is not None:
        if isinstance(err, ssl.SSLError) and (told := _ALERTS.get(str(err.reason))) is not None:
            return told
        err = err.__cause__
    return None


def is_plain_text(err: BaseException | None) -> bool:
    """Is it the error of a peer that speaks no TLS at all, where we do?"""
    while err is not None:
        if isinstance(err, ssl.SSLError) and err.reason in ("HTTP_REQUEST", "HTTPS_PROXY_REQUEST"):
            return True
        err = err.__cause__
    return False
