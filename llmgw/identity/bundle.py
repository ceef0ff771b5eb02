"""A bundle: one file by which a machine becomes a control plane of a cluster that it cannot reach while it is set up. Pure.

Its first line names the form and the SHA-256 of everything after it, so that a file that was cut or edited on its way is told as
that; it is no signature. Whoever has a bundle may join by its token until that expires or is used.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any, Final

import attrs

from llmgw.domain.errors import Invalid
from llmgw.domain.identity import MachineRole
from llmgw.identity import ca, pin
from llmgw.identity.join_tokens import JoinToken, parse_token, print_token

FORM: Final = 1
BUNDLE_BYTES_MAX: Final = 8 * 1024 * 1024  # a settings document of 1 MiB, every character of it escaped, and some KiB
_HEAD: Final = re.compile(rb"llmgw-bundle-([1-9][0-9]{0,3}) ([0-9a-f]{64})")
_MALFORMED: Final = "bundle_malformed"


@attrs.frozen
class Bundle:
    """What the new machine is told. `address` is "" where it says itself how others reach it; `expires_wall_s` is the token's end.

    `store`: the keys of `[store]` that all machines share, none of them a credential. `settings` is the document of `version`.
    """

    cluster: str
    token: JoinToken
    expires_wall_s: float
    address: str
    ca_pem: str
    store: Mapping[str, str]
    version: int
    settings: str


def print_bundle(bundle: Bundle) -> str:
    """The file's text, ASCII."""
    told = {
        "cluster": bundle.cluster,
        "token": print_token(bundle.token),
        "expires_wall_s": bundle.expires_wall_s,
        "address": bundle.address,
        "ca": bundle.ca_pem,
        "store": dict(bundle.store),
        "version": bundle.version,
        "settings": bundle.settings,
    }
    body = json.dumps(told, sort_keys=True, indent=1) + "\n"
    return f"llmgw-bundle-{FORM} {_sha256(body.encode())}\n{body}"


def parse_bundle(data: bytes, source: str) -> Bundle:
    """Raises Invalid, which names `source` and never repeats what stands in it."""
    if len(data) > BUNDLE_BYTES_MAX or not data.startswith(b"llmgw-bundle-"):
        raise Invalid(f"{source} is no bundle: `llmgw server add NAME --bundle FILE` makes one", code=_MALFORMED)
    head, _, body = data.partition(b"\n")
    found = _HEAD.fullmatch(head)
    if found is not None and int(found[1]) != FORM:
        text = f"{source} is a bundle of form {int(found[1])}, and this build reads form {FORM}: install the build that the cluster runs"
        raise Invalid(text, code=_MALFORMED)
    if found is None or found[2].decode() != _sha256(body):
        raise Invalid(f"{source} is not whole, or was edited: bring it over once more", code=_MALFORMED)
    try:
        return _bundle(json.loads(body))
    except (ValueError, KeyError, TypeError, RecursionError, Invalid) as err:
        raise Invalid(f"{source} cannot be read: it is of another build of llmgw", code=_MALFORMED) from err


def _bundle(told: dict[str, Any]) -> Bundle:
    token, expires_wall_s, store, version = parse_token(told["token"]), told["expires_wall_s"], told["store"], told["version"]
    texts = (told["cluster"], told["address"], told["ca"], told["settings"], *store, *store.values())
    if not all(isinstance(text, str) for text in texts) or type(expires_wall_s) not in (int, float) or type(version) is not int:
        raise ValueError("a value of another kind")
    if token.role is not MachineRole.SERVER or not token.name or not pin.same_pin(pin.pin_of(ca.read_ca(told["ca"].encode())), token.pin):
        raise ValueError("a token for something else")
    return Bundle(told["cluster"], token, float(expires_wall_s), told["address"], told["ca"], store, version, told["settings"])


def _sha256(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()
