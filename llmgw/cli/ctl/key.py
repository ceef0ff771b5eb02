"""`ctl key`: clients of /v1. A secret is printed once, when its key is created, and can never be read again."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from typing import Any, Final

import click

from llmgw.cli.confirm import confirm
from llmgw.cli.ctl.client import segment
from llmgw.cli.ctl.config import when
from llmgw.cli.ctl.output import Ctl, details, echo, shared, table, text
from llmgw.cli.ctl.output import key as value_of
from llmgw.cli.ctl.times import time_after
from llmgw.cli.text import printable
from llmgw.domain.errors import Unavailable

NEVER: Final = "never"


@click.group()
def key() -> None:
    """Keys of clients of /v1."""


def _rights(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options that say what a key may do. None: not given."""
    count = click.IntRange(0)
    for option in reversed(
        (
            click.option("--model", "models", multiple=True, metavar="NAME", help='What it may use; may be repeated; "*": all.'),
            click.option("--max-parallel", type=count, help="Requests at a time; 0: as in [limits]."),
            click.option("--requests-per-minute", type=count, help="0: as in [limits]."),
            click.option("--tokens-per-minute", type=count, help="0: as in [limits]."),
            click.option("--expires", metavar="WHEN", help="RFC 3339 with a zone, or from now: 12h, 90d; or never."),
            click.option("--operator/--no-operator", default=None, help="Its answers tell endpoint and times; it may ask one endpoint."),
        )
    ):
        function = option(function)
    return function


def _asked(ctl: Ctl, models: tuple[str, ...], expires: str | None, **given: object) -> dict[str, Any]:
    body: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if models:
        body["models"] = list(models)
    if expires is not None:
        body["expires"] = None if expires == NEVER else time_after(ctl, "--expires", expires, "keys")
    return body


@key.command()
@click.argument("name")
@_rights
@click.option("--sha256", metavar="HEX", help="The hash of a secret of your own, in place of one that is made.")
@shared
def create(ctl: Ctl, name: str, models: tuple[str, ...], expires: str | None, **given: Any) -> None:
    """Create a key and print its secret, once."""
    answer = ctl.client.send("POST", "keys", {"name": name, **_asked(ctl, models, expires, **given)})
    secret = answer.body.get("secret") if isinstance(answer.body, dict) else None
    if secret is None and given["sha256"] is None:  # our first try arrived, and its answer did not
        remedy = f"`llmgw ctl key revoke {shlex.quote(name)}`, then create it anew"
        raise Unavailable(f"key {name} was created, and the answer with its secret was lost: {remedy}", code="secret_lost")
    ctl.changed(answer, f"key {name}: created")
    if secret is not None:
        if ctl.output == "table":
            echo(str(secret))
        click.echo("llmgw: the secret is shown this once and can never be read again: keep it now", err=True)
    _warn_of_unknown(name, answer.body)


def _warn_of_unknown(name: str, body: object) -> None:
    """Of models that a key names and that are not there: a mistyped name would be found out by a client's 403."""
    unknown = body.get("unknown_models") if isinstance(body, dict) else None
    if isinstance(unknown, list) and unknown:
        told = f"llmgw: warning: key {name} may use {', '.join(map(repr, unknown))}: no model has that name or alias now"
        click.echo(printable(told, sys.stderr.isatty()), err=True)


@key.command("list")
@click.option("--all", "revoked", is_flag=True, help="Also revoked ones.")
@shared
def list_keys(ctl: Ctl, revoked: bool) -> None:
    """Every key that is not revoked, and what it may do."""
    body = ctl.listing("keys")
    if not revoked:
        body = {**body, "keys": [row for row in body["keys"] if row.get("state") != "revoked"]}
    ctl.print(body, lambda: table(body["keys"], _COLUMNS, "no keys: `llmgw ctl key create NAME` adds one"))


_COLUMNS = (
    ("KEY", value_of("name")),
    ("BEGINS", value_of("prefix")),
    ("STATE", value_of("state")),
    ("MODELS", value_of("models")),
    ("PARALLEL", lambda row: row.get("max_parallel") or ""),
    ("REQUESTS/MIN", lambda row: row.get("requests_per_minute") or ""),
    ("TOKENS/MIN", lambda row: row.get("tokens_per_minute") or ""),
    ("OPERATOR", lambda row: "yes" if row.get("operator") else ""),
    ("EXPIRES", lambda row: when(row.get("expires"))),
    ("CREATED", lambda row: when(row.get("created_at"))),
    ("BY", value_of("created_by")),
    ("REVOKED", lambda row: when(row.get("revoked_at"))),
)


@key.command()
@click.argument("name")
@shared
def show(ctl: Ctl, name: str) -> None:
    """One key: what it may do, who created and who revoked it."""
    body = ctl.object(f"keys/{segment(name)}")
    ctl.print(body, lambda: details(body))


@key.command()
@click.argument("name")
@_rights
@shared
def update(ctl: Ctl, name: str, models: tuple[str, ...], expires: str | None, **given: Any) -> None:
    """Change what a key may do; its secret stays, and what it has used this minute counts on."""
    body = _asked(ctl, models, expires, **given)
    if not body:
        raise click.UsageError("name what is to change: `llmgw ctl key update --help` tells")
    path = f"keys/{segment(name)}"
    answer = ctl.client.send("PATCH", path, body, {"If-Match": ctl.client.get(path).etag})
    change = text(answer.body.get("change")) if isinstance(answer.body, dict) else ""
    ctl.changed(answer, f"key {name}: {change or 'updated'}")
    _warn_of_unknown(name, answer.body)


@key.command()
@click.argument("name")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@shared
def revoke(ctl: Ctl, name: str, yes: bool) -> None:
    """End a key, everywhere and for good; answers that run are finished."""
    confirm(f"Revoke key {name}?", yes)
    answer = ctl.client.send("POST", f"keys/{segment(name)}/revoke", {})
    change = text(answer.body.get("change")) if isinstance(answer.body, dict) else ""
    ctl.changed(answer, f"key {name}: {'was revoked before' if change == 'unchanged' else 'revoked'}")
