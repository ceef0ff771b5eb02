"""What `llmgw join` and `llmgw init --bundle` do on the machine that joins. Synchronous; run again, it does what is left to do.

Whatever can be refused is refused before the token is shown to anybody, and before anything is written.
"""

from __future__ import annotations

import socket
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import attrs

from llmgw.domain.errors import Conflict, Denied, Invalid, NotFound
from llmgw.domain.identity import MachineRole
from llmgw.domain.ports import Machine
from llmgw.identity.bundle import Bundle
from llmgw.identity.ca import address_fault, make_key
from llmgw.identity.join_tokens import JoinToken
from llmgw.settings.address import TcpAddress, parse_listen
from llmgw.settings.document import parse_document
from llmgw.settings.file_edit import with_keys
from llmgw.settings.layers import effective
from llmgw.settings.load import Loaded, load_bytes
from llmgw.wiring import pending_join
from llmgw.wiring.dialling import identity_folder
from llmgw.wiring.identity_files import CA_FOLDER, load_authority, load_held
from llmgw.wiring.joining import join
from llmgw.wiring.machine import RealMachine
from llmgw.wiring.setup_files import amend, check_writable, given_to_service, make_folder, read_file

ADMIN_PORT: Final = 8081  # of `[server] admin_listen`, where a file says nothing else
_LOCAL_PLANES: Final = (("http://127.0.0.1:8081",), ())  # of a file that names no other machine yet


@attrs.frozen
class _Arrival:
    """A machine that is to join: what its file says (`text` None: there is none), what it is called, by which key it began to join."""

    machine: Machine
    token: JoinToken
    name: str
    address: str
    config: Path
    text: str | None
    loaded: Loaded
    folder: Path
    key: str = attrs.field(repr=False)

    @property
    def role(self) -> MachineRole:
        return self.token.role

    @property
    def addresses(self) -> list[str]:
        """Its own, for its certificate."""
        told = urlsplit(self.loaded.settings.server.advertise).hostname if self.role is MachineRole.SERVER else None
        return [one for one in (self.address or told,) if one and address_fault(one) is None]

    def file(self, control_planes: tuple[str, ...], others: str, store: Mapping[str, str]) -> str:
        return amended(self.text, self.role, self.name, self.folder, self.address, control_planes, self.loaded, others, store)

    def make_ready(self) -> None:
        """The data directory. Raises Invalid, Unavailable, Conflict."""
        make_folder(self.folder)
        check_writable(self.folder, "the data directory")
        ca = self.folder / CA_FOLDER
        if not self.key and self.role is MachineRole.SERVER and load_authority(self.machine, ca) is not None:
            raise Conflict(f"{ca} holds a CA already: this machine is a control plane of a cluster", code="joined_already")


def join_by(token: JoinToken, config: Path, name: str, address: str, data_dir: Path | None, others: str) -> list[str]:
    """Joins as the token says, and sets the machine up for it. What was done, in lines. Raises what refuses it."""
    arrival = _arrive(token, config, name, address, data_dir)
    arrival.file(token.addresses, others, {})  # told before the token is used up
    check_writable(config.parent, "the folder of the settings file")
    machine, folder = arrival.machine, arrival.folder
    with given_to_service(folder):
        arrival.make_ready()
        key = arrival.key
        if not key:
            key = make_key()
            pending_join.keep_key(machine, folder, token, key)
        try:
            joined = join(token, arrival.name, arrival.addresses, others, key)
        except (Denied, NotFound, Conflict):
            if not arrival.key:
                pending_join.forget(folder, token)  # it was not let in, so nothing is left to be resumed
            raise
        pending_join.keep_joined(machine, folder, joined)
    after = arrival.file(joined.control_planes, others, joined.store)
    said = [f"joined cluster {joined.cluster} as {joined.role.value} {arrival.name}; its certificate is in {identity_folder(folder)}"]
    said += amend(config, arrival.text, after)
    pending_join.forget(folder)
    return said + _next(arrival, after)


def prepare_by(bundle: Bundle, config: Path, address: str, data_dir: Path | None) -> list[str]:
    """Sets the machine up as the bundle says, without asking anybody: its control plane joins at its first start. What was done.

    Raises what refuses it.
    """
    token = bundle.token
    arrival = _arrive(token, config, "", address or bundle.address, data_dir)
    machine, folder = arrival.machine, arrival.folder
    if machine.wall_s() >= bundle.expires_wall_s:
        raise Denied(
            f"the bundle has expired, unless the clock here is wrong: `llmgw server add {token.name} --bundle FILE` makes another",
            code="join_token_expired",
        )
    after = arrival.file(token.addresses, "", bundle.store)
    _check_settings(bundle, after, str(config))
    check_writable(config.parent, "the folder of the settings file")
    begun = bool(arrival.key)
    with given_to_service(folder):
        arrival.make_ready()
        pending_join.prepare(machine, folder, bundle, tuple(arrival.addresses), arrival.key or make_key())
    did = "kept" if begun else "prepared"
    said = f"{did} the join of control plane {token.name} to cluster {bundle.cluster}: its first start asks {', '.join(token.addresses)}"
    return [said, *(amend(config, arrival.text, after) or [f"kept {config}, which says all of it"]), *_next(arrival, after)]


def _arrive(token: JoinToken, config: Path, name: str, address: str, data_dir: Path | None) -> _Arrival:
    """Raises Invalid, Conflict, Unavailable for whatever is in the way of this machine's joining."""
    machine = RealMachine()
    if name and token.name and name != token.name:
        raise Conflict(f"the join token is for {token.name}, and --name says {name}", code="join_token_name")
    called = name or token.name or socket.gethostname().partition(".")[0]
    if address and (fault := address_fault(address)) is not None:
        raise Invalid(f"--address: {fault}", param="address")
    role = token.role
    text, loaded = read_file(config)
    if role is MachineRole.SERVER and not address and not loaded.settings.server.advertise:
        raise Invalid(
            "a control plane is reached by the other machines: say --address HOST, the name or address by which they reach this one",
            param="address",
        )
    folder = _folder(role, loaded, data_dir)
    held = load_held(machine, identity_folder(folder), role)
    key = pending_join.pending_key(machine, folder, token)
    if held is not None and held.leaf.not_after_wall_s > machine.wall_s() and held.key_pem != key:
        raise Conflict(
            f"this machine has joined already, as {held.identity.label} of cluster {held.identity.cluster}: "
            f"move {identity_folder(folder)} away to join anew",
            code="joined_already",
        )
    return _Arrival(machine, token, called, address, config, text, loaded, folder, key)


def _check_settings(bundle: Bundle, file: str, source: str) -> None:
    """Would this machine start with the cluster's settings? Raises Invalid."""
    try:
        effective(load_bytes(file.encode(), source=source), parse_document(bundle.settings, f"settings version {bundle.version}"))
    except Invalid as err:
        raise Invalid(f"the cluster's settings do not go with {source}: {err.message}", code=err.code, param=err.param) from err


def _next(arrival: _Arrival, file: str) -> list[str]:
    said = []
    if arrival.role is MachineRole.SERVER and "s3_credentials" not in tomllib.loads(file).get("store", {}):
        said.append("it needs credentials for the store's bucket: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or [store] s3_credentials")
    return [*said, f"next: llmgw {arrival.role.value} --config {arrival.config}"]


def _folder(role: MachineRole, loaded: Loaded, data_dir: Path | None) -> Path:
    settings = loaded.settings
    of_file = {
        MachineRole.SERVER: settings.server.data_dir,
        MachineRole.AGENT: settings.agent.data_dir,
        MachineRole.ROUTER: settings.router.data_dir,
    }[role]
    return (data_dir or Path(of_file).expanduser()).absolute()


def amended(
    text: str | None,
    role: MachineRole,
    name: str,
    folder: Path,
    address: str,
    control_planes: tuple[str, ...],
    loaded: Loaded,
    others: str,
    store: Mapping[str, str],
) -> str:
    """The file's text with what this machine has joined as. Raises Conflict where the file says something else, or cannot be amended."""
    settings = loaded.settings
    keys: dict[str, Any]
    if role is MachineRole.SERVER:
        keys = {"name": name, "data_dir": str(folder)}
        if address:
            listen = parse_listen(settings.server.admin_listen)
            port = (listen.port if isinstance(listen, TcpAddress) else 0) or ADMIN_PORT
            outside = (settings.server.advertise and urlsplit(settings.server.advertise).port) or port
            keys |= {"admin_listen": str(TcpAddress(address, port)), "advertise": f"https://{TcpAddress(address, outside)}"}
        after = with_keys(text or _MADE, "server", keys)
        if kept := {key: value for key, value in store.items() if value}:
            after = with_keys(after, "store", kept)
    else:
        table = role.value
        named = settings.agent.control_planes if role is MachineRole.AGENT else settings.router.control_planes
        if named not in _LOCAL_PLANES and not any(url.startswith("https://") for url in named):
            raise Conflict(
                f"{loaded.source}: {table}.control_planes names {', '.join(named)}, which it then does not dial: take them out",
                code="other_control_planes",
            )
        planes = list(dict.fromkeys([*(url for url in named if url.startswith("https://")), *control_planes]))
        keys = {"control_planes": planes, "data_dir": str(folder)}
        if role is MachineRole.AGENT:
            keys["name"] = name
            if address:
                keys["address"] = address
        after = with_keys(text or _MADE, table, keys)
    if others:
        after = with_keys(after, "tls", {"ca": others})
    load_bytes(after.encode(), source=loaded.source)
    return after


_MADE: Final = "# Written as this machine joined. Every setting: llmgw.toml.example, docs/reference/settings.md.\n"
