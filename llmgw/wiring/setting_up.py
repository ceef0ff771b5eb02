"""What `llmgw init` and `llmgw join` do: files of a machine that is being set up. Synchronous; run again, it does what is left to do.

Nothing that is there is overwritten: a file is kept or amended by single keys, with a copy of how it was.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import socket
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import attrs
import tomli_w

from llmgw.domain.errors import Conflict, Denied, Invalid, NotFound
from llmgw.domain.files import unusable
from llmgw.domain.identity import MachineRole
from llmgw.domain.ports import Machine
from llmgw.identity.ca import address_fault, make_key
from llmgw.identity.join_tokens import JoinToken, hash_secret, token_id
from llmgw.settings.address import TcpAddress, parse_listen
from llmgw.settings.file_edit import with_keys
from llmgw.settings.load import Loaded, Role, load_bytes, load_file
from llmgw.wiring.dialling import identity_folder
from llmgw.wiring.identity_files import (
    CA_FOLDER,
    CA_KEY,
    JOINED_FILE,
    ca_folder,
    ensure_authority,
    load_authority,
    load_held,
    mark_joined,
    save_authority,
    save_held,
)
from llmgw.wiring.joining import join
from llmgw.wiring.machine import RealMachine
from llmgw.wiring.tokens import TOKEN_BYTES, ensure_token

ADMIN_TOKEN_FILE: Final = "admin-token"  # as `wiring.server` has it
PRIVATE_STORE: Final = "state.db"  # likewise
CLUSTER_ID_BYTES: Final = 8
FILE_MODE: Final = 0o644  # it holds no secret
FOLDER_MODE: Final = 0o700
SERVICE_USER: Final = "llmgw"  # of the package's units
FOLDERS: Final = {"server": "/var/lib/llmgw", "router": "/var/lib/llmgw-router", "agent": "/var/lib/llmgw-agent"}
PENDING: Final = "joining-{}.pem"  # the key by which a machine joins, until it has; by the token's id
ADMIN_PORT: Final = 8081  # of `[server] admin_listen`, where a file says nothing else
KEPT_AS: Final = ".before-join"
_LOCAL_PLANES: Final = (("http://127.0.0.1:8081",), ())  # of a file that names no other machine yet


@attrs.frozen
class Wanted:
    """What was asked for; "" is the default."""

    role: str = "server"
    name: str = ""
    store: str = "file"
    s3_endpoint: str = ""
    s3_region: str = ""
    s3_credentials: str = ""
    listen: str = ""
    advertise: str = ""
    data_dir: Path | None = None


def set_up(config: Path, wanted: Wanted) -> list[str]:
    """Writes the file where there is none, and makes what a control plane begins with. What was done, in lines.

    Raises Invalid, Conflict, Unavailable.
    """
    said = []
    machine = RealMachine()
    if config.exists():
        loaded = load_file(config)
        said.append(f"kept {config}, which was there")
    else:
        text = file_text(wanted)
        loaded = attrs.evolve(load_bytes(text.encode(), source=str(config), role=_ROLES[wanted.role]), path=config)
        if wanted.role == "server":  # the CA and the token go there
            check_writable(loaded.settings.server.data_path, "the data directory")
        write_new(config, text)
        said.append(f"wrote {config}")
    if wanted.role == "server":
        said += _begin_server(machine, loaded)
    return [*said, _next_step(wanted, config)]


_ROLES: Final = {"server": Role.SERVER, "router": Role.ROUTER, "agent": Role.AGENT}


def file_text(wanted: Wanted) -> str:
    """The settings file of a machine of that role."""
    folder = str(wanted.data_dir or FOLDERS[wanted.role])
    name = wanted.name or socket.gethostname().partition(".")[0]
    tables: dict[str, Any]
    if wanted.role == "server":
        server = {"name": name, "data_dir": folder, "admin_listen": wanted.listen or "127.0.0.1:8081"}
        if wanted.advertise:
            server["advertise"] = wanted.advertise
        tables = {"server": server}
        if wanted.store != "none":
            tables["store"] = {"path": "llmgw.db"} if wanted.store == "file" else _on_bucket(wanted)
        tables["router"] = {"listen": "127.0.0.1:8080"}
        tables["auth"] = {"required": True}
    else:
        planes = {"control_planes": ["http://127.0.0.1:8081"], "data_dir": folder}
        tables = (
            {"agent": {"name": name, **planes}}
            if wanted.role == "agent"
            else {"router": {"listen": wanted.listen or "127.0.0.1:8080", **planes}}
        )
    return f"# Written by `llmgw init`. Every setting: llmgw.toml.example, docs/reference/settings.md.\n{tomli_w.dumps(tables)}"


def _on_bucket(wanted: Wanted) -> dict[str, str]:
    """`[store]` of a replicated store."""
    said = {"s3_endpoint": wanted.s3_endpoint, "s3_region": wanted.s3_region, "s3_credentials": wanted.s3_credentials}
    return {"replica": wanted.store, **{key: value for key, value in said.items() if value}}


def _begin_server(machine: Machine, loaded: Loaded) -> list[str]:
    """The CA and the first admin token of a control plane."""
    settings = loaded.settings
    data_dir = settings.server.data_path
    said = []
    folder = ca_folder(settings)
    with _given_to_service(data_dir, folder):
        make_folder(data_dir)
        if load_authority(machine, folder) is not None:
            said.append(f"kept the CA in {folder}, which was there")
        elif (store := settings.store_path or data_dir / PRIVATE_STORE).exists():
            said.append(f"the store {store} is there already: its control plane makes the CA when it needs one")
        else:
            made = ensure_authority(machine, folder, f"c-{machine.fresh_hex(CLUSTER_ID_BYTES)}")
            key = folder / CA_KEY
            said.append(f"made the CA of cluster {made.cluster}; its key is in {key} and nowhere else: back it up")
        token = data_dir / ADMIN_TOKEN_FILE
        there = token.exists()
        ensure_token(machine, token, "the admin token")
        said.append(f"{'kept' if there else 'wrote'} the admin token: {token}")
    return said


def _next_step(wanted: Wanted, config: Path) -> str:
    if wanted.role == "server" and wanted.store.startswith("s3://") and not wanted.s3_credentials:
        return f"next: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY into its environment, then llmgw server --config {config}"
    if wanted.role != "server":
        return f"next: llmgw {wanted.role} --config {config} (or `echo TOKEN | llmgw join`, for control planes on other machines)"
    return f"next: llmgw server --config {config}"


def new_admin_token(config: Path) -> list[str]:
    """Writes a new token over the file of the control plane of this machine, which takes it within seconds, or at its start.

    The tokens that are known stay valid until they are revoked. Raises NotFound, Invalid, Unavailable.
    """
    loaded = load_file(config)
    machine = RealMachine()
    data_dir = loaded.settings.server.data_path
    path = data_dir / ADMIN_TOKEN_FILE
    with _given_to_service(data_dir):
        make_folder(data_dir)
        try:
            machine.disk.write(path, f"{machine.fresh_hex(TOKEN_BYTES)}\n".encode())
        except OSError as err:
            raise unusable(err, "the file of the admin token", path) from err
    return [f"wrote a new admin token: {path}", "a control plane that runs there takes it within seconds; older tokens stay valid"]


def join_by(token: JoinToken, config: Path, name: str, address: str, data_dir: Path | None, others: str) -> list[str]:
    """Joins as the token says, and sets the machine up for it. What was done, in lines. Raises what refuses it, before the token is used
    where that can be known."""
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
    pending = identity_folder(folder) / PENDING.format(token_id(hash_secret(token.secret)))
    key = _pending_key(machine, pending)
    if held is not None and held.leaf.not_after_wall_s > machine.wall_s() and held.key_pem != key:
        raise Conflict(
            f"this machine has joined already, as {held.identity.label} of cluster {held.identity.cluster}: "
            f"move {identity_folder(folder)} away to join anew",
            code="joined_already",
        )
    amended(text, role, called, folder, address, token.addresses, loaded, others, {})  # told before the token is used up
    check_writable(config.parent, "the folder of the settings file")
    with _given_to_service(folder):
        make_folder(folder)
        check_writable(folder, "the data directory")
        if not key and role is MachineRole.SERVER and load_authority(machine, folder / CA_FOLDER) is not None:
            raise Conflict(f"{folder / CA_FOLDER} holds a CA already: this machine is a control plane of a cluster", code="joined_already")
        told = urlsplit(loaded.settings.server.advertise).hostname if role is MachineRole.SERVER else None
        own = [one for one in (address or told,) if one]
        begun = bool(key)
        if not begun:
            key = make_key()
            _keep_pending(machine, pending, key)
        try:
            joined = join(token, called, [one for one in own if address_fault(one) is None], others, key)
        except (Denied, NotFound, Conflict):
            if not begun:
                pending.unlink(missing_ok=True)  # it was not let in, so nothing is left to be resumed
            raise
        if role is MachineRole.SERVER:
            save_authority(machine, folder / CA_FOLDER, joined.ca_key_pem, joined.ca_pem)
            mark_joined(machine, folder, joined.cluster)
        save_held(machine, identity_folder(folder), joined.key_pem, joined.certificate_pem, joined.ca_pem)
    after = amended(text, role, called, folder, address, joined.control_planes, loaded, others, joined.store)
    said = [f"joined cluster {joined.cluster} as {role.value} {called}; its certificate is in {identity_folder(folder)}"]
    if text is None:
        write_new(config, after)
        said.append(f"wrote {config}")
    elif after != text:
        kept = config.with_name(config.name + KEPT_AS)
        write_new(kept, text, replace=True)
        write_new(config, after, replace=True)
        said.append(f"amended {config}; as it was: {kept}")
    for left in identity_folder(folder).glob(PENDING.format("*")):
        left.unlink(missing_ok=True)
    if role is MachineRole.SERVER and "s3_credentials" not in tomllib.loads(after).get("store", {}):
        said.append("it needs credentials for the store's bucket: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or [store] s3_credentials")
    said.append(f"next: llmgw {role.value} --config {config}")
    return said


def _pending_key(machine: Machine, path: Path) -> str:
    """The key by which this machine began to join by that token and did not come to the end of it, "" where it did not."""
    try:
        return (machine.disk.read(path) or b"").decode()
    except OSError as err:
        raise unusable(err, "the key of a join that was begun", path, "move it away") from err


def _keep_pending(machine: Machine, path: Path, key: str) -> None:
    """Before the token is shown: whoever lets this machine in lets in this key, and it alone may ask again."""
    try:
        path.parent.mkdir(mode=FOLDER_MODE, exist_ok=True)
        machine.disk.write(path, key.encode())
    except OSError as err:
        raise unusable(err, "the key of this machine", path) from err


def read_file(config: Path) -> tuple[str | None, Loaded]:
    """(the text, None where there is no file; what it says). Raises Invalid."""
    if not config.exists():
        return None, load_bytes(b"", source=str(config))
    loaded = load_file(config)
    return config.read_text(encoding="utf-8"), loaded


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


_MADE: Final = "# Written by `llmgw join`. Every setting: llmgw.toml.example, docs/reference/settings.md.\n"


def write_new(path: Path, text: str, *, replace: bool = False) -> None:
    """Whole or not at all. Raises Conflict where it is there and not to be replaced, and what `unusable` makes of the rest."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            if replace:
                os.replace(temporary, path)
            else:
                os.link(temporary, path)  # fails where there is one
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
    except FileExistsError as err:
        raise Conflict(f"{path} is there already and is left as it is", code="file_exists") from err
    except OSError as err:
        raise unusable(err, "the settings file", path) from err


def check_writable(folder: Path, what: str) -> None:
    """Can files be made there, or in what it would be made in? Raises Invalid, Unavailable."""
    there = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())
    trial = there / f".llmgw-trial.{os.getpid()}"
    try:
        os.close(os.open(trial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        os.unlink(trial)
    except OSError as err:
        raise unusable(err, what, folder) from err


def make_folder(folder: Path) -> None:
    """Raises Invalid, Unavailable."""
    try:
        folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    except OSError as err:
        raise unusable(err, "the data directory", folder) from err


@contextlib.contextmanager
def _given_to_service(folder: Path, ca: Path | None = None) -> Iterator[None]:
    """What root makes in `folder`, and in that of the CA, belongs to whoever owns it, or to the package's user where it is made now."""
    owner: tuple[int, int] | None = None
    if os.geteuid() == 0:
        if folder.exists():
            found = folder.stat()
            owner = (found.st_uid, found.st_gid)
        else:
            with contextlib.suppress(KeyError):
                user = pwd.getpwnam(SERVICE_USER)
                owner = (user.pw_uid, user.pw_gid)
    try:
        yield
    finally:
        _give(folder, ca, owner)


def _give(folder: Path, ca: Path | None, owner: tuple[int, int] | None) -> None:
    if owner is not None and owner[0] != 0 and folder.exists():
        made = [folder, folder / ADMIN_TOKEN_FILE, folder / JOINED_FILE]
        for inner in (identity_folder(folder), folder / CA_FOLDER, *([ca] if ca is not None else [])):
            made += [inner, *inner.glob("*")]
        for path in made:
            if path.exists():
                os.chown(path, *owner, follow_symlinks=False)
