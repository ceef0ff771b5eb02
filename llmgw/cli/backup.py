"""`llmgw backup` and `llmgw restore`: the store, the settings file and the cluster's tokens as one archive, and back."""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from llmgw.cli.confirm import confirm
from llmgw.cli.paths import PathOption

if TYPE_CHECKING:
    from llmgw.cli.ctl.places import Target
    from llmgw.settings.schema import Settings
    from llmgw.wiring.backup import Fetched

CONFIG: Final = "/etc/llmgw/llmgw.toml"
OLD_S: Final = 2.0  # a standby that hears its leader is less behind
MODE: Final = "x-store-mode"  # what the admin API says beside a copy, as `admin.api.store` has it
AGE: Final = "x-store-age-s"
SHA256: Final = "x-content-sha256"


@click.command()
@click.argument("file", type=PathOption())
@click.option("--config", type=PathOption(), default=CONFIG, show_default=True, help="The settings file of this machine's control plane.")
@click.option("--no-secrets", is_flag=True, help="Leave the tokens out. What models have in their environment stays in the store.")
@click.option("--server", default="", metavar="URL", help="A control plane of another machine: its store alone, by an admin's token.")
def backup(file: Path, config: Path, no_secrets: bool, server: str) -> None:
    """Write one archive of the cluster's store, the settings file and the tokens to FILE, which must not be there yet.

    Run it on the machine of any control plane, as its user. Where that runs it is asked for the store; else the files are read, or
    the replica. With --server it may be run anywhere, with the token in LLMGW_TOKEN as `llmgw ctl` takes it: settings file, tokens
    and CA are then not in the archive, because they do not leave their machine.
    """
    if server and click.get_current_context().get_parameter_source("config") is not click.core.ParameterSource.DEFAULT:
        raise click.UsageError("--config names the control plane of this machine, --server one of another: name one of them")
    from llmgw.cli.ctl.places import find
    from llmgw.cli.files import load
    from llmgw.settings.load import Role
    from llmgw.wiring.backup import take_backup, take_backup_from_afar
    from llmgw.wiring.machine import RealMachine
    from llmgw.wiring.runs import run_command

    target = file.absolute()
    if server:
        asked = find(server)
        manifest = run_command(lambda: take_backup_from_afar(RealMachine(), target, lambda into: fetch_from(asked, into)))
    else:
        loaded = load(config, Role.SERVER)
        manifest = run_command(
            lambda: take_backup(
                RealMachine(), loaded, target, secrets=not no_secrets, fetch=lambda into: fetch_store(loaded.settings, into)
            )
        )
    facts = manifest.facts
    click.echo(f"{file}: {described(facts.cluster_id, facts.epoch, facts.settings_version, facts.at_wall_s)}")
    click.echo(f"  {', '.join(part.name for part in manifest.parts)}; {sum(part.bytes for part in manifest.parts)} bytes")
    if facts.age_s is None:
        click.echo("llmgw: warning: nobody leads; when these rows were last all that there is, is not known", err=True)
    elif facts.age_s > OLD_S:
        click.echo(f"llmgw: warning: no leader is heard; these rows are {facts.age_s:.0f} s old", err=True)


@click.command()
@click.argument("file", type=PathOption())
@click.option("--config", type=PathOption(), default=CONFIG, show_default=True, help="The settings file: it says where the store is to be.")
@click.option("--with-settings", is_flag=True, help="First write the archive's settings file to --config, where none is.")
@click.option("--replace", is_flag=True, help="Also in the place of another cluster's store, and over tokens that differ.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def restore(file: Path, config: Path, with_settings: bool, replace: bool, yes: bool) -> None:
    """Put the store of an archive in the place of what is there, once every control plane of the cluster has ended.

    Everything in FILE is checked before anything is touched, and what was there is kept. The epoch rises by 1,000, so that agents
    and routers refuse whoever still has the store of before.
    """
    from llmgw.cli.files import load
    from llmgw.settings.load import Role
    from llmgw.wiring.machine import RealMachine
    from llmgw.wiring.restore import look_into, restore_backup
    from llmgw.wiring.runs import run_command

    facts, settings = look_into(file)
    loaded = None if with_settings else load(config, Role.SERVER)
    if not yes:
        click.echo(described(facts.cluster_id, facts.epoch, facts.settings_version, facts.at_wall_s))
    confirm("Restore it, in the place of what is there?", yes)
    if loaded is None:
        _write_settings(config, settings, file)
        loaded = load(config, Role.SERVER)
    done = run_command(lambda: restore_backup(RealMachine(), loaded, file.absolute(), replace=replace, say=say))
    click.echo(f"restored to {done.place}: {described(facts.cluster_id, done.epoch, facts.settings_version, facts.at_wall_s)}")
    if done.kept:
        click.echo(f"what was there is kept: {done.kept}")
    if done.tokens:
        click.echo(f"written: {', '.join(done.tokens)}")
    if done.tokens_left:
        click.echo(f"left as they are, though the archive has others (--replace takes those): {', '.join(done.tokens_left)}")


def say(text: str) -> None:
    """What takes long, on the standard error."""
    click.echo(text, err=True)


def described(cluster_id: str, epoch: int, settings_version: int, at_wall_s: float) -> str:
    """A backup in one line."""
    at = datetime.datetime.fromtimestamp(at_wall_s, datetime.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    settings = f"settings version {settings_version}" if settings_version else "no settings of its own"
    return f"cluster {cluster_id or '(not begun)'}, epoch {epoch}, {settings}, of {at}"


def _write_settings(config: Path, settings: bytes | None, file: Path) -> None:
    """Never over a file. Raises Invalid, Conflict, Unavailable."""
    from llmgw.domain.errors import Conflict, Invalid
    from llmgw.domain.files import unusable

    if settings is None:
        raise Invalid(f"{file} holds no settings file", code="no_settings")
    try:
        descriptor = os.open(config, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o640)
        with open(descriptor, "wb") as out:
            out.write(settings)
            out.flush()
            os.fsync(out.fileno())
    except FileExistsError as err:
        raise Conflict(f"{config} is there already: leave --with-settings out, or move it away", code="exists") from err
    except OSError as err:
        raise unusable(err, "the settings file", config) from err


def fetch_store(settings: Settings, into: Path) -> Fetched:
    """Puts the store of this machine's running control plane into a new file. Raises LlmgwError."""
    return fetch_from(own_target(settings), into)


def fetch_from(target: Target, into: Path) -> Fetched:
    """Puts the store of the control plane there into a new file. Raises LlmgwError."""
    from llmgw.cli.ctl.client import Client
    from llmgw.domain.errors import Unavailable
    from llmgw.wiring.backup import Fetched

    headers, sha256 = Client(target).download("store/copy", into)
    if headers.get(SHA256) != sha256:
        raise Unavailable("the copy of the store that the control plane gave is not whole: run it again", code="cut")
    age = headers.get(AGE)
    return Fetched(headers.get(MODE, ""), None if age is None else float(age))


def own_target(settings: Settings) -> Target:
    """This machine's control plane and its admin token. Raises Invalid, Unauthenticated."""
    from llmgw.cli.ctl.places import Target, reachable
    from llmgw.domain.errors import Invalid, Unauthenticated
    from llmgw.domain.files import reason
    from llmgw.settings.address import parse_listen
    from llmgw.wiring.identity_files import CA_CERTIFICATE, ca_folder

    server, ca = reachable(settings.server.admin_listen), settings.tls.ca
    if settings.tls.secures(loopback=parse_listen(settings.server.admin_listen).loopback):
        server = server.replace("http://", "https://", 1)
        if settings.tls.certificate:  # its name is what the certificate has
            server = settings.server.advertise.rstrip("/") or server
        else:
            ca = str(ca_folder(settings) / CA_CERTIFICATE)
    file = settings.server.data_path / "admin-token"
    try:
        token = file.read_text(encoding="ascii").strip()
    except UnicodeDecodeError as err:
        raise Invalid(f"{file} holds no token", code="bad_token_file") from err
    except OSError as err:
        raise Unauthenticated(f"{file}, this machine's admin token, cannot be read: {reason(err)}", code="no_token") from err
    return Target(server, token, ca)
