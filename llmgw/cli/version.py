"""`llmgw version`."""

from __future__ import annotations

from typing import Final

import click

import llmgw
from llmgw import __version__

# What `packaging/compiled.py` builds into llmgw.router beside the router's modules; another Python than the builder's does not see it.
COMPILED_LIBRARY: Final = "data_plane__mypyc"


@click.command()
@click.option("--output", "-o", type=click.Choice(["text", "json"]), default="text", show_default=True, help="How it is printed.")
@click.option("--verbose", "-v", is_flag=True, help="Also Python's version and those of the parts that are installed.")
def version(output: str, verbose: bool) -> None:
    """Print the build's version, and whether its data plane is compiled or interpreted."""
    data_plane = "compiled" if is_compiled() else "interpreted"
    if output == "json":
        import json

        told = {"version": __version__, "data_plane": data_plane}
        click.echo(json.dumps({**told, **_parts()} if verbose else told, indent=2))
        return
    click.echo(f"llmgw {__version__}")
    click.echo(f"data plane: {data_plane}")
    if verbose:
        for name, number in _parts().items():
            click.echo(f"{name} {number or 'not installed'}")


def is_compiled() -> bool:
    """Does a router of this installation run the compiled modules? Looks for them and loads nothing, not even the router's package."""
    from importlib.machinery import PathFinder

    return PathFinder.find_spec(COMPILED_LIBRARY, [f"{folder}/router" for folder in llmgw.__path__]) is not None


def _parts() -> dict[str, str | None]:
    """Name and version of each part; None: not installed."""
    import platform
    from importlib import metadata

    found: dict[str, str | None] = {"python": f"{platform.python_version()} on {platform.system()} {platform.machine()}"}
    for name in ("trio", "hypercorn", "quart", "apsw", "httptools", "msgspec", "trio-websocket", "xllamacpp"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found
