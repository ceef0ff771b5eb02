"""The deb: what checkers say of it, and its life in a bare Debian from install to purge (cases B186, B188, B195; of T45 the upgrade)."""

from __future__ import annotations

import hashlib
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packages.conftest import DIST, need, version_text
from tests.packages.roots import Root, Started
from tests.programs import wait_for

REPOSITORY = DIST.parent
ENGINE = (REPOSITORY / "tests" / "chaos" / "eng.py").read_text()
UNIT = (REPOSITORY / "tests" / "chaos" / "unit.py").read_text()
UNITS = ("llmgw-server.service", "llmgw-router.service", "llmgw-router.socket", "llmgw-agent.service")
EXPOSURE_MAX = {"llmgw-server.service": 1.5, "llmgw-router.service": 1.5, "llmgw-agent.service": 3.0}  # of 10, as docs/install.md says
KEY = "a key for tests"
PREVIOUS = "0.0.9-1"
MODEL = """
[[model]]
name = "m1"
[[model.profile]]
engine = "command"
command = ["python3", "/opt/engine.py", "--port", "{port}"]
"""


def repacked(deb: Path, target: Path, change: dict[str, tuple[str, str]]) -> Path:
    """The package as another build of it: in each named file, one text for another."""
    tree = target.parent / f"{target.stem}.tree"
    subprocess.run(["dpkg-deb", "--raw-extract", deb, tree], check=True)
    for name, (before, after) in change.items():
        text = (tree / name).read_text()
        assert re.search(before, text), name
        (tree / name).write_text(re.sub(before, after, text, count=1))
    sums = (tree / "DEBIAN/md5sums").read_text()
    for name in change:
        digest = hashlib.md5((tree / name).read_bytes(), usedforsecurity=False).hexdigest()
        sums = re.sub(rf"^[0-9a-f]+  {re.escape(name)}$", f"{digest}  {name}", sums, flags=re.MULTILINE)
    (tree / "DEBIAN/md5sums").write_text(sums)
    subprocess.run(["dpkg-deb", "--root-owner-group", "-Znone", "--build", tree, target], check=True, stdout=subprocess.DEVNULL)
    shutil.rmtree(tree)
    return target


@pytest.fixture(scope="session")
def previous(deb: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A build before this one, with other units and another settings file."""
    return repacked(
        deb,
        tmp_path_factory.mktemp("previous") / "previous.deb",
        {
            "DEBIAN/control": (r"Version: .*", f"Version: {PREVIOUS}"),
            "etc/llmgw/llmgw.toml": (r"# After an edit: llmgw check", "# The text of the build before."),
            "lib/systemd/system/llmgw-server.service": (r"TimeoutStopSec=60s", "TimeoutStopSec=55s"),
        },
    )


# --- checkers


def test_lintian_has_no_errors_and_no_warnings(deb: Path) -> None:
    need("lintian")
    done = subprocess.run(["lintian", "--fail-on", "error,warning", "--allow-root", deb], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.fixture
def unit_root(deb: Path, tmp_path: Path) -> Path:
    """A folder with this machine's units and ours, and the programs that ours name."""
    need("systemd-analyze", "dpkg-deb")
    root = tmp_path / "root"
    shutil.copytree("/lib/systemd/system", root / "lib/systemd/system", symlinks=True)
    subprocess.run(["dpkg-deb", "--extract", deb, root], check=True)
    (root / "bin").mkdir()
    shutil.copy("/bin/sh", root / "bin/sh")
    return root


@pytest.mark.parametrize("unit", UNITS)
def test_systemd_finds_no_fault_in_a_unit(unit: str, unit_root: Path) -> None:
    command = ["systemd-analyze", "verify", "--man=no", f"--root={unit_root}", f"/lib/systemd/system/{unit}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, [line for line in done.stderr.splitlines() if "llmgw" in line]) == (0, [])


@pytest.mark.parametrize("unit", EXPOSURE_MAX)
def test_a_unit_is_exposed_no_more_than_the_page_says(unit: str, unit_root: Path) -> None:
    command = ["systemd-analyze", "security", "--offline=yes", f"--root={unit_root}", unit]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    level = re.search(r"Overall exposure level for \S+: ([0-9.]+)", done.stdout)
    assert level, done.stderr
    assert float(level[1]) <= EXPOSURE_MAX[unit]


def test_the_same_commit_gives_the_same_bytes(deb: Path, pyz: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "packaging/deb.py", pyz, tmp_path], cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
    (again,) = tmp_path.glob("*.deb")
    assert (again.name, again.read_bytes()) == (deb.name, deb.read_bytes())


def test_manual_pages_have_no_faults(deb: Path, tmp_path: Path) -> None:
    need("man", "dpkg-deb")
    subprocess.run(["dpkg-deb", "--extract", deb, tmp_path], check=True)
    pages = sorted((tmp_path / "usr/share/man/man1").iterdir())
    assert {"llmgw.1.gz", "llmgw-server.1.gz", "llmgw-ctl.1.gz"} <= {page.name for page in pages}
    for page in pages:
        command = ["man", "--warnings", "--local-file", page]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env={"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"})
        assert done.stderr == ""
        assert "EXIT STATUS" in done.stdout


# --- its life in a bare Debian


def install(root: Root, deb: Path) -> str:
    (root.path / "root" / deb.name).write_bytes(deb.read_bytes())
    return root.run("apt-get", "install", "--yes", "-o", "Dpkg::Options::=--force-confold", f"/root/{deb.name}", limit_s=300)


def prepare(root: Root) -> None:
    """What is not ours: an engine, and the stand-in for systemd."""
    root.write("/opt/engine.py", ENGINE)
    root.write("/opt/unit.py", UNIT)
    root.write("/opt/m.toml", MODEL)


def start_unit(root: Root, name: str, *words: str) -> Started:
    started = root.start(name, "python3", "/opt/unit.py", f"{name}.service", *words)
    started.wait_log(": active")
    return started


def let_in(root: Root) -> None:
    """The operator's edit: a client's key."""
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    settings = root.read("/etc/llmgw/llmgw.toml")
    root.write("/etc/llmgw/llmgw.toml", f'{settings}\n[[auth.key]]\nname = "tests"\nsha256 = "{digest}"\n')


def uid_of(root: Root, name: str) -> str:
    return root.run("id", "-u", name).strip()


def test_install_serve_remove_and_purge(root: Root, deb: Path, pyz: Path) -> None:
    before = root.files()
    accounts = [root.read(f"/etc/{name}") for name in ("passwd", "group")]
    said = install(root, deb)

    # Nothing was started, and what was not done is said.
    assert root.processes() == []
    assert "systemd does not run here" in said
    assert "nothing was started" in said
    assert root.run("llmgw", "version") == version_text(pyz)
    assert "fine" in root.run("llmgw", "check", "/etc/llmgw/llmgw.toml")
    for role in ("server", "router", "agent"):
        assert "fine" in root.run("llmgw", "check", "--role", role)
    assert root.run("dpkg", "--verify", "llmgw") == ""
    offered = root.run("llmgw", _LLMGW_COMPLETE="bash_complete", COMP_WORDS="llmgw ser", COMP_CWORD="1")
    assert offered.split() == ["plain,server"]

    prepare(root)
    let_in(root)
    installed = root.files()
    server, router = start_unit(root, "llmgw-server"), start_unit(root, "llmgw-router")
    agent = start_unit(root, "llmgw-agent")
    wait_for(lambda: root.run("llmgw", "ctl", "node", "list", code=None).count("\n") > 1, "the node")
    root.run("llmgw", "ctl", "model", "apply", "-f", "/opt/m.toml")
    wait_for(lambda: root.chat("127.0.0.1:8080", "m1", KEY)[0] == 200, "an answer of the engine")
    assert root.chat("127.0.0.1:8080", "m1")[0] == 401
    assert "gpu-unknown" not in root.run("llmgw", "ctl", "node", "list", "--output", "json")

    ours = uid_of(root, "llmgw")
    running = [line.split(maxsplit=2) for line in root.processes() if "unit.py" not in line]
    assert {uid for _, uid, _ in running} == {ours}, running
    # The program's folder and the settings are as they were: state is written in the folders that are for it, and nowhere else.
    state = ("/var/lib/llmgw", "/run/", "/root")
    assert [path for path in sorted(root.files() - installed) if not path.startswith(state)] == []
    assert root.run("dpkg", "--verify", "llmgw").split()[1:] == ["c", "/etc/llmgw/llmgw.toml"]

    # A restart of the agent, and its crash, leave the engine alone.
    (engine,) = [line for line in root.processes() if "/opt/engine.py" in line]
    assert agent.end() == 0
    agent = start_unit(root, "llmgw-agent")
    wait_for(lambda: "ready" in root.run("llmgw", "ctl", "replica", "list"), "the adopted replica")
    assert [line for line in root.processes() if "/opt/engine.py" in line] == [engine]
    assert root.chat("127.0.0.1:8080", "m1", KEY)[0] == 200
    assert server.end() == 0
    assert "says STOPPING=1" in server.log
    assert router.end() == 0
    router = start_unit(root, "llmgw-router")
    assert root.chat("127.0.0.1:8080", "m1", KEY)[0] == 200, "no control plane runs, and what was last pushed is on the disk"
    assert router.end() == 0
    assert agent.end() == 0

    root.run("sh", "-c", f"kill {engine.split()[0]}")
    wait_for(lambda: root.processes() == [], "the end of the engine")
    root.run("apt-get", "remove", "--yes", "llmgw")
    assert not root.exists("/usr/bin/llmgw")
    assert not root.exists("/usr/lib/llmgw"), "compiled files are taken away too"
    assert root.exists("/var/lib/llmgw/llmgw.db")
    assert 'name = "tests"' in root.read("/etc/llmgw/llmgw.toml")

    root.run("apt-get", "purge", "--yes", "llmgw")
    left = {path for path in root.files() - before if not path.startswith(("/root/", "/opt/", "/run/"))}
    assert left <= {"/etc/passwd-", "/etc/group-", "/etc/shadow-", "/etc/gshadow-"}, sorted(left)
    assert [root.read(f"/etc/{name}") for name in ("passwd", "group")] == accounts


def test_an_upgrade_keeps_data_and_everything_that_was_edited(root: Root, deb: Path, previous: Path) -> None:
    install(root, previous)
    prepare(root)
    let_in(root)
    edited = root.read("/etc/llmgw/llmgw.toml")
    drop_in = "[Service]\nEnvironment=MINE=1\n"
    root.write("/etc/systemd/system/llmgw-agent.service.d/mine.conf", drop_in)
    unit = root.read("/lib/systemd/system/llmgw-server.service").replace("RestartSec=2s", "RestartSec=7s")
    root.write("/lib/systemd/system/llmgw-server.service", unit)
    server, router, agent = (start_unit(root, f"llmgw-{role}") for role in ("server", "router", "agent"))
    wait_for(lambda: root.run("llmgw", "ctl", "node", "list", code=None).count("\n") > 1, "the node")
    root.run("llmgw", "ctl", "model", "apply", "-f", "/opt/m.toml")
    wait_for(lambda: root.chat("127.0.0.1:8080", "m1", KEY)[0] == 200, "an answer of the engine")
    tokens = [root.read(f"/var/lib/llmgw/{name}") for name in ("admin-token", "agent-token")]
    (engine,) = [line for line in root.processes() if "/opt/engine.py" in line]

    said = install(root, deb)
    assert root.chat("127.0.0.1:8080", "m1", KEY)[0] == 200, "where no systemd restarts them, the roles run on"
    assert "llmgw-server.service was edited and is replaced" in said
    assert root.read("/etc/llmgw/llmgw-server.service.edited") == unit
    assert "TimeoutStopSec=60s" in root.read("/lib/systemd/system/llmgw-server.service")
    assert not root.exists("/etc/llmgw/llmgw-agent.service.edited")
    assert root.read("/etc/llmgw/llmgw.toml") == edited
    assert "After an edit: llmgw check" in root.read("/etc/llmgw/llmgw.toml.dpkg-dist")
    assert root.read("/etc/systemd/system/llmgw-agent.service.d/mine.conf") == drop_in

    assert agent.end() == 0
    assert server.end() == 0
    assert router.end() == 0
    server, router, agent = (start_unit(root, f"llmgw-{role}") for role in ("server", "router", "agent"))
    assert tokens == [root.read(f"/var/lib/llmgw/{name}") for name in ("admin-token", "agent-token")]
    wait_for(lambda: "ready" in root.run("llmgw", "ctl", "replica", "list", code=None), "the adopted replica")
    assert [line for line in root.processes() if "/opt/engine.py" in line] == [engine]
    wait_for(lambda: root.chat("127.0.0.1:8080", "m1", KEY)[0] == 200, "an answer of the engine")
    assert agent.end() == 0
    assert server.end() == 0
    assert router.end() == 0


def test_a_router_unit_serves_by_itself_and_its_socket_unit_keeps_the_port_open_between_two_of_it(root: Root, deb: Path) -> None:
    install(root, deb)
    prepare(root)
    let_in(root)
    settings = root.read("/etc/llmgw/llmgw.toml").replace(
        'control_planes = ["http://127.0.0.1:8081"]\ndata_dir = "/var/lib/llmgw-router"', ""
    )
    assert "llmgw-router" not in settings.partition("[router]")[2]
    root.write("/etc/llmgw/llmgw.toml", f'{settings}\n[[endpoint]]\nid = "e"\nurl = "http://127.0.0.1:9001"\nmodels = ["m1"]\n')
    engine = root.start("engine", "python3", "/opt/engine.py", "--port", "9001")
    engine.wait_log("serving")
    router = start_unit(root, "llmgw-router", "--socket", "llmgw-router.socket")
    assert "handed over" in router.log
    wait_for(lambda: root.chat("127.0.0.1:8080", "m1", KEY)[0] == 200, "an answer of the engine")
    router.send(signal.SIGHUP)
    router.wait_log("says RELOADING=1")

    # The router's process is killed: a client that comes before the next one is there waits for it.
    (pid,) = [line.split()[0] for line in root.processes() if "llmgw router" in line and "unit.py" not in line]
    root.run("sh", "-c", f"kill -9 {pid}")
    assert root.chat("127.0.0.1:8080", "m1", KEY)[0] == 200
    assert "restarts in 1 s (signal)" in router.log
    assert router.end() == 0


SYSTEMCTL = """#!/bin/sh
echo "$(basename $0) $*" >> /root/asked
[ ! -e /run/systemd/system/llmgw-agent.service.d/removed.conf ] || cat /run/systemd/system/llmgw-agent.service.d/removed.conf >> /root/asked
"""


def test_where_systemd_runs_an_upgrade_restarts_what_runs_and_a_removal_stops_it_all(root: Root, deb: Path, previous: Path) -> None:
    """Seen through stand-ins for `systemctl` and `deb-systemd-invoke`, which note what they are asked."""
    (root.path / "run/systemd/system").mkdir(parents=True)
    for name in ("systemctl", "deb-systemd-invoke"):
        root.write(f"/usr/local/bin/{name}", SYSTEMCTL)
        (root.path / "usr/local/bin" / name).chmod(0o755)

    def asked() -> list[str]:
        lines = root.read("/root/asked").splitlines()
        root.write("/root/asked", "")
        return lines

    path = {"PATH": "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
    for one in (previous, deb):
        (root.path / "root" / one.name).write_bytes(one.read_bytes())
    said = root.run("dpkg", "--install", f"/root/{previous.name}", **path)
    assert "systemd does not run here" not in said
    assert asked() == ["systemctl --system daemon-reload"], "nothing is started or enabled"
    root.run("dpkg", "--install", f"/root/{deb.name}", **path)
    roles = [f"deb-systemd-invoke try-restart llmgw-{role}.service" for role in ("server", "router", "agent")]
    assert asked() == ["systemctl --system daemon-reload", *roles]
    root.run("dpkg", "--remove", "llmgw", **path)
    killed = ["[Service]", "KillMode=control-group"]
    stop = "deb-systemd-invoke stop llmgw-router.socket llmgw-router.service llmgw-agent.service llmgw-server.service"
    reload = "systemctl --system daemon-reload"
    assert asked() == [reload, *killed, stop, *killed, reload]
    assert not root.exists("/run/systemd/system/llmgw-agent.service.d")
