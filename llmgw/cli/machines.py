"""`add`, `list` and `rm` of machines, the same for each role: they ask the admin API, and print ONE command for the new machine."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import click

from llmgw.cli.confirm import confirm
from llmgw.cli.ctl.client import segment
from llmgw.cli.ctl.config import when
from llmgw.cli.ctl.output import Ctl, echo, shared, table
from llmgw.cli.ctl.output import key as value_of
from llmgw.cli.ctl.waiting import WAIT_S, no_replicas, wait_done
from llmgw.cli.paths import PathOption
from llmgw.domain.errors import Conflict, LlmgwError, NotFound

UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
NOUNS: Final = {"agent": "node"}  # what the command of a role is called, where it is not the role
SETTLES_S: Final = 30.0  # a hand-over takes a tenth of a second; a standby that does not come is told as that


class Duration(click.ParamType):  # type: ignore[type-arg]
    """`90s`, `30m`, `12h`, `7d`, in seconds."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, int | float):
            return float(value)
        found = re.fullmatch(r"([0-9]{1,6})([smhd])", str(value).strip())
        if found is None:
            self.fail(f"expected a time such as 30m, 12h or 7d, not {value!r}", param, ctx)
        return float(int(found[1]) * UNITS[found[2]])


def _add(role: str, title: str) -> click.Command:
    @click.command("add", help=f"Let one more machine in as {title}: prints the command to run there. The token in it is good once.")
    @click.argument("name", required=False, default="")
    @click.option("--expires", type=Duration(), default="1h", show_default=True, metavar="TIME", help="How long the token may be used.")
    @_for_servers(role)
    @shared
    def add(ctl: Ctl, name: str, expires: float, bundle: Path | None = None, address: str | None = None) -> None:
        asked: dict[str, Any] = {"role": role, "name": name, "expires_in_s": expires}
        if bundle is not None:
            _add_by_bundle(ctl, asked, bundle, address or "")
            return
        if address is not None:
            raise click.UsageError("--address goes with --bundle")
        answer = ctl.client.send("POST", "join-tokens", asked)
        body = answer.body if isinstance(answer.body, dict) else {}
        if ctl.output != "table":
            ctl.print(body, list)
            return
        until = when(body.get("expires_at"))
        click.echo(f"llmgw: run this on the new machine, once, until {until}; whoever has it may join:", err=True)
        if role == "server":
            click.echo("llmgw: with `--address HOST` behind it, the name or address by which the others reach that machine", err=True)
        echo(command_for(str(body.get("token", ""))))

    return add


def _list(role: str, title: str) -> click.Command:
    @click.command("list", help=f"Which machines have joined as {title}, and which may.")
    @shared
    def list_(ctl: Ctl) -> None:
        held = [row for row in ctl.listing("identities")["identities"] if row.get("role") == role]
        invited = [row for row in ctl.listing("join-tokens")["join-tokens"] if row.get("role") == role and row.get("state") == "valid"]
        rows = newest(held) + [{**row, "state": "invited", "name": row.get("name") or "(any)"} for row in invited]
        ctl.print(
            {"machines": rows}, lambda: table(rows, _COLUMNS, f"none has joined: `llmgw {NOUNS.get(role, role)} add NAME` lets one in")
        )

    return list_


def _for_servers(role: str) -> Callable[[Any], Any]:
    """The options that only control planes are added with."""
    bundle = click.option(
        "--bundle", type=PathOption(), metavar="FILE", help="Write what `llmgw init --bundle` takes, for a machine that reaches nobody yet."
    )
    address = click.option("--address", metavar="HOST", help="With --bundle: where the others will reach that machine.")
    return lambda command: bundle(address(command)) if role == "server" else command


def _add_by_bundle(ctl: Ctl, asked: Mapping[str, Any], file: Path, address: str) -> None:
    """One file (0600) in place of the command. Its token ends where it cannot be written."""
    from llmgw.wiring.setup_files import SECRET_MODE, check_writable, write_new

    if not asked["name"]:
        raise click.UsageError("a bundle is for one machine: name it")
    if file.exists():
        raise Conflict(f"{file} is there already and is left as it is", code="file_exists")
    check_writable(file.absolute().parent, "the folder of the bundle")
    answer = ctl.client.send("POST", "join-tokens", {**asked, "bundle": True, "address": address})
    body = answer.body if isinstance(answer.body, dict) else {}
    try:
        write_new(file, str(body.get("bundle", "")), mode=SECRET_MODE, what="the bundle")
    except LlmgwError:
        ctl.client.send("POST", f"join-tokens/{segment(str(body.get('id')))}/revoke", {})
        raise
    told = {name: value for name, value in body.items() if name not in ("token", "bundle")}
    if ctl.output != "table":
        ctl.print({**told, "bundle": str(file)}, list)
        return
    until = when(body.get("expires_at"))
    click.echo(f"llmgw: wrote {file}; whoever has it may join, once, until {until}. Bring it over, and run there:", err=True)
    if not address:
        click.echo("llmgw: with `--address HOST` behind it, the name or address by which the others reach that machine", err=True)
    echo(f"sudo llmgw init --bundle {shlex.quote(file.name)}")


def _node_rm() -> click.Command:
    @click.command("rm")
    @click.argument("name")
    @click.option("--deadline", type=click.FloatRange(0), metavar="SECONDS", help="Stop what is still busy after this long.")
    @click.option("--wait-limit", type=click.FloatRange(0), default=WAIT_S, show_default=True, metavar="SECONDS", help="Longest wait.")
    @click.option("--yes", "-y", is_flag=True, help="Do not ask.")
    @shared
    def remove(ctl: Ctl, name: str, deadline: float | None, wait_limit: float, yes: bool) -> None:
        """Remove a node: drain it, wait until nothing runs there, end its certificate, forget it."""
        confirm(f"Drain and remove node {name}?", yes)
        known = any(row.get("name") == name for row in ctl.listing("nodes")["nodes"])
        if known:
            ctl.client.send("POST", f"nodes/{segment(name)}/drain", {} if deadline is None else {"deadline_s": deadline})
            wait_done(no_replicas(ctl, "node", name), wait_limit)
        ended = _revoke(ctl, "agent", name, needed=not known)
        if known:
            ctl.client.send("DELETE", f"nodes/{segment(name)}")
        ctl.print({"name": name, "change": "removed", **ended}, lambda: [f"node {name}: removed{_ended(ended)}"])

    return remove


def _rm(role: str, title: str) -> click.Command:
    @click.command("rm", help=f"Take a machine out that has joined as {title}: its certificate ends, and its sessions with it.")
    @click.argument("name")
    @click.option("--yes", "-y", is_flag=True, help="Do not ask.")
    @shared
    def remove(ctl: Ctl, name: str, yes: bool) -> None:
        confirm(f"Remove {role} {name}?", yes)
        if role == "server":
            _let_another_lead(ctl, name)
        ended = _revoke(ctl, role, name, needed=True)
        ctl.print({"name": name, "change": "removed", **ended}, lambda: [f"{role} {name}: removed{_ended(ended)}"])
        if ended["certificates"]:
            click.echo(f"llmgw: {_AFTER[role]}", err=True)

    return remove


_AFTER: Final = {
    "server": "end it on its own machine too; it has held the CA's key: whoever took a copy of that can make certificates",
    "router": "it goes on serving what it was last told: end it on its own machine too",
}


def _let_another_lead(ctl: Ctl, name: str) -> None:
    """Where it leads: that is its drain."""
    if ctl.object("leader").get("holder") != name:
        return
    ctl.client.send("POST", "leader/hand-over", {})

    def look() -> str | None:
        return f"{name} hands over" if ctl.object("leader").get("holder") in (name, None) else None

    wait_done(look, SETTLES_S)


def _revoke(ctl: Ctl, role: str, name: str, *, needed: bool) -> dict[str, int]:
    """How many certificates were valid, and how many join tokens open."""
    try:
        answer = ctl.client.send("POST", f"identities/{role}/{segment(name)}/revoke", {})
    except NotFound as err:
        if needed or err.code != "no_such_identity":
            raise
        return dict.fromkeys(_ENDED, 0)  # it came with the token file of its machine
    body = answer.body if isinstance(answer.body, dict) else {}
    return {what: int(body.get(what, 0)) for what in _ENDED}


_ENDED: Final = {"certificates": "certificate", "join_tokens": "join token"}


def _ended(ended: Mapping[str, int]) -> str:
    said = [f"{count} {_ENDED[what]}{'' if count == 1 else 's'}" for what, count in ended.items() if count]
    return f" ({', '.join(said)} revoked)" if said else ""


def command_for(token: str) -> str:
    """For a shell, which hands the token over by itself: the arguments of a program can be seen by every user of its machine."""
    return f"echo {token} | sudo llmgw join"


def newest(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The newest certificate of each machine; they come sorted by issue."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        found[str(row.get("role")), str(row.get("name"))] = row
    return list(found.values())


def _column(name: str) -> Any:
    return lambda row: when(row.get(name)) if isinstance(row, Mapping) else ""


_COLUMNS: Final = (
    ("NAME", value_of("name")),
    ("STATE", value_of("state")),
    ("EXPIRES", _column("expires_at")),
    ("ADDRESSES", value_of("addresses")),
    ("SERIAL", value_of("serial")),
    ("TOKEN", value_of("id")),
)

server_add, server_list, server_rm = _add("server", "a control plane"), _list("server", "a control plane"), _rm("server", "a control plane")
router_add, router_list, router_rm = _add("router", "a router"), _list("router", "a router"), _rm("router", "a router")
node_add, node_list, node_rm = _add("agent", "a node"), _list("agent", "a node"), _node_rm()
