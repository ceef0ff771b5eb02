"""A stand-in for systemd: runs the command lines of one service unit in systemd's order, where no systemd runs.

`python unit.py NAME.service [--socket NAME.socket]` starts the unit and stays in front. SIGTERM stops it, SIGHUP reloads it. Units
and their drop-ins are found where systemd finds them, or named by path. What it does is what the manual pages systemd.service(5),
systemd.exec(5), systemd.kill(5) and sd_notify(3) say of the settings that it knows:

- ExecStartPre, ExecStart, ExecStartPost, ExecReload, ExecStop and ExecStopPost, the last also after a start that failed
- Type=simple, exec and notify (READY, RELOADING, STOPPING, WATCHDOG), TimeoutStartSec, TimeoutStopSec, WatchdogSec
- KillMode over everything the unit has started, also what has left its process group: orphans come back to us as a subreaper's
- Restart, RestartSec, StartLimitIntervalSec and StartLimitBurst; User, Group, UMask, Environment, EnvironmentFile, StateDirectory,
  RuntimeDirectory; the sockets of a socket unit

It does not sandbox: ProtectSystem and its like are read by `systemd-analyze`, not here. The standard library only, so that it also
runs inside a bare Debian.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import enum
import grp
import os
import pwd
import re
import select
import shlex
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

UNIT_FOLDERS = ("/etc/systemd/system", "/run/systemd/system", "/lib/systemd/system")  # the first that has it wins
PR_SET_CHILD_SUBREAPER = 36  # prctl(2)
CLEAN_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)
SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
DEFAULT_TIMEOUT_S = 90.0
DEFAULT_RESTART_S = 0.1
START_LIMIT_S, START_LIMIT_BURST = 10.0, 5
EXIT_GROUP, EXIT_USER, EXIT_EXEC = 216, 217, 203
FIRST_DESCRIPTOR = 3
UNITS_OF_TIME = {"": 1.0, "s": 1.0, "sec": 1.0, "ms": 0.001, "us": 0.000001, "m": 60.0, "min": 60.0, "h": 3600.0, "hr": 3600.0}


class Result(enum.Enum):
    """Why a run of the service is over, as ExecStopPost reads it in SERVICE_RESULT."""

    SUCCESS = "success"
    EXIT_CODE = "exit-code"
    SIGNAL = "signal"
    TIMEOUT = "timeout"
    WATCHDOG = "watchdog"
    PROTOCOL = "protocol"
    START_LIMIT = "start-limit-hit"


RESTARTS = {
    "no": set(),
    "always": {Result.SUCCESS, Result.EXIT_CODE, Result.SIGNAL, Result.TIMEOUT, Result.WATCHDOG, Result.PROTOCOL},
    "on-success": {Result.SUCCESS},
    "on-failure": {Result.EXIT_CODE, Result.SIGNAL, Result.TIMEOUT, Result.WATCHDOG, Result.PROTOCOL},
    "on-abnormal": {Result.SIGNAL, Result.TIMEOUT, Result.WATCHDOG},
    "on-abort": {Result.SIGNAL},
    "on-watchdog": {Result.WATCHDOG},
}


class Stopped(Exception):
    """The unit was told to stop while it waited for something else."""


class Failed(Exception):
    """This run of the service is over before it was asked to be."""

    def __init__(self, result: Result) -> None:
        super().__init__(result.value)
        self.result = result


# --- unit files


class Settings:
    """What a unit file and its drop-ins say. A later value is added to a list or replaces a single one; an empty one clears."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._values: dict[str, list[str]] = {}
        for file in files:
            text = re.sub(r"\\\n\s*", " ", file.read_text(encoding="utf-8"))
            for line in text.splitlines():
                line = line.strip()
                if not line or line[0] in "#;[":
                    continue
                key, equals, value = line.partition("=")
                assert equals, f"{file}: not a setting: {line}"
                values = self._values.setdefault(key.strip(), [])
                if value.strip():
                    values.append(value.strip())
                else:
                    values.clear()

    def every(self, key: str) -> list[str]:
        return self._values.get(key, [])

    def one(self, key: str, default: str = "") -> str:
        return (self.every(key) or [default])[-1]

    def words(self, key: str) -> list[str]:
        return [word for value in self.every(key) for word in shlex.split(value)]

    def span_s(self, key: str, default_s: float) -> float:
        """Seconds; infinity where it says so."""
        text = self.one(key)
        if not text:
            return default_s
        if text == "infinity":
            return float("inf")
        parts = re.findall(r"([0-9.]+)\s*([a-z]*)", text)
        return sum(float(number) * UNITS_OF_TIME[unit] for number, unit in parts)


def find(name: str, folders: Sequence[str] = UNIT_FOLDERS) -> list[Path]:
    """The unit's file, then its drop-ins by name; of two drop-ins of one name the first folder's counts."""
    if "/" in name:
        return [Path(name), *sorted(Path(f"{name}.d").glob("*.conf"))]
    file = next((path for folder in folders if (path := Path(folder) / name).is_file()), None)
    if file is None:
        raise SystemExit(f"unit {name} is not found in {', '.join(folders)}")
    drop_ins: dict[str, Path] = {}
    for folder in folders:
        for path in (Path(folder) / f"{name}.d").glob("*.conf"):
            drop_ins.setdefault(path.name, path)
    return [file, *(drop_ins[name] for name in sorted(drop_ins))]


def listeners(settings: Settings) -> list[socket.socket]:
    """The open sockets of a socket unit."""
    opened = []
    for address in settings.every("ListenStream"):
        if address.startswith("/"):
            Path(address).unlink(missing_ok=True)
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.bind(address)
            sock.listen(int(settings.one("Backlog", "4096")))
        else:
            host, _, port = address.rpartition(":")
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            sock = socket.create_server((host.strip("[]"), int(port)), family=family, backlog=int(settings.one("Backlog", "4096")))
        opened.append(sock)
    return opened


# --- the service


class Service:
    """One service unit. `run` is its whole life; everything happens in the one thread that calls it."""

    def __init__(self, name: str, settings: Settings, sockets: Sequence[socket.socket] = ()) -> None:
        self.name = name
        self.settings = settings
        self.sockets = list(sockets)
        self.type = settings.one("Type", "simple")
        assert self.type in ("simple", "exec", "notify"), f"Type={self.type} is not known here"
        self.kill_mode = settings.one("KillMode", "control-group")
        assert self.kill_mode in ("control-group", "mixed", "process", "none"), f"KillMode={self.kill_mode} is not known here"
        self.stop_s = settings.span_s("TimeoutStopSec", DEFAULT_TIMEOUT_S)
        self.main = 0  # its pid
        self.ready = False
        self.stopping = False  # asked to, by a signal to us
        self._reload = False
        self._ended: dict[int, int] = {}  # pid to wait status
        self._beat_s = 0.0
        self._folder = Path(tempfile.mkdtemp(prefix="unit-"))
        self._folder.chmod(0o755)
        self._notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._notify.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._notify.bind(str(self._folder / "notify"))
        (self._folder / "notify").chmod(0o777)
        self._woken, waker = socket.socketpair()
        for end in (self._woken, waker):
            end.setblocking(False)
        self._waker = waker
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: self._ask("stopping"))
        signal.signal(signal.SIGINT, lambda *_: self._ask("stopping"))
        signal.signal(signal.SIGHUP, lambda *_: self._ask("_reload"))
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def _ask(self, what: str) -> None:
        setattr(self, what, True)

    def say(self, text: str) -> None:
        print(f"unit: {self.name}: {text}", file=sys.stderr, flush=True)

    def run(self) -> Result:
        """From start until it is stopped, or ends and is not restarted. Returns why the last run was over."""
        starts: list[float] = []
        try:
            while True:
                interval_s = self.settings.span_s("StartLimitIntervalSec", START_LIMIT_S)
                starts = [at for at in starts if time.monotonic() - at < interval_s]
                if len(starts) >= int(self.settings.one("StartLimitBurst", str(START_LIMIT_BURST))):
                    self.say("failed (start-limit-hit)")
                    return Result.START_LIMIT
                starts.append(time.monotonic())
                result, status = self._live()
                self._after(result, status)
                if self.stopping:
                    self.say("inactive")
                    return result
                if result not in RESTARTS[self.settings.one("Restart", "no")]:
                    self.say("inactive" if result is Result.SUCCESS else f"failed ({result.value})")
                    return result
                wait_s = self.settings.span_s("RestartSec", DEFAULT_RESTART_S)
                self.say(f"restarts in {wait_s:g} s ({result.value})")
                with contextlib.suppress(Stopped):
                    self._wait(lambda: False, wait_s, stoppable=True)
                if self.stopping:
                    self.say("inactive")
                    return result
        finally:
            shutil.rmtree(self._folder)

    def _live(self) -> tuple[Result, int | None]:
        """One run: from ExecStartPre until nothing that is to be killed is left."""
        self.main, self.ready = 0, False
        self._make_folders()
        asked: Result | None = None
        try:
            self.say("starting")
            limit_s = self.settings.span_s("TimeoutStartSec", DEFAULT_TIMEOUT_S)
            self._commands("ExecStartPre", limit_s)
            (command,) = self.settings.every("ExecStart")
            self._beat_s = time.monotonic()
            self.main = self._spawn(command, self._main_environment(), self.sockets)
            self._wait_ready(limit_s)
            self._commands("ExecStartPost", limit_s)
            self.say(f"active (pid {self.main})")
            self._stay()
        except Stopped:
            asked = Result.SUCCESS
        except Failed as err:
            asked = err.result
        return self._end(asked)

    def _wait_ready(self, limit_s: float) -> None:
        if self.type != "notify":
            return
        if not self._wait(lambda: self.ready or self.main in self._ended, limit_s, stoppable=True):
            raise Failed(Result.TIMEOUT)
        if not self.ready:
            raise Failed(Result.PROTOCOL if self._ended[self.main] == 0 else result_of(self._ended[self.main]))

    def _stay(self) -> None:
        """Until the main process has ended, the unit is stopped, or the watchdog hears nothing."""
        limit_s = self.settings.span_s("WatchdogSec", 0.0) or float("inf")
        while self.main not in self._ended:
            left_s = self._beat_s + limit_s - time.monotonic()
            if left_s <= 0:
                self.say("the watchdog hears nothing")
                self._kill(signal.SIGABRT)
                raise Failed(Result.WATCHDOG)
            self._wait(lambda: self.main in self._ended or self._reload, left_s, stoppable=True)
            if self._reload:
                self._reload = False
                self.say("reloading")
                self._commands("ExecReload", DEFAULT_TIMEOUT_S)

    def _end(self, asked: Result | None) -> tuple[Result, int | None]:
        if self.main and asked is Result.SUCCESS:
            self.say("stopping")
            if self.main not in self._ended:
                with contextlib.suppress(Failed):
                    self._commands("ExecStop", self.stop_s)
        if asked is not Result.WATCHDOG:
            self._kill(signal.Signals[self.settings.one("KillSignal", "SIGTERM")])
        in_time = self._wait(self._is_over, self.stop_s)
        if not in_time:
            self.say("is killed: it did not end in time")
        if not in_time or self.kill_mode == "mixed":
            self._kill(signal.SIGKILL)
            self._wait(lambda: (not self.main or self.main in self._ended) and not self._targets(signal.SIGKILL), DEFAULT_TIMEOUT_S)
        status = self._ended.get(self.main)
        if not in_time:
            return Result.TIMEOUT, status
        if asked not in (None, Result.SUCCESS):
            assert asked is not None
            return asked, status
        return (Result.SUCCESS if status is None else result_of(status)), status

    def _is_over(self) -> bool:
        waits_for_all = self.kill_mode == "control-group"
        return (not self.main or self.main in self._ended) and not (waits_for_all and self._targets(signal.SIGTERM))

    def _targets(self, number: int) -> list[int]:
        """Whom a signal is for, by KillMode: the group, or the main process alone."""
        main = [self.main] if self.main and self.main not in self._ended else []
        if self.kill_mode == "none":
            return []
        if self.kill_mode == "process" or (self.kill_mode == "mixed" and number != signal.SIGKILL):
            return main
        return members()

    def _kill(self, number: signal.Signals) -> None:
        for pid in self._targets(number):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _after(self, result: Result, status: int | None) -> None:
        environment = {"SERVICE_RESULT": result.value}
        if status is not None:
            killed = os.WIFSIGNALED(status)
            environment["EXIT_CODE"] = "killed" if killed else "exited"
            environment["EXIT_STATUS"] = signal.Signals(os.WTERMSIG(status)).name[3:] if killed else str(os.WEXITSTATUS(status))
        self.main = 0
        with contextlib.suppress(Failed):
            self._commands("ExecStopPost", self.stop_s, environment)
        if self.settings.one("RuntimeDirectoryPreserve", "no") == "no":
            for name in self.settings.words("RuntimeDirectory"):
                shutil.rmtree(Path("/run") / name, ignore_errors=True)

    # --- commands

    def _commands(self, key: str, limit_s: float, more: Mapping[str, str] | None = None) -> None:
        """Runs each to its end. Raises Failed for the first that fails, unless a dash forgives it."""
        for command in self.settings.every(key):
            forgiven = command.startswith("-")
            pid = self._spawn(command.removeprefix("-"), {**self._environment(), **(more or {})})
            if not self._wait(lambda pid=pid: pid in self._ended, limit_s):
                os.kill(pid, signal.SIGKILL)
                self._wait(lambda pid=pid: pid in self._ended, DEFAULT_TIMEOUT_S)
                raise Failed(Result.TIMEOUT)
            status = self._ended.pop(pid)
            if status != 0 and not forgiven:
                self.say(f"{key} failed: {command}")
                raise Failed(result_of(status))

    def _main_environment(self) -> dict[str, str]:
        environment = self._environment()
        if self.type == "notify":
            environment["NOTIFY_SOCKET"] = str(self._folder / "notify")
        if watchdog_s := self.settings.span_s("WatchdogSec", 0.0):
            environment["WATCHDOG_USEC"] = str(int(watchdog_s * 1_000_000))
        return environment

    def _environment(self) -> dict[str, str]:
        environment = {"PATH": SEARCH_PATH, "LANG": "C.UTF-8"}
        if user := self.settings.one("User"):
            with contextlib.suppress(KeyError):
                entry = pwd.getpwnam(user)
                environment.update(USER=user, LOGNAME=user, HOME=entry.pw_dir, SHELL=entry.pw_shell)
        for word in self.settings.words("Environment"):
            name, _, value = word.partition("=")
            environment[name] = value
        for file in self.settings.every("EnvironmentFile"):
            if file.startswith("-") and not Path(file[1:]).exists():
                continue
            for line in Path(file.removeprefix("-")).read_text(encoding="utf-8").splitlines():
                if line.strip() and line[0] not in "#;":
                    name, _, value = line.partition("=")
                    environment[name.strip()] = value.strip().strip("\"'")
        if self.main:
            environment["MAINPID"] = str(self.main)
        return environment

    def _spawn(self, command: str, environment: Mapping[str, str], sockets: Sequence[socket.socket] = ()) -> int:
        words = [expanded(word, environment) for word in shlex.split(command)]
        assert words[0][0] not in "@+!:", f"the prefix of {command} is not known here"
        mask = int(self.settings.one("UMask", "0022"), 8)
        pid = os.fork()
        if pid:
            return pid
        try:
            os.setsid()
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            self._become_user()
            os.umask(mask)
            os.chdir(self.settings.one("WorkingDirectory", "/"))
            environment = dict(environment)
            environment["WATCHDOG_PID"] = str(os.getpid())
            copies = [os.dup(sock.fileno()) for sock in sockets]  # out of the way of the numbers that are to be filled
            while copies and min(copies) < FIRST_DESCRIPTOR + len(copies):
                copies = [os.dup(copy) for copy in copies]
            for number, copy in enumerate(copies, FIRST_DESCRIPTOR):
                os.dup2(copy, number, inheritable=True)
            if sockets:
                environment.update(LISTEN_FDS=str(len(sockets)), LISTEN_PID=str(os.getpid()))
            os.closerange(FIRST_DESCRIPTOR + len(sockets), 1024)
            os.execvpe(words[0], words, environment)
        except OSError as err:
            os.write(2, f"unit: {words[0]}: {err}\n".encode())
        finally:
            os._exit(EXIT_EXEC)

    def _become_user(self) -> None:
        user, group = self.settings.one("User"), self.settings.one("Group")
        if not user or os.getuid() != 0:
            return
        try:
            entry = pwd.getpwnam(user)
            gid = grp.getgrnam(group).gr_gid if group else entry.pw_gid
            more = [grp.getgrnam(name).gr_gid for name in self.settings.words("SupplementaryGroups")]
        except KeyError as err:
            os.write(2, f"unit: {err}\n".encode())
            os._exit(EXIT_USER if user in str(err) else EXIT_GROUP)
        os.setgroups(sorted({*os.getgrouplist(user, gid), *more}))
        os.setgid(gid)
        os.setuid(entry.pw_uid)

    def _make_folders(self) -> None:
        user, group = self.settings.one("User"), self.settings.one("Group")
        for key, parent in (("StateDirectory", "/var/lib"), ("RuntimeDirectory", "/run")):
            for name in self.settings.words(key):
                path = Path(parent) / name
                path.mkdir(parents=True, exist_ok=True)
                path.chmod(int(self.settings.one(f"{key}Mode", "0755"), 8))
                if user and os.getuid() == 0 and path.owner() != user:
                    for one in (path, *path.rglob("*")):
                        shutil.chown(one, user, group or None)

    # --- waiting

    def _wait(self, condition: Callable[[], bool], limit_s: float, *, stoppable: bool = False) -> bool:
        """True once the condition holds, False when it does not within the limit. Raises Stopped when that is asked for meanwhile."""
        ends_s = time.monotonic() + limit_s
        while True:
            self._reap()
            self._hear()
            if stoppable and self.stopping:
                raise Stopped
            if condition():
                return True
            left_s = ends_s - time.monotonic()
            if left_s <= 0:
                return False
            # The group is read from /proc, which wakes nobody; everything else does.
            select.select([self._woken, self._notify], [], [], min(left_s, 0.2))
            with contextlib.suppress(BlockingIOError):
                self._woken.recv(4096)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                self._ended[found[0]] = found[1]

    def _hear(self) -> None:
        """What the main process says of itself; of other processes nothing counts (NotifyAccess=main)."""
        with contextlib.suppress(BlockingIOError):
            while True:
                data, control, _, _ = self._notify.recvmsg(4096, socket.CMSG_SPACE(12))
                sender = next((struct.unpack("3i", value)[0] for _, kind, value in control if kind == socket.SCM_CREDENTIALS), 0)
                if sender != self.main:
                    self.say(f"{data!r} of pid {sender} is not heard: it is not the main process")
                    continue
                for line in data.decode("utf-8", "replace").splitlines():
                    if line == "READY=1":
                        self.ready = True
                        self._beat_s = time.monotonic()
                    if line == "WATCHDOG=1":
                        self._beat_s = time.monotonic()
                    else:
                        self.say(f"says {line}")


def result_of(status: int) -> Result:
    if os.WIFSIGNALED(status):
        return Result.SUCCESS if os.WTERMSIG(status) in CLEAN_SIGNALS else Result.SIGNAL
    return Result.SUCCESS if os.WEXITSTATUS(status) == 0 else Result.EXIT_CODE


def expanded(word: str, environment: Mapping[str, str]) -> str:
    """`$NAME` as a whole word and `${NAME}` anywhere; an unknown one is empty."""
    if re.fullmatch(r"\$[A-Za-z_]\w*", word):
        return environment.get(word[1:], "")
    return re.sub(r"\$\{(\w+)\}", lambda match: environment.get(match[1], ""), word)


def members() -> list[int]:
    """Every process that descends from this one. Orphans count: they have become our children, and so do those not yet waited for."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[int(folder.name)] = int(fields[1])
    return sorted(descendants(os.getpid(), parents))


def descendants(root: int, parents: Mapping[int, int]) -> Iterator[int]:
    for pid, parent in parents.items():
        if parent == root:
            yield pid
            yield from descendants(pid, parents)


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs a service unit in systemd's order.")
    parser.add_argument("unit", help="NAME.service, or a path to one")
    parser.add_argument("--socket", help="a socket unit whose sockets are handed over")
    given = parser.parse_args()
    sockets = listeners(Settings(find(given.socket))) if given.socket else []
    service = Service(Path(given.unit).name, Settings(find(given.unit)), sockets)
    return 0 if service.run() is Result.SUCCESS else 1


if __name__ == "__main__":
    sys.exit(main())
