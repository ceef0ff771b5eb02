"""Writes `docs/reference/commands.md`: every command with its arguments and options, and the exit codes. Starts none.

`python -m llmgw.cli.reference FILE` writes it; a test holds the page to this.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click

from llmgw.cli.main import cli

_HEAD: Final = """\
# Commands

This page is written from the program (`python -m llmgw.cli.reference`), and a test holds it to the program.

| exit code | means |
|---|---|
| 0 | done |
| 1 | a bug of ours (`LLMGW_DEBUG=1` shows where), or output that could not be written |
| 2 | wrong usage of the command line |
| 3 | invalid input: a broken file, a bad value |
| 4 | a conflict, or no such thing |
| 5 | denied: no token, a wrong one, or one that may not do this |
| 6 | unavailable or overloaded, also for a full disk: try again |
| 7 | `ctl status --check`: something needs a person |
| 130 | ended by Ctrl-C; of a role: by a second signal |

`ctl`, and `add`, `list` and `rm` of machines, find their server and token in `--server` and `LLMGW_TOKEN` (`LLMGW_CA` is a file of
certificates to check it by); else in `~/.config/llmgw/ctl.toml` (`server`, `token`, `ca`); else, on loopback, in those of a running
`llmgw dev`, then in this machine's `admin-token` file. A token that was
kept for one server is never shown to another. It uses no proxy from the environment. Every command of `ctl` takes `--server URL` and
`--output table|json|toml`, before or after the noun.
"""
_KINDS: Final = {
    "integer": "NUMBER", "integer range": "NUMBER", "float": "NUMBER", "float range": "NUMBER",
    "path": "FILE", "file": "FILE", "directory": "DIR", "text": "TEXT",
}  # fmt: skip
_SHARED: Final = frozenset({"server", "output"})


def reference_text() -> str:
    """The page's text."""
    return "\n".join([_HEAD, *_command(cli, "llmgw", click.Context(cli, info_name="llmgw"))])


def _command(command: click.Command, path: str, ctx: click.Context) -> Iterator[str]:
    if isinstance(command, click.Group):
        if path != "llmgw":
            yield f"## `{path}`\n\n{_help(command)}\n"
            if command.invoke_without_command:
                yield from _options(command, path)
        for name in command.list_commands(ctx):
            inner = command.get_command(ctx, name)
            assert inner is not None
            yield from _command(inner, f"{path} {name}", click.Context(inner, parent=ctx, info_name=name))
        return
    level = "###" if path.count(" ") > 2 else "##"
    usage = " ".join(part for part in command.collect_usage_pieces(ctx) if part != "[OPTIONS]")
    yield f"{level} `{' '.join([path, usage]).rstrip()}`\n\n{_help(command)}\n"
    yield from _options(command, path)


def _options(command: click.Command, path: str) -> Iterator[str]:
    options = [
        (f"`{', '.join(option.opts)}{_value(option)}`", _option_help(option))
        for option in command.params
        if isinstance(option, click.Option) and not option.hidden and not (path.startswith("llmgw ctl ") and option.name in _SHARED)
    ]
    if options:
        yield "\n".join(["| option | effect |", "|---|---|", *(f"| {names} | {help} |" for names, help in options)]) + "\n"


def _help(command: click.Command) -> str:
    return " ".join((command.help or "").split())


def _value(option: click.Option) -> str:
    """What stands after the option's name."""
    if option.is_flag:
        return ""
    if isinstance(option.type, click.Choice):
        return f" {' '.join(option.type.choices)}".replace(" ", "\\|").replace("\\|", " ", 1)
    return f" {option.metavar or _KINDS[option.type.name]}"


def _option_help(option: click.Option) -> str:
    shown = f" Default: `{option.default}`." if option.show_default else ""
    return " ".join(f"{option.help or ''}{shown}".split()).replace("|", "\\|")


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/reference/commands.md")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(reference_text(), encoding="utf-8")
