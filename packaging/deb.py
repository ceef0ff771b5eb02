"""Builds the deb: `python packaging/deb.py PYZ FOLDER`. Holds the zipapp's content, unpacked, with units, manual pages and settings.

Takes what it ships from the zipapp, so that both packages hold the same bytes. The same zipapp and commit give the same bytes.
"""

from __future__ import annotations

import email.parser
import gzip
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path
from typing import Final

from click.shell_completion import BashComplete
from manpages import write_pages
from pyz import ROOT, commit_time

from llmgw import __version__
from llmgw.cli.main import cli

FILES: Final = ROOT / "packaging" / "deb"
UNITS: Final = ("llmgw-server.service", "llmgw-router.service", "llmgw-router.socket", "llmgw-agent.service")
SCRIPTS: Final = ("preinst", "postinst", "prerm", "postrm")
MAINTAINER: Final = "llmgw maintainers <llmgw@packages.example.org>"
REVISION: Final = "1"  # of the packaging of one version of llmgw
CONTROL: Final = """\
Package: llmgw
Version: {version}
Architecture: {architecture}
Maintainer: {maintainer}
Installed-Size: {size_kib}
Depends: libc6 (>= {libc}), python3 (>= {minor}~), python3 (<< {next_minor}~), adduser
Section: net
Priority: optional
Description: any number of GPU machines behind one OpenAI-compatible endpoint
 An operator declares models; llmgw places replicas of them on the GPUs of
 nodes, runs the engines that serve them (vLLM, SGLang, llama.cpp, any
 command), routes every request to a ready replica and heals what breaks.
 .
 This package holds the control plane, the router, the agent and the command
 line, with units for systemd. It starts nothing by itself.
"""
COPYRIGHT: Final = """\
Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
Upstream-Name: llmgw

Files: *
Copyright: 2026 the llmgw authors
License: Apache-2.0
 On Debian systems, the full text is in /usr/share/common-licenses/Apache-2.0.

Files: usr/lib/llmgw/bin/litestream
Copyright: 2020-2026 Ben Johnson and the authors of Litestream
License: Apache-2.0
 On Debian systems, the full text is in /usr/share/common-licenses/Apache-2.0.

Files: usr/lib/llmgw/*
Copyright: 2001-2026 the authors of each package, as its files name them
License: as-each-package-says
 The packages below lie in /usr/lib/llmgw as they were released. The text of
 each licence is in the package's own .dist-info folder there.
 .
{packages}
"""


def version() -> str:
    """llmgw's own, and the packaging's revision."""
    return f"{__version__}-{REVISION}"


def libc_needed(site: Path) -> str:
    """The oldest C library that every compiled part runs with: the tags of wheels promise it, ours name the versions they call."""
    needed = [(2, 17)]  # no older one has Python 3.11
    for wheel in site.glob("*.dist-info/WHEEL"):
        promised = [(int(a), int(b)) for a, b in re.findall(r"^Tag: .*manylinux_(\d+)_(\d+)_", wheel.read_text(), re.MULTILINE)]
        if promised:
            needed.append(min(promised))
    for library in site.glob("llmgw/**/*.so"):
        needed += [(int(a), int(b)) for a, b in re.findall(rb"GLIBC_(\d+)\.(\d+)", library.read_bytes())]
    return ".".join(map(str, max(needed)))


def packages(site: Path) -> Iterator[str]:
    """A line for each package that lies in `site`: name, version, licence."""
    for metadata in sorted(site.glob("*.dist-info/METADATA")):
        told = email.parser.Parser().parsestr(metadata.read_text(encoding="utf-8"), headersonly=True)
        classified = [one.rpartition(" :: ")[2] for one in told.get_all("Classifier", []) if one.startswith("License :: ")]
        short = (told["License"] or "").strip().partition("\n")[0]
        licence = told["License-Expression"] or ", ".join(classified) or short or "see its files"
        if told["Name"] != "llmgw":
            yield f" {told['Name']} {told['Version']}: {licence}"


def compressed(target: Path, text: bytes) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(gzip.compress(text, 9, mtime=0))


def place(tree: Path, target: str, source: Path, mode: int = 0o644) -> None:
    path = tree / target
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, path)
    path.chmod(mode)


def fill(tree: Path, pyz: Path, built_at: int) -> None:
    """Everything that the package installs."""
    site = tree / "usr/lib/llmgw"
    with zipfile.ZipFile(pyz) as archive, tempfile.TemporaryDirectory() as folder:
        archive.extractall(folder, [name for name in archive.namelist() if name.startswith("site-packages/")])
        site.parent.mkdir(parents=True)
        shutil.move(Path(folder) / "site-packages", site)
    place(tree, "usr/bin/llmgw", FILES / "llmgw", 0o755)
    for unit in UNITS:
        place(tree, f"lib/systemd/system/{unit}", FILES / unit)
    place(tree, "usr/lib/sysusers.d/llmgw.conf", FILES / "llmgw.sysusers")
    place(tree, "etc/llmgw/llmgw.toml", FILES / "llmgw.toml")
    place(tree, "usr/share/lintian/overrides/llmgw", FILES / "lintian-overrides")
    doc = "usr/share/doc/llmgw"
    place(tree, f"{doc}/examples/llmgw.toml.example", ROOT / "llmgw.toml.example")
    date = datetime.fromtimestamp(built_at, UTC)
    (tree / doc / "copyright").write_text(COPYRIGHT.format(packages="\n".join(packages(site))), encoding="utf-8")
    compressed(tree / doc / "changelog.gz", (ROOT / "CHANGELOG.md").read_bytes())
    entry = f"llmgw ({version()}) stable; urgency=medium\n\n  * llmgw {__version__}; what is new stands in changelog.gz.\n\n"
    compressed(tree / doc / "changelog.Debian.gz", f"{entry} -- {MAINTAINER}  {format_datetime(date)}\n".encode())
    with tempfile.TemporaryDirectory() as pages:
        write_pages(Path(pages), f"{date:%Y-%m-%d}")
        for page in Path(pages).iterdir():
            compressed(tree / f"usr/share/man/man1/{page.name}.gz", page.read_bytes())
    completion = tree / "usr/share/bash-completion/completions/llmgw"
    completion.parent.mkdir(parents=True)
    completion.write_text(BashComplete(cli, {}, "llmgw", "_LLMGW_COMPLETE").source().strip() + "\n", encoding="utf-8")


def describe(tree: Path) -> None:
    """What dpkg reads: control, conffiles, checksums and scripts."""
    debian = tree / "DEBIAN"
    debian.mkdir()
    installed = sorted(path for path in tree.rglob("*") if path.is_file())
    sums = [f"{hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()}  {path.relative_to(tree)}" for path in installed]
    (debian / "md5sums").write_text("\n".join(line for line in sums if "  etc/" not in line) + "\n", encoding="utf-8")
    (debian / "conffiles").write_text("/etc/llmgw/llmgw.toml\n", encoding="utf-8")
    major, minor = sys.version_info[:2]
    architecture = subprocess.run(["dpkg", "--print-architecture"], capture_output=True, text=True, check=True).stdout.strip()
    control = CONTROL.format(
        version=version(),
        architecture=architecture,
        maintainer=MAINTAINER,
        size_kib=sum(-(-path.stat().st_size // 1024) for path in installed),
        libc=libc_needed(tree / "usr/lib/llmgw"),
        minor=f"{major}.{minor}",
        next_minor=f"{major}.{minor + 1}",
    )
    (debian / "control").write_text(control, encoding="utf-8")
    for script in SCRIPTS:
        place(tree, f"DEBIAN/{script}", FILES / script, 0o755)


def settle(tree: Path, built_at: int) -> None:
    """Modes and times that do not depend on the machine."""
    for path in sorted(tree.rglob("*"), reverse=True):
        runs = path.is_dir() or path.parent.name == "bin" or path.name in SCRIPTS
        path.chmod(0o755 if runs else 0o644)
        os.utime(path, (built_at, built_at))
    tree.chmod(0o755)
    os.utime(tree, (built_at, built_at))


def pack(tree: Path, target: Path, built_at: int) -> None:
    """The tree as a deb; one thread, because the number of threads shows in the bytes."""
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(built_at)}
    subprocess.run(["dpkg-deb", "--root-owner-group", "-Zxz", "--threads-max=1", "--build", tree, target], check=True, env=environment)


def build(pyz: Path, folder: Path) -> Path:
    built_at = commit_time()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch) / "tree"
        tree.mkdir()
        fill(tree, pyz, built_at)
        describe(tree)
        settle(tree, built_at)
        architecture = re.search(r"^Architecture: (.*)$", (tree / "DEBIAN/control").read_text(), re.MULTILINE)
        assert architecture
        target = folder / f"llmgw_{version()}_{architecture[1]}.deb"
        pack(tree, target, built_at)
    return target


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python packaging/deb.py PYZ FOLDER")
    build(Path(sys.argv[1]), Path(sys.argv[2]))
