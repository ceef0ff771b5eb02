"""The pin of a CA: the hash of its public key, by which a machine that joins knows the right one before it trusts anything."""

from __future__ import annotations

import hashlib
import hmac
import re
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import serialization

PIN_BEGIN: Final = "sha256:"
_PIN: Final = re.compile(rf"{PIN_BEGIN}[0-9a-f]{{64}}\Z")


def pin_of(certificate: x509.Certificate) -> str:
    """`sha256:HEX` of the SubjectPublicKeyInfo: it stays when the CA's certificate is made anew for the same key."""
    key = certificate.public_key().public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return PIN_BEGIN + hashlib.sha256(key).hexdigest()


def is_pin(text: str) -> bool:
    """Has it the form of one?"""
    return _PIN.match(text) is not None


def same_pin(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(), other.encode())
