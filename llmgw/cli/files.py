"""Loading the settings file of a command: one way for every role, with its warnings on the standard error."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from llmgw.cli.text import printable
from llmgw.settings.load import Loaded, Role, load_file


def load(path: Path, role: Role | None) -> Loaded:
    """The checked file; its warnings are printed. Raises what `load_file` raises."""
    loaded = load_file(path, role=role)
    for warning in loaded.warnings:
        click.echo(printable(f"llmgw: warning: {path}: {warning}", sys.stderr.isatty()), err=True)
    return loaded
