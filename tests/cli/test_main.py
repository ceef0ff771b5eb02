"""The program as a person runs it: exit codes, one readable line on failure, nothing loaded that is not needed."""

from __future__ import annotations

import importlib.machinery
import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest

import llmgw as package_of_ours
from llmgw import __version__
from llmgw.cli import main as program
from llmgw.cli.reference import reference_text
from llmgw.domain.errors import Conflict, Fault, Invalid
from tests.cli.conftest import Run
from tests.cli.fake_api import TOKEN, FakeApi

LIMIT_S = 60  # generous: a process that hangs fails the test instead of the suite
SERVER_SIDE = ("trio", "quart", "hypercorn", "apsw", "structlog", "httptools", "cattrs", "rich", "prometheus_client", "psutil")


def llmgw(*args: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "llmgw", *args], capture_output=True, text=True, timeout=LIMIT_S, env={**os.environ, **environ}, check=False
    )


def loaded_modules(*args: str, **environ: str) -> set[str]:
    code = (
        "import sys\nfrom llmgw.cli.main import main\ncode = main(sys.argv[1:])\n"
        "print('\\n'.join(sorted(sys.modules)), file=sys.stderr)\nsys.exit(code)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=LIMIT_S, env={**os.environ, **environ}, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return set(ran.stderr.split())


def test_version_check_and_ctl_load_no_server_code(api: FakeApi, tmp_path: Path):
    api.on("GET /api/v1/status", {"models": {}, "problems": []})
    api.on("POST /api/v1/models:apply", {"changes": [], "revision": 1})
    models = tmp_path / "m.toml"
    models.write_text('[[model]]\nname = "m"\n[[model.profile]]\nengine = "ollama"\n')
    own = {"llmgw.control", "llmgw.admin", "llmgw.agent", "llmgw.router", "llmgw.store", "llmgw.wiring", "llmgw.lease", "llmgw.protocol"}
    for args in (
        ("version",),
        ("--help",),
        ("ctl", "--help"),
        ("check", str(models)),
        ("ctl", "--server", api.url, "status"),
        ("ctl", "--server", api.url, "model", "apply", "-f", str(models)),
    ):
        found = loaded_modules(*args, LLMGW_TOKEN=TOKEN)
        assert not found & {*SERVER_SIDE, *own}, args


def test_version_loads_next_to_nothing():
    found = loaded_modules("version")
    assert "attr" not in found
    assert not any(name.startswith(("llmgw.domain", "llmgw.settings")) for name in found)


def test_version_is_the_builds(run: Run):
    assert run("version").out == f"llmgw {__version__}\ndata plane: interpreted\n"
    assert json.loads(run("version", "--output", "json").out) == {"version": __version__, "data_plane": "interpreted"}
    assert run("--version").out == f"llmgw {__version__}\n"
    assert "python 3." in run("version", "--verbose").out
    assert json.loads(run("version", "--verbose", "-o", "json").out)["python"].startswith("3.")


def test_a_compiled_library_of_this_python_is_told_and_another_pythons_is_not(run: Run, tmp_path: Path):
    package = tmp_path / "llmgw"
    shutil.copytree(Path(package_of_ours.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    environ = {"PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1"}
    library = package / "router" / "data_plane__mypyc.cpython-39-x86_64-linux-gnu.so"
    library.touch()
    assert "data plane: interpreted" in llmgw("version", **environ).stdout
    library.rename(library.with_name(f"data_plane__mypyc{importlib.machinery.EXTENSION_SUFFIXES[0]}"))
    assert "data plane: compiled" in llmgw("version", **environ).stdout


def test_help_names_every_command(run: Run):
    ran = run("--help")
    assert ran.code == 0
    for name in program.COMMANDS:
        assert f"  {name} " in ran.out


def test_the_readme_has_a_row_for_every_command():
    text = (Path(__file__).parent.parent.parent / "README.md").read_text(encoding="utf-8")
    assert [name for name in program.COMMANDS if f"| `llmgw {name}" not in text] == []


def test_the_page_of_commands_in_the_repository_is_the_one_the_program_writes():
    page = Path(__file__).parent.parent.parent / "docs" / "reference" / "commands.md"
    assert page.read_text(encoding="utf-8") == reference_text()


@pytest.mark.parametrize(
    "args",
    [
        ("chek",),
        ("check", "--nonsense"),
        ("ctl", "modl"),
        ("ctl", "model", "scale", "m"),
        ("ctl", "model", "scale", "m", "-1"),
        ("ctl", "-o", "xml", "status"),
        ("router", "extra"),
        ("dev", "--port", "99999"),
        ("dev", "--port", "5", "--admin-port", "5"),
        *(("dev", name, "") for name in ("--data-dir", "--config")),
        *((role, "--config", "") for role in ("server", "router", "agent", "sim")),
        ("sim", "--token-file", ""),
        ("check", ""),
        ("ctl", "model", "apply", "-f", ""),
    ],
)
def test_wrong_usage_is_exit_2_with_a_hint(run: Run, args: tuple[str, ...]):
    ran = run(*args)
    assert ran.code == 2
    assert "Error: " in ran.err
    assert "Traceback" not in ran.err


def test_simulated_nodes_are_told_of_an_address_that_is_none(run: Run):
    ran = run("sim", "--server", "ctl-1:8081")
    assert (ran.code, ran.err) == (3, "llmgw: --server: expected an http:// or https:// address, not 'ctl-1:8081'\n")


def test_an_empty_path_is_told_as_what_it_is(run: Run):
    told = run("dev", "--data-dir", "").err
    assert "Invalid value for '--data-dir': the path is empty; leave the option out for its default" in told


def test_a_mistyped_command_names_the_nearest(run: Run):
    assert "Did you mean check?" in run("chek").err
    assert "Did you mean model?" in run("ctl", "modl", "list").err


def test_a_token_file_that_cannot_be_read_is_told_in_words(run: Run, tmp_path: Path):
    ran = run("join", "--token-file", str(tmp_path / "none"))
    assert (ran.code, ran.err) == (4, f"llmgw: there is no file {tmp_path / 'none'}\n")
    ran = run("join", "--token-file", str(tmp_path))
    assert (ran.code, ran.err) == (3, f"llmgw: {tmp_path} cannot be read: Is a directory\n")


# --- check ---


def test_check_tells_every_fault_with_its_path_and_exits_3(run: Run, tmp_path: Path):
    file = tmp_path / "llmgw.toml"
    file.write_text('[route]\nretries = "2"\nretrys = 1\n[rooter]\n')
    ran = run("check", str(file))
    assert (ran.code, ran.out) == (3, "")
    assert ran.err.splitlines() == [
        f"llmgw: {file} is not valid:",
        "  rooter: unknown key; did you mean router?",
        "  route.retrys: unknown key; did you mean route.retries?",
        "  route.retries: expected a whole number, not a string",
    ]


def test_check_of_a_good_file_says_what_it_holds(run: Run, tmp_path: Path):
    file = tmp_path / "llmgw.toml"
    file.write_text('[route]\nretries = 2\n[[auth.key]]\nname = "a"\nkey = "sk-x"\n')
    ran = run("check", str(file))
    assert (ran.code, ran.out) == (0, f"{file}: fine (1 key, 1 client key)\n")
    assert "warning" in ran.err
    assert "sk-x" not in ran.err
    assert run("check", str(file), "--role", "agent").code == 3


@pytest.mark.parametrize("text", ["", "# hello\n", "[route]\n"])
def test_check_of_a_file_that_sets_nothing_says_so(run: Run, tmp_path: Path, text: str):
    file = tmp_path / "llmgw.toml"
    file.write_text(text)
    ran = run("check", str(file))
    assert (ran.code, ran.out) == (0, f"{file}: fine (it sets nothing: everything is at its default)\n")


def test_check_warns_of_a_key_that_has_ended_and_of_one_for_what_nobody_serves(run: Run, tmp_path: Path):
    file = tmp_path / "llmgw.toml"
    key = f'[[auth.key]]\nname = "a"\nsha256 = "{"a" * 64}"\nmodels = ["nope"]\nexpires = "2001-01-01T00:00:00Z"\n'
    file.write_text(key + '[[endpoint]]\nid = "u1"\nurl = "http://127.0.0.1:9001"\nmodels = ["m1"]\n')
    ran = run("check", str(file))
    assert (ran.code, ran.out) == (0, f"{file}: fine (1 client key, 1 endpoint)\n")
    assert ran.err.splitlines() == [
        f"llmgw: warning: {file}: auth.key: 'a' may use 'nope', which no endpoint serves",
        f"llmgw: warning: {file}: auth.key: 'a' has expired (2001-01-01T00:00:00Z) and is refused",
    ]


def test_check_refuses_a_router_that_is_its_own_endpoint(run: Run, tmp_path: Path):
    file = tmp_path / "llmgw.toml"
    file.write_text('[router]\nlisten = "[::]:9001"\n[[endpoint]]\nid = "u1"\nurl = "http://localhost:9001"\nmodels = ["m1"]\n')
    ran = run("check", str(file))
    assert (ran.code, ran.out) == (3, "")
    told = "endpoint: 'u1' at http://localhost:9001 is this router itself (router.listen is [::]:9001), which would ask itself without end"
    assert ran.err.splitlines() == [f"llmgw: {file} is not valid:", f"  {told}"]


def test_dev_refuses_an_endpoint_that_is_where_its_options_say_it_listens(run: Run, tmp_path: Path):
    file = tmp_path / "llmgw.toml"
    file.write_text('[[endpoint]]\nid = "u1"\nurl = "http://127.0.0.1:9001"\nmodels = ["m1"]\n')
    ran = run("dev", "--no-engine", "--port", "9001", "--data-dir", str(tmp_path / "d"), "--config", str(file))
    assert ran.code == 3
    assert "'u1' at http://127.0.0.1:9001 is this router itself (router.listen is 127.0.0.1:9001)" in ran.err
    assert not (tmp_path / "d").exists()


def test_check_of_a_dangling_link_says_where_it_leads(run: Run, tmp_path: Path):
    file = tmp_path / "llmgw.toml"
    file.symlink_to(tmp_path / "nowhere")
    ran = run("check", str(file))
    assert (ran.code, ran.err) == (4, f"llmgw: there is no file {file}: it is a link to {tmp_path / 'nowhere'}, which is not there\n")


def test_check_of_no_file_says_so(run: Run, tmp_path: Path):
    ran = run("check", str(tmp_path / "none.toml"))
    assert (ran.code, ran.err) == (4, f"llmgw: there is no file {tmp_path / 'none.toml'}\n")


@pytest.mark.parametrize("role", ["server", "router", "agent", "dev"])
def test_a_role_with_a_broken_file_ends_with_3_and_the_same_text(run: Run, tmp_path: Path, role: str):
    file = tmp_path / "llmgw.toml"
    file.write_text("[route]\nretries = 'x'\n[agent]\ncontrol_planes = ['http://127.0.0.1:1']\n")
    ran = run(role, "--config", str(file))
    assert (ran.code, ran.err) == (3, f"llmgw: {file} is not valid:\n  route.retries: expected a whole number, not a string\n")


# --- what goes wrong inside a command ---


def failing(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    def fail() -> None:
        raise error

    monkeypatch.setattr(program.cli, "get_command", lambda ctx, name: fail)


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (Conflict("the data directory is in use by pid 7"), 4, "llmgw: the data directory is in use by pid 7\n"),
        (Invalid.of("x is not valid", (Fault("a.b", "no"),)), 3, "llmgw: x is not valid:\n  a.b: no\n"),
        (RuntimeError("a\nb"), 1, "llmgw: failed: RuntimeError: a b (LLMGW_DEBUG=1 shows where)\n"),
        (FileNotFoundError(2, "No such file", "/x"), 1, "llmgw: /x: No such file (LLMGW_DEBUG=1 shows where)\n"),
        (OSError(28, "No space left on device", "/x"), 6, "llmgw: /x: No space left on device (LLMGW_DEBUG=1 shows where)\n"),
        (KeyError(), 1, "llmgw: failed: KeyError (LLMGW_DEBUG=1 shows where)\n"),
        (KeyboardInterrupt(), 130, "\n"),
        (ExceptionGroup("g", [Conflict("one"), ExceptionGroup("h", [Invalid("two"), Conflict("one")])]), 4, "llmgw: one\nllmgw: two\n"),
        (BaseExceptionGroup("g", [KeyboardInterrupt()]), 130, "\n"),
    ],
)
def test_an_error_is_a_line_and_an_exit_code(run: Run, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, text: str):
    failing(error, monkeypatch)
    ran = run("version")
    assert (ran.code, ran.err) == (code, text)


def test_a_traceback_is_shown_to_who_asks_for_it(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LLMGW_DEBUG", "1")
    failing(RuntimeError("x"), monkeypatch)
    assert "Traceback" in run("version").err


def test_a_closed_pipe_is_met_without_a_word():
    reader = subprocess.Popen(["true"], stdin=subprocess.PIPE)
    assert reader.stdin is not None
    reader.wait(timeout=LIMIT_S)
    with reader.stdin as closed:
        ran = subprocess.run(
            [sys.executable, "-m", "llmgw", "--help"], stdout=closed, stderr=subprocess.PIPE, text=True, timeout=LIMIT_S, check=False
        )
    assert ran.returncode in (1, 141)
    assert ran.stderr == ""


def test_a_full_disk_behind_the_output_is_one_line():
    with open("/dev/full", "w") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "llmgw", "version"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=LIMIT_S, check=False
        )
    assert ran.returncode == 1
    assert ran.stderr.startswith("llmgw: ")
    assert "No space left on device" in ran.stderr
    assert ran.stderr.count("\n") == 1


def test_ctrl_c_ends_following_with_130(api: FakeApi, home: Path):
    api.on("GET /api/v1/replicas/r/logs", {"attempt": 1, "attempts": 1, "offset": 0, "next_offset": 0, "text": ""})
    # Whoever runs the tests in the background ignores the signal, and so would the program.
    follow = (
        "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); runpy.run_module('llmgw', run_name='__main__')"
    )
    following = subprocess.Popen(
        [sys.executable, "-c", follow, "ctl", "--server", api.url, "replica", "logs", "-f", "r"],
        stderr=subprocess.PIPE,
        env={**os.environ, "LLMGW_TOKEN": TOKEN},
    )
    try:
        deadline = 600
        while not api.requests and deadline:  # wait for the state: it has begun to follow
            deadline -= 1
            select.select([], [], [], 0.05)
        following.send_signal(signal.SIGINT)
        _, err = following.communicate(timeout=LIMIT_S)
    finally:
        following.kill()
        following.wait()
    assert following.returncode == 130
    assert b"Traceback" not in err


def on_a_terminal(*args: str, answer: bytes = b"", **environ: str) -> tuple[int, bytes]:
    """The exit code and what a terminal would have shown."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "llmgw", *args], stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, **environ}
    )
    os.close(theirs)
    shown = b""
    try:
        if answer:
            os.write(ours, answer)
        while True:
            ready, _, _ = select.select([ours], [], [], LIMIT_S)
            assert ready, shown
            try:
                data = os.read(ours, 65536)
            except OSError:  # EIO: the other side is closed
                break
            if not data:
                break
            shown += data
        return process.wait(timeout=LIMIT_S), shown
    finally:
        process.kill()
        process.wait()
        os.close(ours)


EVIL = "m\x1b]0;owned\x07\x9b31m\u202egnp.exe"


@pytest.mark.parametrize("output", ["table", "json", "toml"])
def test_names_and_logs_cannot_steer_a_terminal(api: FakeApi, output: str):
    api.on("GET /api/v1/models", {"models": [{"name": EVIL, "ready": 0, "replicas_wanted": 1, "reason": "a\r\nb"}]})
    api.on("GET /api/v1/replicas/r/logs", {"attempt": 1, "offset": 0, "next_offset": 0, "text": f"{EVIL}\n"})
    api.on("GET /api/v1/models/m", {"error": {}})
    environ = {"LLMGW_TOKEN": TOKEN, "PYTHONUTF8": "1"}
    for args in (("model", "list", "--output", output), ("replica", "logs", "r")):
        code, shown = on_a_terminal("ctl", "--server", api.url, *args, **environ)
        assert code == 0
        text = shown.decode()
        assert "gnp.exe" in text
        assert not any(c in text for c in "\x1b\x07\x9b\u202e"), text


def test_a_table_too_wide_for_the_terminal_is_folded_into_it(api: FakeApi):
    why = "needs 43008 MiB of memory on one device and the largest that is free has 20480 MiB"
    api.on(
        "GET /api/v1/models", {"models": [{"name": "m1[bold]", "ready": 0, "replicas_wanted": 1, "state": "no_capacity", "reason": why}]}
    )
    _, shown = on_a_terminal("ctl", "--server", api.url, "model", "list", LLMGW_TOKEN=TOKEN, COLUMNS="50")
    lines = shown.decode().splitlines()
    assert len(lines) > 2
    assert all(len(line) <= 50 for line in lines)
    assert "m1[bold]" in lines[1]
    assert all(word in shown.decode() for word in why.split())
    _, shown = on_a_terminal("ctl", "--server", api.url, "model", "list", LLMGW_TOKEN=TOKEN, COLUMNS="200")
    assert len(shown.decode().splitlines()) == 2


def test_an_error_text_cannot_steer_a_terminal(api: FakeApi):
    code, shown = on_a_terminal("ctl", "--server", api.url, "model", "show", "\x1b[31mred", LLMGW_TOKEN=TOKEN)
    assert code == 4
    assert b"\x1b[31m" not in shown


def test_rm_asks_on_a_terminal_and_does_nothing_on_no(api: FakeApi):
    api.on("GET /api/v1/models/m1", {"name": "m1"})
    api.on("DELETE /api/v1/models/m1", {"revision": 2})
    code, shown = on_a_terminal("ctl", "--server", api.url, "model", "rm", "m1", answer=b"n\n", LLMGW_TOKEN=TOKEN)
    assert b"Remove model m1" in shown
    assert code == 130
    assert [request.method for request in api.requests] == ["GET"]
    code, shown = on_a_terminal("ctl", "--server", api.url, "model", "rm", "m1", "--yes", LLMGW_TOKEN=TOKEN)
    assert code == 0
    assert api.requests[-1].method == "DELETE"
