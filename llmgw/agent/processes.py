"""Processes of engines: start one, find every process that belongs to it, see its end, end the whole tree.

Ground truth is /proc. A process belongs to a start when it descends from its main process, shares its session or group, or
holds its start token in the environment, so that children in sessions of their own are found after their parent is gone.
Decides nothing about replicas.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Final

import attrs
import trio

from llmgw.agent.engines.environment import START_VARIABLE
from llmgw.domain.errors import Invalid, Unavailable
from llmgw.domain.ids import NodeId, ReplicaId
from llmgw.domain.ports import Machine

PROC: Final = Path("/proc")
LOG_MODE: Final = 0o600  # engines print prompts
SCAN_AGAIN_S: Final = 0.1  # between looks at a tree that is ending; most are gone at the first
SCAN_AGAIN_S_MAX: Final = 0.5  # a look at thousands of processes costs tens of milliseconds
SCAN_SLOWS_BY: Final = 1.3
KILL_LOOKS_MAX: Final = 100  # of `kill_all`, which does not sleep; a few milliseconds each, and most trees are gone at the third
KILL_CONFIRM_S: Final = 10.0  # a killed process that is still there after this is stuck in the kernel; its name is told
_MIB: Final = 1024 * 1024
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_DEAD_STATES: Final = frozenset("ZXx")  # a zombie holds nothing but its number


@attrs.frozen
class Identity:
    """One process of this boot: a number is used again, a number with its start time is not. `start_ticks` since boot."""

    pid: int
    start_ticks: int


@attrs.frozen
class Process:
    """One live process as /proc shows it. `token` is its start token, empty where it has none or we may not look."""

    identity: Identity
    parent: int
    group: int
    session: int
    token: str
    resident_mib: float

    @property
    def pid(self) -> int:
        return self.identity.pid


def node_tag(node: NodeId) -> str:
    """Marks start tokens as this node's, so that two agents of one machine never take each other's engines for orphans."""
    return hashlib.sha256(node.encode()).hexdigest()[:8]


def start_token(replica: ReplicaId, attempt: int, tag: str, fresh_hex: str) -> str:
    """`<replica>.<attempt>.<random>`; the random part begins with the node's tag."""
    return f"{replica}.{attempt}.{tag}{fresh_hex}"


def is_ours(token: str, tag: str) -> bool:
    """Is this a start token of the node with that tag?"""
    return len(token.split(".")) >= 3 and token.rpartition(".")[2].startswith(tag)


def identify(pid: int) -> Identity | None:
    """The live process of that number; None where there is none, or only a zombie."""
    read = _read_stat(pid)
    return Identity(pid, read.start_ticks) if read and read.state not in _DEAD_STATES else None


def token_of(pid: int) -> str:
    """The start token in a process's environment; empty where it has none, is gone, or is somebody else's."""
    try:
        data = (PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return ""
    prefix = START_VARIABLE.encode() + b"="
    found = next((entry for entry in data.split(b"\0") if entry.startswith(prefix)), b"")
    return found[len(prefix) :].decode("utf-8", "replace")


@attrs.frozen
class _Stat:
    state: str
    parent: int
    group: int
    session: int
    start_ticks: int
    resident_pages: int


def _read_stat(pid: int) -> _Stat | None:
    try:
        text = (PROC / str(pid) / "stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may hold anything, also blanks and brackets
    if len(fields) < 22:
        return None
    return _Stat(fields[0], int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19]), int(fields[21]))


def survey() -> tuple[Process, ...]:
    """Every live process of this machine. Blocking: a few milliseconds for hundreds of processes."""
    found = []
    for name in os.listdir(PROC):
        if not name.isdigit():
            continue
        pid = int(name)
        stat = _read_stat(pid)
        if stat is None or stat.state in _DEAD_STATES:
            continue
        resident_mib = stat.resident_pages * _PAGE_BYTES / _MIB
        found.append(Process(Identity(pid, stat.start_ticks), stat.parent, stat.group, stat.session, token_of(pid), resident_mib))
    return tuple(found)


def tree(
    processes: Iterable[Process], main: Identity | None, token: str, *, watched: bool = False, also: Collection[Identity] = ()
) -> tuple[Process, ...]:
    """Those that belong to one start: by token, session, group and descent. `also` are known to from an earlier look.

    With `main` gone, its session and group are believed only when we `watched` it until its end. After a time in which
    nobody looked, their number may be anybody's, such as that of a daemon whose own leader is gone; the token tells then.
    """
    everything = tuple(processes)
    by_parent: dict[int, list[Process]] = {}
    for process in everything:
        by_parent.setdefault(process.parent, []).append(process)
    heads = [process.identity for process in everything if main is not None and process.pid == main.pid]
    believed = main is not None and (heads == [main] or (not heads and watched))
    members: dict[int, Process] = {}
    for process in everything:
        ours = (bool(token) and process.token == token) or process.identity in also
        if believed and main is not None:
            ours = ours or process.identity == main or main.pid in (process.session, process.group)
        if ours:
            members[process.pid] = process
    waiting = list(members.values())
    while waiting:
        for child in by_parent.get(waiting.pop().pid, ()):
            if child.pid not in members:
                members[child.pid] = child
                waiting.append(child)
    members.pop(os.getpid(), None)  # whatever happens, never ourselves
    return tuple(sorted(members.values(), key=lambda process: process.pid))


def send_signal(identity: Identity, number: signal.Signals) -> bool:
    """Signals exactly that process, through a pidfd that is checked after it is open; False where it is gone."""
    try:
        descriptor = os.pidfd_open(identity.pid)
    except OSError:
        return False
    try:
        if identify(identity.pid) != identity:
            return False
        signal.pidfd_send_signal(descriptor, number)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def find_program(word: str, path: str | None) -> str:
    """The file that `word` names, as a shell would find it. Raises `Invalid` where there is none to run."""
    found = shutil.which(word, path=path)
    if found is None:
        kind = "cannot be run" if os.path.exists(word) else "not found"
        raise Invalid(f"program {kind}: {word}", code="program_missing", param="command")
    return found


def check_words(argv: tuple[str, ...], environment: Mapping[str, str]) -> None:
    """Raises `Invalid` for words that no program can be given."""
    for what, text in [("argument", word) for word in argv] + [("environment", name + value) for name, value in environment.items()]:
        if "\0" in text:
            raise Invalid(f"an {what} holds a zero byte: {text[:60]!r}", code="bad_command", param="command")
        try:
            os.fsencode(text)
        except UnicodeEncodeError as err:
            raise Invalid(f"an {what} is no text that can be passed on: {text[:60]!r}", code="bad_command", param="command") from err
    for name in environment:
        if not name or "=" in name:
            raise Invalid(f"no name of an environment variable: {name[:60]!r}", code="bad_command", param="env")


def spawn(argv: tuple[str, ...], environment: Mapping[str, str], log_path: Path) -> Identity:
    """Starts a program in a session and group of its own, both outputs appended to `log_path`. Blocking.

    Never a pipe: the file takes output while nobody reads, also while the agent is dead. The child is nobody's but the
    caller's: `reap` it when it has ended. Raises `Unavailable` when the log or the program cannot be opened.
    """
    program = find_program(argv[0], environment.get("PATH"))
    try:
        log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, LOG_MODE)
    except OSError as err:
        raise Unavailable(f"the log {log_path} cannot be written: {err.strerror}", code="log_unwritable") from err
    try:
        pid = os.posix_spawn(
            program,
            argv,
            dict(environment),
            file_actions=(
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, log, 1),
                (os.POSIX_SPAWN_DUP2, log, 2),
            ),
            setsid=True,
            setsigmask=(),
            # Python ignores these two; an engine that inherited that would miss a hang-up, or be deaf to Ctrl-C by hand.
            setsigdef=(signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM, signal.SIGHUP),
        )
    except OSError as err:
        raise Unavailable(f"{program} cannot be started: {err.strerror}", code="spawn_failed") from err
    finally:
        os.close(log)
    stat = _read_stat(pid)
    if stat is None:  # our own child cannot vanish before we reap it
        raise Unavailable(f"{program} was started as process {pid} and cannot be seen in /proc", code="spawn_failed")
    return Identity(pid, stat.start_ticks)


def reap(pid: int) -> int | None:
    """The exit code of a child that has ended (below 0: minus the signal); None where it is not our child, or still runs."""
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return os.waitstatus_to_exitcode(status) if ended else None


async def wait_ended(machine: Machine, identity: Identity) -> int | None:
    """Waits for the end of one process, child or not; its exit code where it was our child, else None. No deadline."""
    try:
        descriptor = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        return reap(identity.pid)
    try:
        if identify(identity.pid) == identity:
            # Readable once every thread of it has ended; a zombie counts as ended.
            await trio.lowlevel.wait_readable(descriptor)
    finally:
        os.close(descriptor)
    return reap(identity.pid)


async def end_tree(
    machine: Machine,
    main: Identity | None,
    token: str,
    *,
    watched: bool,
    grace_s: float,
    also: Collection[Identity] = (),
    stop_signal: signal.Signals = signal.SIGTERM,
    on_stuck: Callable[[str], None],
) -> frozenset[int]:
    """Ends every process of one start: the signal to all of them, `grace_s`, then KILL until none is left. Returns their pids.

    `watched`, `also`: as for `tree`. Returns only when all are gone. One that KILL does not end is stuck in the kernel; it is named to
    `on_stuck` once, and waited for.
    """
    ever: set[int] = set()
    known: dict[int, Process] = {}  # also those that lost their parent between two looks

    async def left() -> tuple[Process, ...]:
        everything = await machine.run_sync(survey)
        for process in tree(everything, main, token, watched=watched, also=also):
            known[process.pid] = process
            ever.add(process.pid)
        identities = {process.identity for process in everything}
        for process in list(known.values()):
            if process.identity not in identities:
                del known[process.pid]
        if main is not None:
            reap(main.pid)  # or it stays a zombie until the agent ends
        return tuple(known.values())

    members = await left()
    signalled: set[Identity] = set()
    again_s = SCAN_AGAIN_S
    kill_at_s = machine.now_s() + grace_s
    while members and machine.now_s() < kill_at_s and grace_s > 0:
        for process in members:
            if process.identity not in signalled:
                signalled.add(process.identity)
                send_signal(process.identity, stop_signal)
        await machine.sleep_until(min(machine.now_s() + again_s, kill_at_s))
        again_s = min(again_s * SCAN_SLOWS_BY, SCAN_AGAIN_S_MAX)
        members = await left()
    told, again_s = False, SCAN_AGAIN_S
    tell_at_s = machine.now_s() + KILL_CONFIRM_S
    while members:
        for process in members:
            send_signal(process.identity, signal.SIGKILL)
        await machine.sleep_until(machine.now_s() + again_s)
        again_s = min(again_s * SCAN_SLOWS_BY, SCAN_AGAIN_S_MAX)
        members = await left()
        if members and not told and machine.now_s() >= tell_at_s:
            told = True
            on_stuck(", ".join(str(process.pid) for process in members))
    return frozenset(ever)


def kill_all(tag: str) -> None:
    """KILL to every process with a start token of the node of that tag, and to its whole tree; no grace and no sleep. Blocking.

    For a process that must end at once. Returns when none is left, or when those left are stuck in the kernel, the signal pending.
    """
    known: set[Identity] = set()  # also those that lose their parent, and with it what showed that they are ours
    for _ in range(KILL_LOOKS_MAX):
        everything = survey()
        known |= {process.identity for process in everything if is_ours(process.token, tag)}
        known = {process.identity for process in tree(everything, None, "", also=known)}
        if not known:
            return
        for identity in known:
            send_signal(identity, signal.SIGKILL)
