"""`llmgw version`."""

from __future__ import annotations

import click

from llmgw import __version__


@click.command()
@click.option("--verbose", "-v", is_flag=True, help="Also Python's version and those of the parts that are installed.")
def version(verbose: bool) -> None:
    """Print the build's version."""
    click.echo(f"llmgw {__version__}")
    if verbose:
        _parts()


def _parts() -> None:
    import platform
    from importlib import metadata

    click.echo(f"python {platform.python_version()} on {platform.system()} {platform.machine()}")
    for name in ("trio", "hypercorn", "quart", "apsw", "httptools", "msgspec", "trio-websocket", "xllamacpp"):
        try:
            click.echo(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            click.echo(f"{name} not installed")
