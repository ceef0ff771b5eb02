"""Bare Debian 12 roots: made by debootstrap once a month, unpacked anew for each story, with processes and a network of their own."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.programs import wait_for

SUITE = "bookworm"
INCLUDED = ("python3",)  # all that the zipapp may ask for; what the deb needs besides is in every Debian
KEEP_S = 30 * 86_400.0  # a cached root older than this is made anew, so that it follows Debian's updates
HERE = Path(__file__).parent
# The first process of a root: it brings its loopback device up, and takes in the orphans.
INIT = """
import fcntl, os, signal, socket, struct, sys, time
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
    fcntl.ioctl(sock, 0x8914, struct.pack("16sh14x", b"lo", 0x1 | 0x40))  # SIOCSIFFLAGS, IFF_UP and IFF_RUNNING
print("up", flush=True)
while True:
    try:
        os.wait()
    except ChildProcessError:
        time.sleep(0.1)
"""


def base() -> Path:
    """The tar file of a bare root, from the cache where there is a fresh one."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llmgw-tests"
    key = hashlib.sha256(json.dumps([SUITE, INCLUDED]).encode()).hexdigest()[:12]
    target = cache / f"debian-{SUITE}-{key}.tar"
    if target.exists() and time.time() - target.stat().st_mtime < KEEP_S:
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "root"
        command = ["debootstrap", "--variant=minbase", f"--include={','.join(INCLUDED)}", SUITE, str(root)]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        assert made.returncode == 0, f"debootstrap failed: {made.stdout[-2000:]}{made.stderr[-2000:]}"
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(root / "var/cache/apt/archives")
        partial = target.with_suffix(f".{os.getpid()}")
        subprocess.run(["tar", "--numeric-owner", "-C", root, "-cf", partial, "."], check=True)
        partial.rename(target)
    return target


class Root:
    """One root. `run` runs a command in it, `start` leaves one running; `close` ends whatever runs there."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "root"
        self.path.mkdir()
        subprocess.run(["tar", "--numeric-owner", "-C", self.path, "-xf", base()], check=True)
        shutil.copy("/etc/hosts", self.path / "etc/hosts")
        self.path.joinpath("root/ask.py").write_text((HERE / "ask.py").read_text())
        enter = 'mount --bind /dev "$0/dev" && mount -t proc proc "$0/proc" && exec chroot "$0" /usr/bin/python3 -c "$1"'
        command = ["unshare", "--mount", "--pid", "--net", "--fork", "--kill-child", "sh", "-c", enter, str(self.path), INIT]
        self._started: list[subprocess.Popen[bytes]] = []
        self._holder = subprocess.Popen(command, stdout=subprocess.PIPE)
        with self._holder.stdout as said:  # type: ignore[union-attr]
            assert said.readline() == b"up\n"
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children").read_text()
        self._inside = children.split()[0]

    def command(self, words: Sequence[str], environment: dict[str, str]) -> list[str]:
        enter = ["nsenter", "--target", self._inside, "--mount", "--pid", "--net", "--root", "--wdns=/root"]
        clean = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"}
        return [*enter, "env", "-i", *(f"{name}={value}" for name, value in {**clean, **environment}.items()), *words]

    def run(self, *words: str, code: int | None = 0, limit_s: float = 120.0, **environment: str) -> str:
        """What the command printed, both streams. `code`: the exit code that it must have; None: any."""
        done = subprocess.run(
            self.command(words, environment), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=limit_s, check=False
        )
        assert code is None or done.returncode == code, f"{words}: exit {done.returncode}: {done.stdout[-4000:]}"
        return done.stdout

    def start(self, name: str, *words: str, **environment: str) -> Started:
        started = Started(self, name, words, environment)
        self._started.append(started.process)
        return started

    def ask(self, method: str, url: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """One HTTP call from inside: (status, decoded JSON)."""
        told = json.loads(self.run("python3", "/root/ask.py", method, url, json.dumps(body), json.dumps(headers)))
        return told["status"], told["body"]

    def chat(self, address: str, model: str, key: str = "") -> tuple[int, Any]:
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return self.ask("POST", f"http://{address}/v1/chat/completions", body, **headers)

    def processes(self) -> list[str]:
        """Command lines of everything that runs there, but for the first process and what asks."""
        code = (
            "import os, pathlib\n"
            "for one in sorted(pathlib.Path('/proc').glob('[0-9]*'), key=lambda path: int(path.name)):\n"
            "    words = (one / 'cmdline').read_bytes().replace(b'\\0', b' ').decode().strip()\n"
            "    if words and int(one.name) not in (1, os.getpid()): print(one.name, (one / 'status').stat().st_uid, words)\n"
        )
        return [line for line in self.run("python3", "-c", code).splitlines() if "env -i" not in line]

    def read(self, path: str) -> str:
        return (self.path / path.lstrip("/")).read_text()

    def write(self, path: str, text: str) -> None:
        target = self.path / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def exists(self, path: str) -> bool:
        return os.path.lexists(self.path / path.lstrip("/"))

    def files(self) -> set[str]:
        """Every path of the root, but for what belongs to the kernel or is dpkg's and apt's own book-keeping."""
        left_out = ("/proc", "/dev", "/sys", "/var/lib/dpkg", "/var/log", "/var/cache", "/var/lib/apt", "/tmp")
        found = subprocess.run(["find", self.path, "-xdev"], capture_output=True, text=True, check=True).stdout.splitlines()
        names = {line.removeprefix(str(self.path)) for line in found}
        return {name for name in names if not name.startswith(left_out)}

    def close(self) -> None:
        self._holder.kill()  # the first process of a root ends with it, and everything else there with that one
        for process in (self._holder, *self._started):
            process.wait(30)
        wait_for(lambda: not Path(f"/proc/{self._inside}").exists(), "the end of the root's processes")
        shutil.rmtree(self.path)


class Started:
    """A command that runs in a root."""

    def __init__(self, root: Root, name: str, words: Sequence[str], environment: dict[str, str]) -> None:
        self.root = root
        self._pid_file = f"/tmp/{name}.pid"
        self._log = root.path / "tmp" / f"{name}.log"
        note = f'echo $$ > {self._pid_file}; exec "$@"'
        with self._log.open("wb") as log:
            command = root.command(["sh", "-c", note, "sh", *words], environment)
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_log(self, text: str) -> None:
        def seen() -> bool:
            assert self.process.poll() is None, f"ended with {self.process.returncode}: {self.log}"
            return text in self.log

        try:
            wait_for(seen, repr(text))
        except AssertionError as err:
            raise AssertionError(f"{err}; so far: {self.log}") from err

    def send(self, number: signal.Signals) -> None:
        self.root.run("sh", "-c", f"kill -{int(number)} {self.root.read(self._pid_file).strip()}")  # a bare Debian has no /bin/kill

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Its exit code after this signal."""
        self.send(number)
        return self.process.wait(60)


@contextlib.contextmanager
def fresh_root() -> Iterator[Root]:
    with tempfile.TemporaryDirectory(prefix="llmgw-root-") as folder:
        root = Root(Path(folder))
        try:
            yield root
        finally:
            root.close()
