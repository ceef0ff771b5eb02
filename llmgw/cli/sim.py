"""`llmgw sim`: checks what it was told and hands over to `wiring.sim`."""

from __future__ import annotations

from pathlib import Path

import click

from llmgw.cli.lean import leave_rich_out
from llmgw.cli.paths import PathOption


@click.command()
@click.option("--nodes", type=int, default=8, show_default=True, help="How many nodes.")
@click.option("--gpus", type=int, default=8, show_default=True, help="GPUs of 80 GB on each.")
@click.option("--serve", is_flag=True, help="Engines really answer, on ports of this machine.")
@click.option("--seed", type=int, default=1, show_default=True, help="Load times, speeds, crashes and hangs follow from it.")
@click.option(
    "--crash-share", type=click.FloatRange(0, 1), default=0.0, show_default=True, help="Share of starts that crash while loading."
)
@click.option(
    "--hang-share", type=click.FloatRange(0, 1), default=0.0, show_default=True, help="Share of requests never answered (--serve)."
)
@click.option("--join-s", type=click.FloatRange(0, 3600), default=0.0, show_default=True, help="Seconds over which the nodes come up.")
@click.option("--server", default="", help="The control plane; else the file's, else http://127.0.0.1:8081.")
@click.option("--token-file", type=PathOption(), help="Its agent-token; else the file's, else this machine's.")
@click.option("--config", type=PathOption(), help="A settings file; none is read unless given.")
def sim(
    nodes: int,
    gpus: int,
    serve: bool,
    seed: int,
    crash_share: float,
    hang_share: float,
    join_s: float,
    server: str,
    token_file: Path | None,
    config: Path | None,
) -> int:
    """Simulated nodes that behave like agents, until told to end."""
    leave_rich_out()
    from llmgw.settings.load import load_text

    if config is None:
        loaded = load_text("", source="(no file)")
    else:
        from llmgw.cli.files import load

        loaded = load(config, None)
    from llmgw.wiring.sim import FleetPlan, sim_main

    plan = FleetPlan(nodes, gpus, seed, serve, crash_share=crash_share, hang_share=hang_share, join_s=join_s)
    return sim_main(loaded, plan, server=server, token_file=token_file)
