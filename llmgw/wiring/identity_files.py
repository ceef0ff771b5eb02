"""The files of identities: the CA's folder of a control plane, and the folder of what a machine joined by. Keys are 0600.

Reads and writes whole files through the Machine's disk; what stands in them is judged by `identity`.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import attrs
import structlog

from llmgw.domain.errors import Invalid
from llmgw.domain.files import unusable
from llmgw.domain.identity import MachineIdentity, MachineRole
from llmgw.domain.ids import ClusterId
from llmgw.domain.ports import Machine
from llmgw.identity import ca as authorities
from llmgw.identity import certificates
from llmgw.identity.ca import SERIAL_BYTES, Authority, Issued
from llmgw.identity.certificates import Leaf
from llmgw.identity.trust import Trust
from llmgw.settings.schema import Settings
from llmgw.wiring.tokens import write_once

JOINED_FILE: Final = "joined"  # in a control plane's data directory
CA_FOLDER: Final = "ca"
CA_KEY: Final = "ca.key"
CA_CERTIFICATE: Final = "ca.pem"
IDENTITY_FOLDER: Final = "identity"  # in the data directory of whoever joined
KEY: Final = "key.pem"
CERTIFICATE: Final = "certificate.pem"
FOLDER_MODE: Final = 0o700
JOIN_ANEW: Final = "move the folder away and join anew, by a new join token"
log = structlog.get_logger("llmgw.identity")


def ca_folder(settings: Settings) -> Path:
    """Where this control plane's CA is: beside the store's file, which several of one machine share, else in its data directory."""
    path = settings.store_path
    replicated = settings.store is not None and bool(settings.store.replica)
    return (settings.server.data_path if path is None or replicated else path.parent) / CA_FOLDER


def mark_joined(machine: Machine, data_dir: Path, cluster: str) -> None:
    """This machine's control plane is one of a cluster that others have begun. Blocking. Raises OSError."""
    machine.disk.write(data_dir / JOINED_FILE, cluster.encode())


def joined_cluster(machine: Machine, data_dir: Path) -> ClusterId | None:
    """The cluster that this machine's control plane has joined; None where it began one. Blocking. Raises Invalid, Unavailable."""
    data = _read(machine, data_dir / JOINED_FILE, "the mark of the cluster that was joined")
    return ClusterId(data.decode("ascii", "replace").strip()) if data else None


def load_authority(machine: Machine, folder: Path) -> Authority | None:
    """The CA with its key, None where there is neither. Blocking. Raises Invalid, Unavailable, naming the file."""
    key = _read(machine, folder / CA_KEY, "the CA's key")
    certificate = _read(machine, folder / CA_CERTIFICATE, "the CA's certificate")
    if key is None and certificate is None:
        return None
    if key is None or certificate is None:
        missing, there = (CA_KEY, CA_CERTIFICATE) if key is None else (CA_CERTIFICATE, CA_KEY)
        raise Invalid(f"{folder / missing} is missing beside {there}: put it back from a backup or from another control plane")
    _keep_private(folder / CA_KEY)
    try:
        return authorities.read_authority(key, certificate)
    except Invalid as err:
        raise Invalid(f"{folder}: {err.message}", code="bad_ca") from err


def ensure_authority(machine: Machine, folder: Path, cluster: str) -> Authority:
    """The CA, made for that cluster where there is none. Of two control planes that start at once both get the same key.

    Blocking. Raises Invalid, Unavailable.
    """
    if _read(machine, folder / CA_KEY, "the CA's key") is None and _read(machine, folder / CA_CERTIFICATE, "the CA's certificate") is None:
        made = authorities.make_ca(cluster, machine.wall_s(), machine.fresh_hex(SERIAL_BYTES))
        with _translated("the folder of the CA", folder):
            folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
            write_once(machine, folder / CA_KEY, made.key_pem.encode())  # whoever comes second takes this key
    key = _read(machine, folder / CA_KEY, "the CA's key")
    if key is not None and _read(machine, folder / CA_CERTIFICATE, "the CA's certificate") is None:
        # Ours, or that of somebody who has not come so far yet, or has ended in between: any certificate of the key is as good.
        made = authorities.certify(key, cluster, machine.wall_s(), machine.fresh_hex(SERIAL_BYTES))
        with _translated("the CA's certificate", folder / CA_CERTIFICATE):
            write_once(machine, folder / CA_CERTIFICATE, made.pem.encode())
    found = load_authority(machine, folder)
    if found is None:
        raise Invalid(f"{folder} was emptied while the CA was made there: start again", code="bad_ca")
    return found


def save_authority(machine: Machine, folder: Path, key_pem: str, certificate_pem: str) -> None:
    """What a control plane that joins was handed. Blocking. Raises Invalid, Unavailable; another CA there is not replaced."""
    with _translated("the folder of the CA", folder):
        folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        write_once(machine, folder / CA_KEY, key_pem.encode())
        write_once(machine, folder / CA_CERTIFICATE, certificate_pem.encode())
        if (folder / CA_KEY).read_bytes() != key_pem.encode():
            raise Invalid(f"{folder} holds another CA: move it away first")


@attrs.frozen
class Held:
    """What a machine joined by. `folder` holds its key, its certificate and the CA's."""

    folder: Path
    leaf: Leaf
    ca_pem: str
    key_pem: str = attrs.field(repr=False)

    @property
    def identity(self) -> MachineIdentity:
        return self.leaf.identity

    @property
    def certificate_file(self) -> Path:
        return self.folder / CERTIFICATE

    @property
    def key_file(self) -> Path:
        return self.folder / KEY

    def trust(self, others: str = "") -> Trust:
        """Whom to believe and what to show, by these files."""
        return Trust(self.ca_pem, others, certificate=self.certificate_file, key=self.key_file)


def load_held(machine: Machine, folder: Path, role: MachineRole) -> Held | None:
    """What this machine joined by as `role`; None: it has not. One that is over is no fault here: the other end says so.

    Blocking. Raises Invalid for files that do not belong together or are of another role, and Unavailable.
    """
    found = {name: _read(machine, folder / name, "a file of this machine's identity") for name in (KEY, CERTIFICATE, CA_CERTIFICATE)}
    if not any(found.values()):
        return None
    if missing := [name for name, data in found.items() if data is None]:
        raise Invalid(
            f"{folder / missing[0]} is missing, without which the rest of {folder} is of no use: {JOIN_ANEW}", code="bad_identity"
        )
    _keep_private(folder / KEY)
    key, certificate, ca = (found[name] or b"" for name in (KEY, CERTIFICATE, CA_CERTIFICATE))
    key_pem = key.decode("utf-8", "replace")
    try:
        leaf = certificates.read_leaf(certificate)
        certificates.check_leaf(leaf, key_pem, authorities.read_ca(ca), leaf.not_before_wall_s, role)
    except Invalid as err:
        raise Invalid(f"{folder}: {err.message}; {JOIN_ANEW}", code=err.code) from err
    return Held(folder, leaf, ca.decode(), key_pem)


def save_held(machine: Machine, folder: Path, key_pem: str, certificate_pem: str, ca_pem: str) -> None:
    """Blocking; the certificate last, which makes the folder whole. Raises Invalid, Unavailable."""
    with _translated("the folder of this machine's identity", folder):
        folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        machine.disk.write(folder / KEY, key_pem.encode())
        machine.disk.write(folder / CA_CERTIFICATE, ca_pem.encode())
        machine.disk.write(folder / CERTIFICATE, certificate_pem.encode())


def save_certificate(machine: Machine, held: Held, certificate_pem: str) -> None:
    """A renewed one, for the same key. Blocking. Raises Invalid, Unavailable."""
    with _translated("this machine's certificate", held.certificate_file):
        machine.disk.write(held.certificate_file, certificate_pem.encode())


def issue_own(
    machine: Machine, folder: Path, ca: Authority, identity: MachineIdentity, addresses: tuple[str, ...], *, anew: bool = False
) -> tuple[Held, Issued | None]:
    """A control plane's own certificate, by its own CA: what stands in the folder where that still fits, else a new one.

    `anew`: a new one in any case. Blocking. (what is there now, what was made). Raises Invalid, Unavailable.
    """
    held = None
    with contextlib.suppress(Invalid):  # of another CA, another role: made anew
        held = load_held(machine, folder, identity.role)
    if held is not None and not anew and _fits(held, ca, identity, addresses, machine.wall_s()):
        return held, None
    fits = held is not None and held.identity == identity
    key_pem = held.key_pem if held is not None and fits else authorities.make_key()
    key = authorities.public_key_of(key_pem)
    issued = authorities.issue(ca, key, identity, addresses, machine.wall_s(), machine.fresh_hex(SERIAL_BYTES))
    save_held(machine, folder, key_pem, issued.pem, ca.pem)
    again = load_held(machine, folder, identity.role)
    assert again is not None, "it was just written"
    return again, issued


def _fits(held: Held, ca: Authority, identity: MachineIdentity, addresses: tuple[str, ...], wall_s: float) -> bool:
    leaf = held.leaf
    return (
        held.ca_pem == ca.pem
        and held.identity == identity
        and certificates.covers(leaf, addresses)
        and leaf.not_before_wall_s <= wall_s < leaf.renew_at_wall_s
    )


def as_issued(held: Held) -> Issued:
    """A certificate that was made at an earlier start, as it was when it was made."""
    shown = held.leaf.presented
    return Issued(authorities.pem_of(held.leaf.certificate), shown.serial, held.identity, shown.not_before_wall_s, shown.not_after_wall_s)


def _read(machine: Machine, path: Path, what: str) -> bytes | None:
    with _translated(what, path):
        return machine.disk.read(path)


def _keep_private(path: Path) -> None:
    with _translated("a key", path):
        if stat.S_IMODE(os.stat(path).st_mode) & 0o077:
            log.warning("a key can be read by others; its mode is set to 0600", file=str(path))
            os.chmod(path, 0o600)


@contextlib.contextmanager
def _translated(what: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as err:
        raise unusable(err, what, path, "move it away") from err
