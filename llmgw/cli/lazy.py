"""A click group that knows its commands by name and a line of help, and loads a command's module when it is called."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from typing import Any

import click


def machines(noun: str) -> dict[str, tuple[str, str]]:
    """The commands by which machines of one kind join and leave. The role itself runs under the same noun, and loads none of them."""
    return {
        "add": (f"llmgw.cli.machines:{noun}_add", "Let one more machine in: prints the command to run there."),
        "list": (f"llmgw.cli.machines:{noun}_list", "Which machines have joined, and which may."),
        "rm": (f"llmgw.cli.machines:{noun}_rm", "Take a machine out: its certificate ends, and its sessions with it."),
    }


class LazyGroup(click.Group):
    """`lazy` maps a command's name to (`module:attribute`, one line of help). Listing them imports none."""

    def __init__(self, *args: Any, lazy: Mapping[str, tuple[str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lazy = lazy

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.lazy:
            return None
        module, _, attribute = self.lazy[cmd_name][0].partition(":")
        found = getattr(importlib.import_module(module), attribute)
        assert isinstance(found, click.Command)
        return found

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.lazy and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], list(self.lazy), n=1)
            hint = f" Did you mean {near[0]}?" if near else f" Known: {', '.join(self.lazy)}."
            ctx.fail(f"No such command {args[0]!r}.{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, help) for name, (_, help) in self.lazy.items()])
