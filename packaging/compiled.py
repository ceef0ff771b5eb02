"""Builds the compiled data plane: `python packaging/compiled.py [FOLDER]`. A copy of the package with C extensions beside its hot modules.

mypyc turns the modules below into one shared library and a loader for each. Their .py files stay beside them: a Python of another
minor version, or another kind of machine, finds no extension of its own and runs those. Nothing in the checkout itself changes, so
that an edit is never shadowed by what was compiled before it. Needs the test tools of `make`, a C compiler and Python's headers.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
TARGET: Final = ROOT / "build" / "compiled"
# What runs for every request or every chunk. A module that mypyc cannot take, or that runs once a second, is not here: msgspec
# Structs, classes whose attrs fields have factories, those that cattrs takes apart, subclasses of the standard library's classes.
MODULES: Final = (
    "access_log",
    "answer_headers",
    "body",
    "breaker",
    "cells",
    "choose",
    "client",
    "engine_load",
    "exchange",
    "families",
    "gate",
    "guard_rules",
    "http1",
    "keys",
    "limits",
    "metrics",
    "proxy",
    "queue",
    "rates",
    "reactor",
    "relay",
    "retry",
    "router",
    "sse",
    "sweeper",
    "table",
    "turns",
    "upstreams",
    "usage",
    "window",
)
GROUP: Final = "llmgw.router.data_plane"  # names the library (`llmgw.cli.version` looks for it); mypyc's own name is a hash of paths
# What one function of ours calls of another is nobody else's: such a call is a jump, or no call at all.
DIRECT_CALLS: Final = ("-fvisibility=hidden", "-fno-semantic-interposition", "-fno-plt")
NOTE: Final = "built-from.txt"
CANNOT: Final = 3  # exit status: something is missing on this machine; 1 is a module that does not compile


class Missing(Exception):
    """This machine cannot compile. The text says what would help."""


def build(target: Path = TARGET) -> Path:
    """The folder to put first on Python's path; built anew where sources or tools have changed.

    Raises Missing where there is no compiler or no headers, and CalledProcessError where a module does not compile.
    """
    check_tools()
    if is_current(target):
        return target
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT / "llmgw", tree / "llmgw", ignore=shutil.ignore_patterns("__pycache__"))
        # A process of its own: mypyc works in its working directory. No random hashes: the same sources give the same bytes.
        # Linked by the bare compiler: the command that Python was built with may name folders of the machine that built it.
        paths = {"PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1"}
        environment = {**os.environ, **paths, "PYTHONHASHSEED": "0", "LDSHARED": f"{compiler()} -shared", "LDFLAGS": ""}
        command = [sys.executable, Path(__file__).resolve(), "--here"]
        done = subprocess.run(command, cwd=tree, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode:
            sys.stderr.write(done.stdout)
            done.check_returncode()
        shutil.rmtree(target, ignore_errors=True)
        (target / "llmgw").parent.mkdir(parents=True)
        shutil.move(tree / "llmgw", target / "llmgw")
    (target / NOTE).write_text(fingerprint())
    return target


def is_current(target: Path = TARGET) -> bool:
    """Does it hold what these sources compile to?"""
    note = target / NOTE
    return note.exists() and note.read_text() == fingerprint()


def check_tools() -> None:
    """Raises Missing."""
    if shutil.which(compiler()) is None:
        raise Missing(f"no C compiler ({compiler()}) is installed here; on Debian: apt install gcc libc6-dev")
    headers = Path(sysconfig.get_path("include"), "Python.h")
    if not headers.exists():
        raise Missing(f"Python's headers ({headers}) are not installed here; on Debian: apt install python3-dev")


def compiler() -> str:
    """The program, as setuptools takes it: what the environment names, else what Python was built with."""
    return (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]


def fingerprint() -> str:
    """Of all that decides what comes out."""
    digest = hashlib.sha256(Path(__file__).read_bytes() + (ROOT / "pyproject.toml").read_bytes())
    for path in sorted((ROOT / "llmgw").rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    tools = f"{sys.version} {sysconfig.get_platform()} mypy {metadata.version('mypy')} setuptools {metadata.version('setuptools')}"
    return f"{digest.hexdigest()} {tools}\n"


def compile_here() -> None:
    """In the working directory, which holds a copy of the package."""
    from mypyc.build import mypycify
    from setuptools import Distribution
    from setuptools.command.build_ext import build_ext

    with tempfile.TemporaryDirectory() as scratch:
        checked = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", f"{scratch}/cache"]
        paths = [f"llmgw/router/{name}.py" for name in MODULES]
        extensions = mypycify([*checked, *paths], opt_level="3", debug_level="0", group_name=GROUP, target_dir="generated")
        for extension in extensions:
            # A newer compiler's new warning shall not end our build.
            kept = [flag for flag in extension.extra_compile_args if flag != "-Werror"]
            extension.extra_compile_args = [*kept, *DIRECT_CALLS]
            extension.extra_link_args = ["-s"]  # no symbols for debuggers: half the size
        command = build_ext(Distribution({"name": "llmgw", "ext_modules": extensions}))
        command.inplace = True
        command.build_lib, command.build_temp = f"{scratch}/lib", f"{scratch}/objects"
        command.ensure_finalized()
        command.run()


if __name__ == "__main__":
    if sys.argv[1:] == ["--here"]:
        compile_here()
    elif len(sys.argv) > 2:
        sys.exit("usage: python packaging/compiled.py [FOLDER]")
    else:
        try:
            print(f"compiled: {build(Path(*sys.argv[1:]).resolve() if sys.argv[1:] else TARGET)}")
        except Missing as err:
            print(f"the data plane cannot be compiled: {err}", file=sys.stderr)
            sys.exit(CANNOT)
        except subprocess.CalledProcessError:
            sys.exit("the data plane does not compile; what the compiler said stands above")
