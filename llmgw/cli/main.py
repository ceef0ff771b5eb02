"""The program's entry: finds the command, and turns what goes wrong into one readable line and its exit code.

Imports no command before it is called: `version`, `check` and `ctl` start at once and never load Trio or a server.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Final

import click

from llmgw.cli.lazy import LazyGroup

EXIT_INTERRUPTED: Final = 130  # 128 + SIGINT, as a shell would say
EXIT_PIPE_CLOSED: Final = 141  # 128 + SIGPIPE, as a shell would say
DEBUG_VARIABLE: Final = "LLMGW_DEBUG"

COMMANDS: Final = {
    "dev": ("llmgw.cli.dev:dev", "Everything on this machine: control plane, router, agent and a small model."),
    "server": ("llmgw.cli.server:server", "A control plane (with its router, unless the file says otherwise)."),
    "router": ("llmgw.cli.router:router", "A router by itself."),
    "agent": ("llmgw.cli.agent:agent", "The agent of a machine with GPUs."),
    "check": ("llmgw.cli.check:check", "Tell every fault of a settings file."),
    "ctl": ("llmgw.cli.ctl.group:ctl", "Talk to a control plane: status, models, replicas, nodes, events."),
    "version": ("llmgw.cli.version:version", "Print the build's version."),
}


@click.group(cls=LazyGroup, lazy=COMMANDS, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.option("--version", "-V", is_flag=True, is_eager=True, expose_value=False, callback=lambda ctx, _, asked: _print_version(ctx, asked))
def cli() -> None:
    """Any number of GPU machines behind one OpenAI-compatible endpoint."""


def _print_version(ctx: click.Context, asked: bool) -> None:
    if asked and not ctx.resilient_parsing:
        from llmgw import __version__

        click.echo(f"llmgw {__version__}")
        ctx.exit()


def main(args: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code. Nothing but a debug run shows a traceback."""
    try:
        code = _run(args)
        sys.stdout.flush()  # here, so that a closed pipe is met where it can be handled
    except BrokenPipeError:
        _forget_output()
        return EXIT_PIPE_CLOSED
    except OSError as err:  # a full disk under `> file` is met when the text leaves us
        _forget_output()
        _say(f"llmgw: the output could not be written: {err.strerror or err}")
        return 1
    return code


def _run(args: Sequence[str] | None) -> int:
    try:
        # click's own main ends the process; without it, errors come here and so do exit codes
        code = cli.main(args=None if args is None else list(args), prog_name="llmgw", standalone_mode=False)
    except click.UsageError as err:
        err.show()
        return 2
    except click.exceptions.Exit as err:
        return err.exit_code
    except (click.Abort, KeyboardInterrupt):
        _say("")
        return EXIT_INTERRUPTED
    except click.ClickException as err:
        err.show()
        return err.exit_code
    except BrokenPipeError:
        raise
    except Exception as err:
        return _failed(err)
    return code if isinstance(code, int) else 0


def _failed(err: Exception) -> int:
    """The exit code of what a command raised, after saying it."""
    from llmgw.domain.errors import EXIT_BROKEN, LlmgwError

    if os.environ.get(DEBUG_VARIABLE, "") not in ("", "0"):
        import traceback

        traceback.print_exception(err)
    if isinstance(err, LlmgwError):
        _say(f"llmgw: {err.message or err.code}")
        return err.exit_code
    if isinstance(err, ExceptionGroup) and (inner := _only(err)) is not None:
        return _failed(inner)
    reason = " ".join(str(err).split())
    _say(f"llmgw: failed: {type(err).__name__}{': ' + reason if reason else ''} ({DEBUG_VARIABLE}=1 shows where)")
    return EXIT_BROKEN


def _only(group: ExceptionGroup[Exception]) -> Exception | None:
    """The one error of a group that holds a single one: what a nursery wrapped is unwrapped for the reader."""
    return group.exceptions[0] if len(group.exceptions) == 1 else None


def _say(text: str) -> None:
    from llmgw.cli.text import printable

    try:
        click.echo(printable(text, sys.stderr.isatty()), err=True)
    except OSError:
        pass  # nobody is left to tell


def _forget_output() -> None:
    """The interpreter flushes on its way out; what cannot be written goes nowhere then, without a word."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
