"""Paths on the command line: the one kind of option for them, so that an empty one is refused and does not mean this folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click


class PathOption(click.Path):
    """A path, as `pathlib.Path`. An empty one is wrong usage: mostly a shell variable that was not set."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(path_type=Path, **arguments)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            hint = "; leave the option out for its default" if isinstance(param, click.Option) and not param.required else ""
            self.fail(f"the path is empty{hint}", param, ctx)
        return super().convert(value, param, ctx)
