"""Runs one of our own modules in a process of its own, whatever llmgw was installed from.

`python -m llmgw...` finds us in a virtual environment only. In the packages the interpreter is the system's and knows nothing of
the folder that we were loaded from, so the child is this file, run by its path: it makes that folder known, then runs the module.
Starts no process itself, and sets no variable that an engine would inherit.
"""

from __future__ import annotations

import runpy
import sys
from importlib import resources
from pathlib import Path
from typing import Final

SITE_FOLDERS: Final = ("site-packages", "dist-packages")


def command_line(module: str, python: str = sys.executable) -> tuple[str, ...]:
    """The words that start `module` as a program; its arguments follow. `-P`: this file's own folder is no place to import from."""
    return (python, "-P", str(resources.files("llmgw.agent").joinpath("own_modules.py")), module)


def with_folder(path: list[str], folder: str) -> list[str]:
    """`path` with our folder: behind the standard library, which nothing may shadow, and before what else is installed, which may be
    older than what we were built with."""
    if folder in path:
        return path
    installed = [index for index, one in enumerate(path) if Path(one).name in SITE_FOLDERS]
    index = installed[0] if installed else len(path)
    return [*path[:index], folder, *path[index:]]


if __name__ == "__main__":
    sys.path[:] = with_folder(sys.path, str(Path(__file__).resolve().parents[2]))
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
