"""A user's own folders: settings of `ctl`, what `dev` keeps, and where a running `dev` tells `ctl` of itself. Opens nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def config_dir(environ: Mapping[str, str]) -> Path:
    """`${XDG_CONFIG_HOME:-~/.config}/llmgw`."""
    return _base(environ, "XDG_CONFIG_HOME", ".config") / "llmgw"


def state_dir(environ: Mapping[str, str]) -> Path:
    """`${XDG_STATE_HOME:-~/.local/state}/llmgw`."""
    return _base(environ, "XDG_STATE_HOME", ".local/state") / "llmgw"


def running_dir(environ: Mapping[str, str]) -> Path:
    """Holds a file for each `llmgw dev` of this user that runs, whatever its data directory: its address and its token (0600)."""
    return state_dir(environ) / "running"


def _base(environ: Mapping[str, str], variable: str, usual: str) -> Path:
    given = environ.get(variable, "")
    return Path(given) if given.startswith("/") else Path(environ.get("HOME") or os.path.expanduser("~")) / usual
