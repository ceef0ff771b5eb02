"""`ctl model`: what clients name. Tables are checked here before they are sent, so that a fault is told with its path at once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from llmgw.cli.confirm import confirm
from llmgw.cli.ctl.client import segment
from llmgw.cli.ctl.files import named, read_bytes
from llmgw.cli.ctl.output import Ctl, details, echo, items, key, shared, table, text, toml_text
from llmgw.cli.ctl.replica import REPLICA_COLUMNS
from llmgw.cli.ctl.waiting import models_ready, no_replicas, wait_done, waits
from llmgw.cli.paths import PathOption
from llmgw.cli.text import printable
from llmgw.domain.errors import Fault, Invalid


@click.group()
def model() -> None:
    """Models: what clients name."""


@model.command("list")
@shared
def list_models(ctl: Ctl) -> None:
    """Every model with its replicas."""
    body = ctl.listing("models")
    ctl.print(body, lambda: table(body["models"], _COLUMNS, "no models: `llmgw ctl model apply -f FILE` adds some"))


_COLUMNS = (
    ("MODEL", key("name")),
    ("READY", lambda row: f"{row.get('ready', 0)}/{row.get('replicas_wanted', 0)}"),
    ("STATE", key("state")),
    ("KIND", key("kind")),
    ("PROFILE", key("profile")),
    ("ALIASES", key("aliases")),
    ("REASON", key("reason")),
)


@model.command()
@click.argument("name")
@click.option("--as-file", is_flag=True, help="Print the [[model]] table alone, as `ctl model apply -f` takes it.")
@shared
def show(ctl: Ctl, name: str, as_file: bool) -> None:
    """One model: what was asked for and what is."""
    body = ctl.object(f"models/{segment(name)}")
    asked = body.get("model")
    if as_file:
        if not isinstance(asked, dict):
            raise Invalid("the answer holds no [[model]] table: is this the admin API's address?")
        echo(toml_text({"model": [asked]}), steered=False)
        return
    ctl.print(body, lambda: _model_lines(body))


def _model_lines(body: Any) -> list[str]:
    replicas = body.get("replicas")
    rows = replicas if isinstance(replicas, list) else []
    asked = body.get("model")
    lines = details({name: value for name, value in body.items() if not (value is replicas and rows) and value is not asked})
    if rows:
        lines += ["", *table(rows, REPLICA_COLUMNS, "")]
    if isinstance(asked, dict):
        lines += ["", *toml_text({"model": [asked]}).split("\n")]
    return lines


@model.command()
@click.option(
    "--file",
    "-f",
    type=PathOption(allow_dash=True),
    required=True,
    help="A file of [[model]] tables; - for standard input.",
)
@click.option("--dry-run", is_flag=True, help="Print what would change and write nothing.")
@waits
@shared
def apply(ctl: Ctl, file: Path, dry_run: bool, limit_s: float | None) -> None:
    """Create or change the models that FILE names; others stay as they are."""
    tables = read_models_file(file)
    answer = ctl.client.send("POST", "models:apply", {"models": tables, "dry_run": dry_run})
    body = answer.body

    def lines() -> list[str]:
        found = []
        for change in items(body, "changes"):
            would = "would be " if dry_run and change.get("change") != "unchanged" else ""
            found.append(f"model {change.get('model')}: {would}{change.get('change')}")
            found += [f"  {_difference(part)}" for part in change.get("diff") or ()]
        if dry_run:
            found.append("dry run: nothing was written")
        elif body.get("revision") is not None:
            found.append(f"revision {body['revision']}")
        return found

    if limit_s is not None and not dry_run:
        wait_done(models_ready(ctl, [str(change.get("model")) for change in items(body, "changes")]), limit_s)
    ctl.print(body, lines)


def _difference(part: object) -> str:
    if isinstance(part, dict):
        path = part.get("path", part.get("field", ""))
        before, after = (
            text(part.get(name)) or "-" for name in (("old" if "old" in part else "before"), ("new" if "new" in part else "after"))
        )
        return f"{path}: {before} -> {after}"
    return str(part)


def read_models_file(file: Path) -> list[dict[str, Any]]:
    """The `[[model]]` tables of a file, checked; what is worth a warning is printed. Raises Invalid with every fault."""
    from llmgw.settings import place_holders
    from llmgw.settings.load import FILE_BYTES_MAX
    from llmgw.settings.objects import read_models
    from llmgw.settings.toml_text import parse_toml

    source = named(file)
    data = read_bytes(file, FILE_BYTES_MAX)
    try:
        raw = parse_toml(data.decode("utf-8"), source)
    except UnicodeDecodeError as err:
        raise Invalid(f"{source} is not UTF-8 text") from err
    faults = [Fault(name, "only [[model]] tables are applied") for name in raw if name != "model"]
    if not raw.get("model"):
        faults.append(Fault("model", "there is no [[model]] table"))
    catalog = read_models(raw.get("model"), "model", faults)
    if faults:
        raise Invalid.of(f"{source} is not valid", tuple(faults))
    for warning in place_holders.warnings_of(catalog.models):
        click.echo(printable(f"llmgw: warning: {source}: {warning}", sys.stderr.isatty()), err=True)
    tables = raw["model"]
    assert isinstance(tables, list)
    return tables


@model.command()
@click.argument("name")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@waits
@shared
def rm(ctl: Ctl, name: str, yes: bool, limit_s: float | None) -> None:
    """Remove a model: its endpoints are withdrawn, then its replicas are drained and stopped."""
    path = f"models/{segment(name)}"
    before = ctl.client.get(path)
    confirm(f"Remove model {name} and stop its replicas?", yes)
    headers = {"If-Match": before.etag} if before.etag else {}
    answer = ctl.client.send("DELETE", path, headers=headers)
    if limit_s is not None:
        wait_done(no_replicas(ctl, "model", name), limit_s)
    ctl.changed(answer, f"model {name}: removed")


@model.command()
@click.argument("name")
@click.argument("count", type=click.IntRange(0))
@waits
@shared
def scale(ctl: Ctl, name: str, count: int, limit_s: float | None) -> None:
    """Run COUNT replicas of a model."""
    answer = ctl.client.send("POST", f"models/{segment(name)}/scale", {"count": count})
    if limit_s is not None:
        wait_done(models_ready(ctl, [name]), limit_s)
    ctl.changed(answer, f"model {name}: {count} {'replica' if count == 1 else 'replicas'} wanted")


@model.command()
@click.argument("name")
@click.argument("profile", required=False)
@click.option("--by-priority", is_flag=True, help="Take the choice back: the first profile by priority runs again.")
@shared
def engine(ctl: Ctl, name: str, profile: str | None, by_priority: bool) -> None:
    """Choose the PROFILE that serves a model; kept over restarts and fail-overs."""
    if by_priority == (profile is not None):
        raise click.UsageError("name a PROFILE, or give --by-priority")
    sentence = "the first profile by priority again" if profile is None else f"profile {profile} chosen"
    ctl.changed(ctl.client.send("POST", f"models/{segment(name)}/engine", {"profile": profile}), f"model {name}: {sentence}")


@model.command()
@click.argument("name")
@shared
def restart(ctl: Ctl, name: str) -> None:
    """Restart a model's replicas, and try anew where its starts had failed."""
    ctl.changed(ctl.client.send("POST", f"models/{segment(name)}/restart", {}), f"model {name}: restart asked for")
