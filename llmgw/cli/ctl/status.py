"""`ctl status`: the truth at three in the morning. `--check` is one line and an exit code for a monitor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import click

from llmgw.cli.ctl.output import Ctl, echo, json_text, key, shared, table, text
from llmgw.cli.text import one_line
from llmgw.domain.errors import EXIT_OK, EXIT_UNWELL

OLD_S: Final = 3.0  # a standby that hears its leader is told at least every second
ROWS_MAX: Final = 20  # models or nodes that are listed; of more their counts tell, and the lists have commands of their own


@click.command()
@click.option("--check", is_flag=True, help="One line; exit 0 when all is well, 7 when something needs a person.")
@shared
def status(ctl: Ctl, check: bool) -> int:
    """Who leads, what is ready, what is wrong."""
    found = ctl.object("status")
    if check:
        return _check(ctl, found)
    ctl.print(found, lambda: status_lines(found, lambda noun: ctl.listing(noun)[noun]))
    return EXIT_OK


def _check(ctl: Ctl, found: Mapping[str, Any]) -> int:
    problems = _problems(found)
    if ctl.output == "json":
        echo(json_text({"ok": not problems, "problems": problems, "problems_more": _more(found)}), steered=False)
    elif problems:
        more = f"; and {_more(found)} more" if _more(found) else ""
        echo(f"not well: {'; '.join(problems)}{more}")
    else:
        count = _total(found.get("models"))
        echo(f"ok: {count} {'model' if count == 1 else 'models'}, led by {_leader(found)}")
    return EXIT_UNWELL if problems else EXIT_OK


def status_lines(found: Mapping[str, Any], rows: Callable[[str], list[dict[str, Any]]]) -> list[str]:
    """The whole picture, what is wrong last, where a person looks. `rows` reads the list of a noun."""
    store, router = _map(found.get("store")), _map(found.get("router"))
    facts = [
        ("cluster", text(found.get("cluster_id"))),
        ("leader", _leader(found)),
        ("build", text(found.get("build"))),
        (
            "store",
            ", ".join(part for part in (text(store.get("mode")), _labelled("durability", store.get("durability")), _old(store)) if part),
        ),
        ("settings", _settings(_map(found.get("settings")))),
        ("router", _router(router)),
        *((noun, _counts(found.get(noun))) for noun in ("models", "replicas", "nodes")),
    ]
    wide = max(len(name) for name, _ in facts)
    lines = [f"{name:<{wide}}  {one_line(value)}" for name, value in facts if value]
    for noun, shown in (("models", _MODELS), ("nodes", _NODES)):
        if 0 < _total(found.get(noun)) <= ROWS_MAX:
            lines += ["", *table(rows(noun), shown, f"no {noun}")]
    problems = _problems(found)
    if _more(found):
        problems.append(f"and {_more(found)} more")
    lines.append("")
    lines += ["problems:", *(f"  - {problem}" for problem in problems)] if problems else ["no problems"]
    return lines


def _counts(by_state: object) -> str:
    return ", ".join(f"{count} {state}" for state, count in _map(by_state).items() if count) or "none"


def _total(by_state: object) -> int:
    return sum(count for count in _map(by_state).values() if isinstance(count, int))


def _more(found: Mapping[str, Any]) -> int:
    more = found.get("problems_more")
    return more if isinstance(more, int) else 0


def _problems(found: Mapping[str, Any]) -> list[str]:
    problems = found.get("problems")
    return [one_line(str(problem)) for problem in problems] if isinstance(problems, list) else []


_MODELS = (
    ("MODEL", key("name")),
    ("READY", lambda row: f"{row.get('ready', 0)}/{row.get('replicas_wanted', 0)}"),
    ("STATE", key("state")),
    ("REASON", key("reason")),
)
_NODES = (
    ("NODE", key("name")),
    ("STATE", lambda row: ",".join([str(row.get("state", "")), *(flag for flag in ("cordoned", "draining") if row.get(flag))])),
    ("FACILITY", key("facility")),
    ("GPUS", lambda row: "" if row.get("gpus") is None else row["gpus"] or "cpu"),
    ("REPLICAS", key("replicas")),
    ("BUILD", key("build")),
)


def _leader(found: Mapping[str, Any]) -> str:
    leader = _map(found.get("leader"))
    holder = text(leader.get("holder") or leader.get("owner"))
    if not holder:
        return "nobody is known to lead"
    notes = [f"epoch {leader['epoch']}"] if leader.get("epoch") is not None else []
    if leader.get("power"):
        notes.append(text(leader["power"]))
    if leader.get("is_me") is False:
        notes.append("asked of a standby")
    return f"{holder} ({', '.join(notes)})" if notes else holder


def _router(router: Mapping[str, Any]) -> str:
    if not router:
        return ""
    following = router.get("following")
    count = len(following) if isinstance(following, list) else 0
    kinds = ["embedded"] if router.get("embedded") else []
    kinds += [f"{count} following"] if count or not kinds else []
    parts = [*kinds, _labelled("generation", router.get("generation"))]
    endpoints = router.get("endpoints")
    if endpoints is not None:
        count = len(endpoints) if isinstance(endpoints, list) else endpoints
        acted_on = _acted_on(following, count)
        parts.append(f"{count} {'endpoint' if count == 1 else 'endpoints'}{acted_on}")
    return ", ".join(part for part in parts if part)


def _acted_on(following: object, published: object) -> str:
    """How many routers act on, where that is not what is published: a leader that has just begun lists what has answered it so far."""
    routers = following if isinstance(following, list) else []
    counts = {count for one in routers if isinstance(count := _map(one).get("endpoints"), int)}
    if all(count == published for count in counts):
        return ""
    least, most = min(counts), max(counts)
    told = f"{least}" if least == most else f"{least} to {most}"
    return f" published ({'the router acts' if len(routers) == 1 else 'routers act'} on {told}, as told before)"


def _settings(settings: Mapping[str, Any]) -> str:
    live, desired = settings.get("live"), settings.get("desired")
    if not settings or not desired:
        return ""  # without a store they have no versions
    parts = [f"version {live}"]
    if live != desired:
        parts.append(f"version {desired} is wanted")
    elif settings.get("applied") != live:
        parts.append("a part of it waits for a restart")
    parts += [text(settings.get("rollout"))]
    parts += ["paused"] if settings.get("pause") else []
    return ", ".join(part for part in dict.fromkeys(parts) if part)


def _store(store: Mapping[str, Any]) -> str:
    return ", ".join(part for part in (text(store.get("mode")), _labelled("durability", store.get("durability")), _old(store)) if part)


def _old(store: Mapping[str, Any]) -> str:
    """How far behind a standby of a replicated store is, where that is worth a word."""
    if store.get("mode") != "replicated":
        return ""
    age_s = store.get("age_s")
    if not isinstance(age_s, int | float):
        return "of an unknown age"
    return f"{age_s:.0f} s old" if age_s > OLD_S else ""


def _labelled(label: str, value: object) -> str:
    return f"{label} {text(value)}" if text(value) else ""


def _map(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
