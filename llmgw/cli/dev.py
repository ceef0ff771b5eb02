"""`llmgw dev`: everything on this machine. Checks what it was told and hands over to `wiring.dev`."""

from __future__ import annotations

from pathlib import Path

import click

from llmgw.cli.paths import PathOption


def default_data_dir() -> Path:
    """Where `dev` keeps its state between runs: `${XDG_STATE_HOME:-~/.local/state}/llmgw/dev`."""
    import os

    state = os.environ.get("XDG_STATE_HOME", "")
    return (Path(state) if state.startswith("/") else Path.home() / ".local" / "state") / "llmgw" / "dev"


_PORT = click.IntRange(0, 65535)


@click.command()
@click.option("--port", type=_PORT, help="Port of /v1 on 127.0.0.1 (0: a free one).  [default: 8080]")
@click.option("--admin-port", type=_PORT, help="Port of the admin API and console on 127.0.0.1 (0: a free one).  [default: 8081]")
@click.option(
    "--data-dir",
    type=PathOption(file_okay=False),
    help="Where state is kept between runs.  [default: ~/.local/state/llmgw/dev]",
)
@click.option("--no-engine", is_flag=True, help="Start without the demo model.")
@click.option(
    "--sim", "sim_nodes", type=click.IntRange(1), help="So many simulated nodes of 8 GPUs in place of this machine's agent and model."
)
@click.option("--config", type=PathOption(), help="A settings file; none is read unless given.")
def dev(
    port: int | None, admin_port: int | None, data_dir: Path | None, no_engine: bool, sim_nodes: int | None, config: Path | None
) -> int:
    """Everything in one process on this machine, with a small model on the CPU. Ctrl-C ends all of it."""
    if port is not None and port == admin_port and port != 0:
        raise click.UsageError(f"--port and --admin-port are the same: {port}")
    from llmgw.settings.load import Role, load_text

    if config is None:
        loaded = load_text("", source="(no file)", role=Role.DEV)
    else:
        from llmgw.cli.files import load

        loaded = load(config, Role.DEV)
    from llmgw.wiring.dev import Simulated, ThisMachine, dev_main

    # A simulated fleet has a place of its own: its nodes would be waited for by the next start without it.
    default = default_data_dir() if sim_nodes is None else default_data_dir().with_name("dev-sim")
    where = (data_dir or default).expanduser().absolute()
    nodes = ThisMachine(demo=not no_engine) if sim_nodes is None else Simulated(sim_nodes)
    return dev_main(loaded, port=port, admin_port=admin_port, data_dir=where, nodes=nodes)
