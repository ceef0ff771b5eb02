"""`ctl node`: machines with GPUs."""

from __future__ import annotations

import click

from llmgw.cli.ctl.client import segment
from llmgw.cli.ctl.output import Ctl, age, details, key, shared, table
from llmgw.cli.ctl.waiting import no_replicas, wait_done, waits


@click.group()
def node() -> None:
    """Nodes: machines with GPUs."""


@node.command("list")
@shared
def list_nodes(ctl: Ctl) -> None:
    """Every node and how it is."""
    body = ctl.listing("nodes")
    ctl.print(body, lambda: table(body["nodes"], _COLUMNS, "no nodes"))


_COLUMNS = (
    ("NODE", key("name")),
    ("STATE", lambda row: ",".join([str(row.get("state", "")), *(flag for flag in ("cordoned", "draining") if row.get(flag))])),
    ("FACILITY", key("facility")),
    ("GPUS", lambda row: row.get("gpus") or "cpu"),
    ("REPLICAS", key("replicas")),
    ("HEARD", lambda row: f"{heard} ago" if (heard := age(row.get("heard_age_s"))) else ""),
    ("BUILD", key("build")),
    ("LABELS", key("labels")),
)


@node.command()
@click.argument("name")
@shared
def show(ctl: Ctl, name: str) -> None:
    """One node: its devices, engines and replicas."""
    body = ctl.object(f"nodes/{segment(name)}")
    ctl.print(body, lambda: details(body))


@node.command()
@click.argument("name")
@shared
def cordon(ctl: Ctl, name: str) -> None:
    """Place nothing new on a node; what runs there goes on."""
    ctl.changed(ctl.client.send("POST", f"nodes/{segment(name)}/cordon", {}), f"node {name}: cordoned")


@node.command()
@click.argument("name")
@click.option("--deadline", type=click.FloatRange(0), metavar="SECONDS", help="Stop what is still busy after this long.")
@waits
@shared
def drain(ctl: Ctl, name: str, deadline: float | None, limit_s: float | None) -> None:
    """Move work off a node."""
    body = {} if deadline is None else {"deadline_s": deadline}
    answer = ctl.client.send("POST", f"nodes/{segment(name)}/drain", body)
    if limit_s is not None:
        wait_done(no_replicas(ctl, "node", name), limit_s)
    ctl.changed(answer, f"node {name}: {'draining' if limit_s is None else 'drained'}")


@node.command()
@click.argument("name")
@shared
def resume(ctl: Ctl, name: str) -> None:
    """End a cordon or a drain: the node takes replicas again."""
    ctl.changed(ctl.client.send("POST", f"nodes/{segment(name)}/resume", {}), f"node {name}: takes replicas again")


@node.command()
@click.argument("name")
@click.argument("labels", nargs=-1, required=True, metavar="NAME=VALUE...")
@shared
def label(ctl: Ctl, name: str, labels: tuple[str, ...]) -> None:
    """Set labels that profiles select nodes by; NAME= takes one away."""
    wanted: dict[str, str | None] = {}
    for part in labels:
        left, equals, right = part.partition("=")
        if not equals or not left:
            raise click.UsageError(f"expected NAME=VALUE, not {part!r}")
        wanted[left] = right or None
    ctl.changed(ctl.client.send("POST", f"nodes/{segment(name)}/labels", {"labels": wanted}), f"node {name}: {' '.join(labels)}")
