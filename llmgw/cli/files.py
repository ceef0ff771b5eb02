"""Loading the settings file of a command: one way for every role, with its warnings on the standard error."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import click

from llmgw.cli.text import printable
from llmgw.settings.load import Loaded, Role, load_file


def load(path: Path, role: Role | None) -> Loaded:
    """The checked file; its warnings are printed. Raises what `load_file` raises."""
    loaded = load_file(path, role=role)
    warn(path, loaded.warnings)
    return loaded


def warn(path: Path, warnings: Iterable[str]) -> None:
    """What is no fault of the file at `path`, and worth a person's look: a line each on the standard error."""
    for warning in warnings:
        click.echo(printable(f"llmgw: warning: {path}: {warning}", sys.stderr.isatty()), err=True)
