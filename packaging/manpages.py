"""Writes the manual pages from the program's own help: `python packaging/manpages.py FOLDER DATE`. Starts no command.

One page for llmgw and one for each of its commands; the verbs of `ctl` stand in its page.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import click

from llmgw import __version__
from llmgw.cli.main import cli

EXIT_CODES: Final = (
    ("0", "done"),
    ("1", "a bug, or the machine's fault (a full disk); LLMGW_DEBUG=1 shows where"),
    ("2", "wrong usage of the command line"),
    ("3", "invalid input: a broken file, a bad value"),
    ("4", "a conflict, or no such thing"),
    ("5", "denied: no token, a wrong one, or one that may not do this"),
    ("6", "unavailable or overloaded: try again"),
    ("7", "ctl status --check: something needs a person"),
)
FILES: Final = (
    ("/etc/llmgw/llmgw.toml", "Settings of this machine. Every one is shown in /usr/share/doc/llmgw/examples/llmgw.toml.example."),
    ("/var/lib/llmgw", "State of the control plane: its store, and the files admin\\-token and agent\\-token."),
    ("/var/lib/llmgw\\-agent", "State of the agent: its replicas' logs, and checkpoints."),
    ("/var/lib/llmgw\\-router", "State of a router by itself."),
)
BY_HAND: Final = """\
The units llmgw\\-server, llmgw\\-agent and llmgw\\-router run the roles under systemd. Where no systemd runs, a supervisor of any kind
runs them as the user llmgw:
.PP
.RS 4
.nf
setpriv \\-\\-reuid llmgw \\-\\-regid llmgw \\-\\-init\\-groups llmgw server
setpriv \\-\\-reuid llmgw \\-\\-regid llmgw \\-\\-init\\-groups env HOME=/var/lib/llmgw\\-agent llmgw agent
.fi
.RE
.PP
SIGTERM ends a role in order, a second one at once. Engines go on when their agent ends; it adopts them when it is back."""


def escaped(text: str) -> str:
    """Text as roff takes it: what is typed must stay what it was when it is copied from the page."""
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq").replace("`", "\\(ga")
    return "\n".join(f"\\&{line}" if line.startswith(".") else line for line in text.splitlines())


def page(command: click.Command, ctx: click.Context, name: str, date: str) -> str:
    dashed = name.replace(" ", "-")
    brief = first_sentence(command)
    lines = [
        f'.TH "{escaped(dashed.upper())}" 1 "{date}" "llmgw {__version__}" "llmgw"',
        ".SH NAME",
        f"{escaped(dashed)} \\- {escaped(brief)}",
        ".SH SYNOPSIS",
        synopsis(command, ctx, name),
        ".SH DESCRIPTION",
        escaped(" ".join((command.help or "").split())),
        *options(command, ctx),
    ]
    if isinstance(command, click.Group):
        lines.append(".SH COMMANDS")
        lines += overview(command, ctx) if name == "llmgw" else verbs(command, ctx, name)
    if name == "llmgw":
        lines += [".SH RUNNING THE ROLES", BY_HAND, ".SH FILES", *terms(FILES)]
    lines += [".SH EXIT STATUS", *terms((code, escaped(text)) for code, text in EXIT_CODES)]
    lines += [".SH SEE ALSO", ", ".join(f".BR {one} (1)" for one in see_also(name)).replace(", .BR", " ,\n.BR")]
    return "\n".join(lines) + "\n"


def first_sentence(command: click.Command) -> str:
    text = " ".join((command.help or "").split())
    return text.partition(". ")[0].rstrip(".")


def synopsis(command: click.Command, ctx: click.Context, name: str) -> str:
    pieces = " ".join(command.collect_usage_pieces(ctx))
    return f".B {escaped(name)}\n{escaped(pieces)}"


def options(command: click.Command, ctx: click.Context) -> Iterator[str]:
    rows = [record for option in command.get_params(ctx) if (record := option.get_help_record(ctx)) is not None]
    if rows:
        yield ".SH OPTIONS"
        yield from terms((escaped(names), escaped(text)) for names, text in rows)


def overview(group: click.Group, ctx: click.Context) -> Iterator[str]:
    for name in group.list_commands(ctx):
        inner = group.get_command(ctx, name)
        assert inner is not None
        yield from terms([(f"llmgw {escaped(name)}", f"{escaped(first_sentence(inner))}. See llmgw\\-{escaped(name)}(1).")])


def verbs(group: click.Group, ctx: click.Context, path: str) -> Iterator[str]:
    for name in group.list_commands(ctx):
        inner = group.get_command(ctx, name)
        assert inner is not None
        below = click.Context(inner, parent=ctx, info_name=name)
        if isinstance(inner, click.Group):
            yield from verbs(inner, below, f"{path} {name}")
            continue
        usage = " ".join(inner.collect_usage_pieces(below))
        yield f'.SS "{escaped(f"{path} {name} {usage}".strip())}"'
        yield escaped(" ".join((inner.help or "").split()))
        records = [record for option in inner.get_params(below) if (record := option.get_help_record(below)) is not None]
        yield from terms((escaped(names), escaped(text)) for names, text in records if names != "-h, --help")


def terms(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Term and text pairs, already escaped."""
    for term, text in rows:
        yield f".TP\n.B {term}\n{text}"


def see_also(name: str) -> list[str]:
    pages = ["llmgw", *(f"llmgw\\-{one}" for one in cli.list_commands(click.Context(cli)))]
    return [one for one in pages if one != name.replace(" ", "\\-")]


def write_pages(folder: Path, date: str) -> None:
    """One file per page, `llmgw.1` and `llmgw-NAME.1`. `date` is what the pages are dated, YYYY-MM-DD."""
    folder.mkdir(parents=True, exist_ok=True)
    root = click.Context(cli, info_name="llmgw", **cli.context_settings)
    (folder / "llmgw.1").write_text(page(cli, root, "llmgw", date), encoding="utf-8")
    for name in cli.list_commands(root):
        command = cli.get_command(root, name)
        assert command is not None
        text = page(command, click.Context(command, parent=root, info_name=name), f"llmgw {name}", date)
        (folder / f"llmgw-{name}.1").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python packaging/manpages.py FOLDER YYYY-MM-DD")
    write_pages(Path(sys.argv[1]), sys.argv[2])
