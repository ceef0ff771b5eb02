"""What a command asks before it ends or replaces something."""

from __future__ import annotations

import sys

import click


def confirm(question: str, yes: bool) -> None:
    """Raises UsageError where nobody can be asked: a script says that it means it."""
    if yes:
        return
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.UsageError("nothing was changed: there is no terminal to ask on, so say --yes")
    click.confirm(question, abort=True)
