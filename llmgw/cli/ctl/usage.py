"""`ctl usage`: who used how much, as the engines counted it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import click

from llmgw.cli.ctl.output import Ctl, items, key, shared, table
from llmgw.cli.ctl.times import time_before

NO_KEY: Final = "(no key)"


@click.command()
@click.option("--by", type=click.Choice(("key", "model", "hour")), help="What to sum by.  [default: key and model]")
@click.option("--since", metavar="TIME", help="From then on: RFC 3339 with a zone, or ago: 90m, 24h, 7d.  [default: 30d]")
@click.option("--until", metavar="TIME", help="Before then, as --since.  [default: up to now]")
@shared
def usage(ctl: Ctl, by: str | None, since: str | None, until: str | None) -> None:
    """Who used how much: requests, and tokens as the engines counted them.

    Usage is kept by the hour, in UTC: an hour counts where it begins. UNKNOWN are answers whose engine told no tokens. Numbers reach
    the store within seconds.
    """
    asked: dict[str, object] = {} if by is None else {"by": by}
    for name, given in (("since", since), ("until", until)):
        if given is not None:
            asked[name] = time_before(ctl, f"--{name}", given, "leader")
    body = ctl.client.get("usage", asked).body
    rows = items(body, "usage")
    while body.get("next"):
        page = ctl.client.get("usage", {**asked, "cursor": body["next"]}).body
        rows, body = rows + items(page, "usage"), {**body, "next": page.get("next")}
    whole = {**{name: value for name, value in body.items() if name != "next"}, "usage": rows}
    ctl.print(whole, lambda: _lines(whole))


def _lines(body: Mapping[str, Any]) -> list[str]:
    rows = body["usage"]
    if not rows:
        return [f"no usage since {body.get('since')}"]
    names = [name for name in ("hour", "key", "model") if name in rows[0]]
    total = {**dict.fromkeys(names[:1], "total"), **(body.get("total") or {})}
    shown = [(name.upper(), _name(name)) for name in names]
    counts = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "unknown")
    shown += [(name.removesuffix("_tokens").upper(), key(name)) for name in counts]
    return table([*rows, total], shown, "")


def _name(name: str) -> Any:
    return lambda row: NO_KEY if name == "key" and row.get("key") == "" else row.get(name)
