"""What `llmgw init` does by itself: the files that a machine begins with. Synchronous; run again, it does what is left to do.

Nothing that is there is overwritten.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any, Final

import attrs
import tomli_w

from llmgw.domain.files import unusable
from llmgw.domain.ports import Machine
from llmgw.settings.load import Loaded, Role, load_bytes, load_file
from llmgw.wiring.identity_files import (
    CA_KEY,
    ca_folder,
    ensure_authority,
    load_authority,
)
from llmgw.wiring.machine import RealMachine
from llmgw.wiring.setup_files import ADMIN_TOKEN_FILE, check_writable, given_to_service, make_folder, write_new
from llmgw.wiring.tokens import TOKEN_BYTES, ensure_token

PRIVATE_STORE: Final = "state.db"  # as `wiring.server` has it
CLUSTER_ID_BYTES: Final = 8
FOLDERS: Final = {"server": "/var/lib/llmgw", "router": "/var/lib/llmgw-router", "agent": "/var/lib/llmgw-agent"}


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
    with given_to_service(data_dir, folder):
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
    with given_to_service(data_dir):
        make_folder(data_dir)
        try:
            machine.disk.write(path, f"{machine.fresh_hex(TOKEN_BYTES)}\n".encode())
        except OSError as err:
            raise unusable(err, "the file of the admin token", path) from err
    return [f"wrote a new admin token: {path}", "a control plane that runs there takes it within seconds; older tokens stay valid"]
