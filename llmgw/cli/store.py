"""`llmgw store status|verify|adopt`: the store as its machine's settings file has it, whether or not a control plane runs."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from llmgw.cli.backup import CONFIG, say
from llmgw.cli.confirm import confirm
from llmgw.cli.paths import PathOption

if TYPE_CHECKING:
    from llmgw.wiring.store_tools import Choice, Status, Verified

config_option = click.option(
    "--config", type=PathOption(), default=CONFIG, show_default=True, help="The settings file of this machine's control plane."
)


@click.group(context_settings={"max_content_width": 120})
def store() -> None:
    """The store itself: what is there, whether it is whole, and which copy is the base."""


@store.command()
@config_option
def status(config: Path) -> int:
    """Where the store is, who holds its lease, and which copies there are. Exit 7 when something needs a person."""
    from llmgw.cli.files import load
    from llmgw.domain.errors import EXIT_OK, EXIT_UNWELL
    from llmgw.settings.load import Role
    from llmgw.wiring.machine import RealMachine
    from llmgw.wiring.runs import run_command
    from llmgw.wiring.store_tools import status as ask

    loaded = load(config, Role.SERVER)
    machine = RealMachine()
    found = run_command(lambda: ask(machine, loaded))
    for line in _shown(found, machine.wall_s()):
        click.echo(line)
    return EXIT_UNWELL if found.troubles else EXIT_OK


@store.command()
@click.argument("prefix", nargs=-1)
@click.option("--all", "every", is_flag=True, help="Every copy in the bucket, and not only the base.")
@config_option
def verify(prefix: tuple[str, ...], every: bool, config: Path) -> int:
    """Restore the published base (or each PREFIX) to a temporary folder and check it. Exit 7 when one is not whole.

    Of a store that is a file, that file. Changes nothing, and may be run while control planes do.
    """
    from llmgw.cli.files import load
    from llmgw.domain.errors import EXIT_OK, EXIT_UNWELL
    from llmgw.settings.load import Role
    from llmgw.wiring.machine import RealMachine
    from llmgw.wiring.runs import run_command
    from llmgw.wiring.store_tools import verify_store

    loaded = load(config, Role.SERVER)
    found = run_command(lambda: verify_store(RealMachine(), loaded, prefix, every=every))
    for one in found:
        click.echo(_told(one))
    return EXIT_UNWELL if any(one.why for one in found) else EXIT_OK


@store.command()
@click.argument("prefix", required=False, default="")
@click.option("--file", type=PathOption(), help="A SQLite file in place of a prefix: a copy that a control plane has left, say.")
@click.option("--replace", is_flag=True, help="Also a copy of another cluster than the lease is of.")
@click.option("--go-back", is_flag=True, help="Also where the base that is published is whole.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@config_option
def adopt(prefix: str, file: Path | None, replace: bool, go_back: bool, yes: bool, config: Path) -> None:
    """Make PREFIX what the next leader of a replicated store begins with.

    For a lease whose record is gone and for a base that is damaged or missing. Every control plane of the cluster must have ended.
    The epoch rises by 1,000; what is lost by it is shown first.
    """
    if bool(prefix) == (file is not None):
        raise click.UsageError("name either a PREFIX, as `llmgw store status` shows them, or --file")
    from llmgw.cli.files import load
    from llmgw.settings.load import Role
    from llmgw.wiring.machine import RealMachine
    from llmgw.wiring.runs import run_command
    from llmgw.wiring.store_tools import adopt as work

    def agree(choice: Choice) -> None:
        for line in _lost(choice):
            click.echo(line)
        confirm("Make it the base?", yes)

    loaded = load(config, Role.SERVER)
    where = None if file is None else file.absolute()
    done = run_command(lambda: work(RealMachine(), loaded, prefix, where, replace=replace, go_back=go_back, agree=agree, say=say))
    click.echo(f"the next leader begins with {done.base}, under an epoch above {done.epoch}")


def _shown(found: Status, now_s: float) -> list[str]:
    facts = [
        ("mode", found.mode),
        ("place", found.place),
        ("cluster", found.cluster_id or "none yet"),
        *([("epoch", str(found.epoch))] if found.epoch is not None else []),
        *([("size", f"{found.file_bytes} bytes")] if found.file_bytes is not None else []),
    ]
    if found.mode != "none":
        facts.append(("lease", _lease(found, now_s)))
    if found.mode == "replicated":
        base = "" if found.lease is None else found.lease.base
        facts += [("base", base or "none published"), ("litestream", found.litestream or "not there")]
        copy = "none" if found.copy_written_s is None else f"last changed {_ago(now_s - found.copy_written_s)} ago"
        facts.append(("copy here", copy))
    lines = [f"{name:<10}  {value}" for name, value in facts]
    if found.prefixes:
        lines += ["", f"{'COPY':<52}  {'WRITTEN':<20}  {'OBJECTS':>7}  {'BYTES':>12}"]
        lines += [
            f"{one.name:<52}  {_moment(one.written):<20}  {one.objects:>7}  {one.bytes:>12}{'  the base' if one.is_base else ''}"
            for one in found.prefixes
        ]
    return lines + ([""] if found.troubles else []) + [f"problem: {trouble}" for trouble in found.troubles]


def _lease(found: Status, now_s: float) -> str:
    lease = found.lease
    if lease is None:
        return "no record"
    who = f"held by {lease.holder}" if lease.holder else "released"
    at = f" at {lease.address}" if lease.holder and lease.address else ""
    if lease.written is None:
        age = "written at an unknown time"
    else:
        age = f"last written {_ago(now_s - lease.written.timestamp())} ago, as far as this machine's clock agrees with the store's"
    return f"{who}{at}, epoch {lease.epoch}, ttl {lease.ttl_s:g} s, {age}"


def _ago(seconds: float) -> str:
    seconds = max(0.0, seconds)
    for unit, name in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} s"


def _moment(at: datetime.datetime) -> str:
    return at.astimezone(datetime.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _told(one: Verified) -> str:
    found = one.found
    if one.why or found is None:
        return f"{one.name}: NOT whole: {one.why}"
    settings = f"settings version {found.settings_version}" if found.settings_version else "no settings of its own"
    return f"{one.name}: whole: cluster {found.cluster_id or '(not begun)'}, epoch {found.epoch}, {settings}, {found.bytes} bytes"


def _lost(choice: Choice) -> list[str]:
    """What changes by it, for whoever decides."""
    lines = [f"the new base: {_told(choice.new)}"]
    if choice.now is None:
        lines.append("the base now: none; what was written after this copy, and stands in no other, is lost")
    elif choice.now.why or choice.now.found is None:
        lines.append(f"the base now: {_told(choice.now)}")
        lines.append("what was written after the new base, and can be read nowhere, is lost")
    else:
        lines.append(f"the base now: {_told(choice.now)}")
        tables = sorted(choice.now.rows.keys() | choice.new.rows.keys())
        fewer = [
            f"  {table}: {choice.new.rows.get(table, 0)} rows in place of {choice.now.rows.get(table, 0)}"
            for table in tables
            if choice.new.rows.get(table, 0) != choice.now.rows.get(table, 0)
        ]
        lines += ["what differs in number:", *fewer] if fewer else ["the number of rows is the same; what they say may not be"]
    if choice.newer:
        lines.append(f"there are copies of later epochs, which are not taken: {', '.join(choice.newer)}")
    return [*lines, f"the next leader's epoch is above {choice.epoch}"]
