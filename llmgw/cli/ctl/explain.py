"""`ctl explain`: the reasons of the plan that was made. Works nothing out by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import click

from llmgw.cli.ctl.client import segment
from llmgw.cli.ctl.output import Ctl, details, key, shared, table, text

_KNOWN: Final = frozenset({"object", "text", "rejections"})


@click.group()
def explain() -> None:
    """Why a replica or a model is as it is."""


@explain.command()
@click.argument("id")
@shared
def replica(ctl: Ctl, id: str) -> None:
    """Why a replica is where it is and as it is."""
    _explain(ctl, f"explain/replica/{segment(id)}")


@explain.command()
@click.argument("name")
@shared
def model(ctl: Ctl, name: str) -> None:
    """Why a model has the replicas it has, or lacks one."""
    _explain(ctl, f"explain/model/{segment(name)}")


def _explain(ctl: Ctl, path: str) -> None:
    body = ctl.object(path)
    ctl.print(body, lambda: _lines(body))


def _lines(body: Mapping[str, Any]) -> list[str]:
    found = [f"{text(body.get('object'))}: {text(body.get('text'))}"]
    rejections = body.get("rejections")
    if rejections and isinstance(rejections, list):
        found += ["", *table(rejections, (("NODE", key("node")), ("FILTER", key("filter")), ("WHY NOT", key("text"))), "")]
    rest = {name: value for name, value in body.items() if name not in _KNOWN and value not in (None, "", [], {})}
    if rest:
        found += ["", *details(rest)]
    return found
