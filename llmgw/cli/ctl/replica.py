"""`ctl replica`: the running copies of models, and what their engines wrote."""

from __future__ import annotations

import sys
from typing import Final

import click

from llmgw.cli.ctl.client import segment, wait
from llmgw.cli.ctl.output import Ctl, age, details, key, shared, table, text
from llmgw.cli.ctl.waiting import replica_gone, wait_done, waits
from llmgw.cli.text import printable
from llmgw.domain.errors import Invalid, NotFound, Unavailable

LOG_CHUNK_BYTES: Final = 65_536  # chosen: one answer is quick to make, a log of 64 MiB takes 1,024 of them
FOLLOW_S: Final = 1.0  # between looks for more of a log


@click.group()
def replica() -> None:
    """Replicas: running copies of models."""


@replica.command("list")
@click.option("--model", "of_model", metavar="MODEL", help="Only those of this model.")
@shared
def list_replicas(ctl: Ctl, of_model: str | None) -> None:
    """Every replica: where it runs and how it is."""
    body = ctl.listing("replicas")
    if of_model is not None:
        body = {**body, "replicas": [row for row in body["replicas"] if row.get("model") == of_model]}
    ctl.print(body, lambda: table(body["replicas"], REPLICA_COLUMNS, "no replicas"))


REPLICA_COLUMNS = (
    ("REPLICA", key("id")),
    ("MODEL", key("model")),
    ("PROFILE", key("profile")),
    ("NODE", key("node")),
    ("GPUS", key("gpus")),
    ("STATE", key("state")),
    ("AGE", lambda row: age(row.get("age_s"))),
    ("ATTEMPT", key("attempt")),
    ("REASON", key("reason")),
)


@replica.command()
@click.argument("id")
@shared
def show(ctl: Ctl, id: str) -> None:
    """One replica: everything that is known of it."""
    body = ctl.object(f"replicas/{segment(id)}")
    ctl.print(body, lambda: details(body))


@replica.command()
@click.argument("id")
@click.option("--follow", "-f", is_flag=True, help="Go on as more is written; Ctrl-C ends it.")
@click.option("--attempt", type=click.IntRange(1), help="The log of this attempt; without it, of the last one.")
@click.option(
    "--tail", "-n", type=click.IntRange(1), metavar="LINES", help=f"Begin with the last lines (of the last {LOG_CHUNK_BYTES} bytes)."
)
@shared
def logs(ctl: Ctl, id: str, follow: bool, attempt: int | None, tail: int | None) -> None:
    """What a replica's engine wrote."""
    path = f"replicas/{segment(id)}/logs"
    terminal = sys.stdout.isatty()
    offset, shown_attempt, ended = 0 if tail is None else -LOG_CHUNK_BYTES, attempt, True  # below 0: from the end
    while True:
        try:
            page = ctl.client.get(path, {"attempt": shown_attempt, "offset": offset, "limit": LOG_CHUNK_BYTES}).body
        except NotFound:
            if not follow or shown_attempt is None:
                raise
            click.echo(f"replica {id} is gone", err=True)
            return
        except Unavailable as err:
            if not follow or shown_attempt is None:
                raise
            click.echo(f"{err.message}; trying again", err=True)
            wait(FOLLOW_S)
            continue
        if not isinstance(page, dict) or not isinstance(page.get("text"), str):
            raise Invalid("the answer holds no log: is this the admin API's address?")
        chunk = page["text"]
        if tail is not None:
            chunk = "".join(chunk.splitlines(keepends=True)[-tail:])
            tail = None
        if chunk:
            click.echo(printable(chunk, terminal), nl=False)
            ended = chunk.endswith("\n")
        following = page.get("next_offset")
        moved = False
        if isinstance(following, int) and following > offset:
            offset, moved = following, True
        shown_attempt = page.get("attempt") if isinstance(page.get("attempt"), int) else shown_attempt
        if moved and chunk:
            continue
        if not follow:
            if not ended and terminal:
                click.echo()
            return
        newest = _newest(page.get("attempts"))
        if attempt is None and newest is not None and shown_attempt is not None and newest > shown_attempt:
            click.echo(f"--- attempt {newest} ---", err=True)
            shown_attempt, offset = newest, 0
            continue
        wait(FOLLOW_S)


def _newest(attempts: object) -> int | None:
    """`attempts` is how many there were, or their numbers."""
    if isinstance(attempts, bool):
        return None
    if isinstance(attempts, int):
        return attempts
    if isinstance(attempts, list):
        return max((number for number in attempts if isinstance(number, int)), default=None)
    return None


@replica.command()
@click.argument("id")
@waits
@shared
def drain(ctl: Ctl, id: str, limit_s: float | None) -> None:
    """Withdraw a replica, let its requests finish, then stop it; another takes its place."""
    answer = ctl.client.send("POST", f"replicas/{segment(id)}/drain", {})
    if limit_s is not None:
        wait_done(replica_gone(ctl, id), limit_s)
    ctl.changed(answer, f"replica {id}: {'draining' if limit_s is None else 'drained'}")


@replica.command()
@click.argument("id")
@shared
def restart(ctl: Ctl, id: str) -> None:
    """Restart a replica where it is."""
    answer = ctl.client.send("POST", f"replicas/{segment(id)}/restart", {})
    body = answer.body if isinstance(answer.body, dict) else {}
    ctl.changed(answer, f"replica {id}: restart asked for{' (' + text(body.get('state')) + ')' if body.get('state') else ''}")
