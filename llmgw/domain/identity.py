"""Who a machine of the cluster is: a role and a name, as its certificate says them. Values only; no keys, no files."""

from __future__ import annotations

import enum
import re
from typing import Final
from urllib.parse import quote, unquote

import attrs

SCHEME: Final = "llmgw"
_URI: Final = re.compile(rf"{SCHEME}://([^/]+)/([^/]+)/([^/]+)\Z")


class MachineRole(enum.Enum):
    """What a machine has joined as. Not `settings.load.Role`, which says what process reads a file."""

    SERVER = "server"
    AGENT = "agent"
    ROUTER = "router"


@attrs.frozen
class MachineIdentity:
    """What a certificate is about. `name` is never empty."""

    cluster: str
    role: MachineRole
    name: str

    @property
    def uri(self) -> str:
        """As it stands in a certificate: `llmgw://CLUSTER/ROLE/NAME`, each part quoted."""
        return f"{SCHEME}://{quote(self.cluster, safe='')}/{self.role.value}/{quote(self.name, safe='')}"

    @property
    def label(self) -> str:
        """For people: `agent gpu-1`."""
        return f"{self.role.value} {self.name}"


@attrs.frozen
class Presented:
    """A certificate of this cluster as its holder showed it, checked by TLS. `serial` is lower-case hex; times are wall time.
    `key` is the hash of its public key, as the store has it, "" where only another control plane told of the certificate."""

    identity: MachineIdentity
    serial: str
    not_before_wall_s: float = 0.0
    not_after_wall_s: float = 0.0
    key: str = ""


def parse_uri(text: str) -> MachineIdentity | None:
    """The identity that a URI names, or None for any other text."""
    match = _URI.match(text)
    if match is None:
        return None
    cluster, role, name = (unquote(part) for part in match.groups())
    known = {one.value: one for one in MachineRole}
    if role not in known:
        return None
    found = MachineIdentity(cluster, known[role], name)
    return found if found.uri == text else None  # one spelling: what is compared elsewhere is compared as text


def plain_serial(text: str) -> str:
    """A serial number in the one form that is kept and compared: hex, lower case, without leading zeros."""
    return text.strip().lower().removeprefix("0x").lstrip("0") or "0"
