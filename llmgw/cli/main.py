"""The program's entry: finds the command, and turns what goes wrong into one readable line and its exit code.

Imports no command before it is called: `version`, `check`, `lease` and `ctl` start at once and never load Trio or a server.
"""

from __future__ import annotations

import contextlib
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
    "server": ("llmgw.cli.server:server", "A control plane (with its router, unless the file says otherwise); add, list, rm."),
    "router": ("llmgw.cli.router:router", "A router by itself; add, list, rm."),
    "agent": ("llmgw.cli.agent:agent", "The agent of a machine with GPUs."),
    "sim": ("llmgw.cli.sim:sim", "Simulated nodes for load tests, drills and demos."),
    "init": ("llmgw.cli.init:init", "Set this machine up: its file, the cluster's CA, the first admin token."),
    "join": ("llmgw.cli.join:join", "Let this machine into a cluster, by a join token."),
    "node": ("llmgw.cli.node:node", "Machines with GPUs: add, list, rm."),
    "check": ("llmgw.cli.check:check", "Tell every fault of a settings file."),
    "ctl": ("llmgw.cli.ctl.group:ctl", "Talk to a control plane: status, models, replicas, nodes, events."),
    "lease": ("llmgw.cli.lease:lease", "Let go of the lease of a control plane that died here."),
    "backup": ("llmgw.cli.backup:backup", "One archive of the store, the settings file and the tokens."),
    "restore": ("llmgw.cli.backup:restore", "Put the store of an archive in the place of what is there."),
    "store": ("llmgw.cli.store:store", "The store itself: what is there, whether it is whole, and which copy is the base."),
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
    _open_what_is_closed()
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
        from llmgw.cli.text import readable

        click.UsageError(readable(err.format_message()), err.ctx).show()
        return 2
    except click.exceptions.Exit as err:
        return err.exit_code
    except click.Abort:  # also Ctrl-C in a command: click has ended the line then
        return EXIT_INTERRUPTED
    except KeyboardInterrupt:
        _say("")
        return EXIT_INTERRUPTED
    except click.ClickException as err:
        err.show()
        return err.exit_code
    except BrokenPipeError:
        raise
    except BaseExceptionGroup as err:
        if err.subgroup((KeyboardInterrupt, click.Abort)) is not None:
            _say("")
            return EXIT_INTERRUPTED
        if err.subgroup(lambda one: not isinstance(one, Exception | BaseExceptionGroup)) is not None:
            raise
        return _failed(err)
    except Exception as err:
        return _failed(err)
    return code if isinstance(code, int) else 0


def _failed(err: BaseException) -> int:
    """The exit code of what a command raised, after saying it: a line for each error of a group."""
    from llmgw.domain.errors import EXIT_BROKEN, EXIT_UNAVAILABLE, LlmgwError
    from llmgw.domain.files import machines_fault, words

    if os.environ.get(DEBUG_VARIABLE, "") not in ("", "0"):
        import traceback

        traceback.print_exception(err)
    code = 0
    for one in _leaves(err):
        if isinstance(one, LlmgwError):
            _say(f"llmgw: {one.message or one.code}")
            code = code or one.exit_code
        elif isinstance(one, OSError) and one.filename is not None and machines_fault(one):  # without a name: of our output
            _say(f"llmgw: {words(one)} ({DEBUG_VARIABLE}=1 shows where)")
            code = code or EXIT_UNAVAILABLE
        elif isinstance(one, OSError) and one.strerror:
            _say(f"llmgw: {words(one)} ({DEBUG_VARIABLE}=1 shows where)")
            code = EXIT_BROKEN
        else:
            reason = " ".join(str(one).split())
            _say(f"llmgw: failed: {type(one).__name__}{': ' + reason if reason else ''} ({DEBUG_VARIABLE}=1 shows where)")
            code = EXIT_BROKEN
    return code


def _leaves(err: BaseException) -> list[BaseException]:
    """The errors of a group, however deep, each text once: what nurseries wrapped is unwrapped for the reader."""
    if not isinstance(err, BaseExceptionGroup):
        return [err]
    found: dict[str, BaseException] = {}
    for inner in err.exceptions:
        for leaf in _leaves(inner):
            found.setdefault(f"{type(leaf).__name__}: {leaf}", leaf)
    return list(found.values())


def _say(text: str) -> None:
    from llmgw.cli.text import printable, readable

    with contextlib.suppress(OSError):  # nobody may be left to tell
        click.echo(printable(readable(text), sys.stderr.isatty()), err=True)


def _open_what_is_closed() -> None:
    """Whoever starts us may have closed an output; its number would be given to the next file or socket, which our lines would reach."""
    for number, name in ((0, "stdin"), (1, "stdout"), (2, "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDONLY if number == 0 else os.O_WRONLY)  # it gets the lowest number that is free: this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115 - for as long as we live


def _forget_output() -> None:
    """The interpreter flushes on its way out; what cannot be written goes nowhere then, without a word."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
