"""`ctl config`, `ctl pause`: what is sent and printed, against a real control plane; the editor on a real terminal."""

from __future__ import annotations

import errno
import json
import logging
import os
import pty
import re
import select
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue

import attrs
import pytest
import structlog
import trio

from llmgw.cli.ctl.config import change_lines, toml_line
from llmgw.cli.ctl.status import status_lines
from llmgw.settings.document import DOCUMENT_BYTES_MAX
from tests.admin.conftest import ADMIN, VIEWER, running_admin
from tests.cli.conftest import Ran, Run
from tests.cli.fake_api import FakeApi, Says, error
from tests.cli.test_ctl import STATUS

LIMIT_S = 60.0


@contextmanager
def served(folder: Path, **more: object) -> Iterator[str]:
    """The URL of a control plane in this process; what it logs is no output of ctl's."""
    folder.mkdir()
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    ready: Queue[tuple[str, Callable[[], None]]] = Queue()

    async def main() -> None:
        over = trio.Event()
        token = trio.lowlevel.current_trio_token()
        async with running_admin(folder, imported=False, **more) as admin:
            ready.put((f"http://127.0.0.1:{admin.port}", lambda: token.run_sync_soon(over.set)))
            await over.wait()

    thread = threading.Thread(target=trio.run, args=(main,))
    thread.start()
    url, end = ready.get(timeout=LIMIT_S)
    try:
        yield url
    finally:
        end()
        thread.join(LIMIT_S)
        structlog.configure(**before)


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with served(tmp_path / "data") as found:
        yield found


@pytest.fixture
def real(run: Run, url: str, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("LLMGW_TOKEN", ADMIN)
    return lambda *args: run("ctl", "--server", url, *args)


def version_of(real: Run) -> int:
    return int(json.loads(real("config", "show", "-o", "json").out)["version"])


# --- reading


def test_the_document_is_shown_as_it_is_applied(real: Run, tmp_path: Path):
    shown = real("config", "show")
    assert (shown.code, shown.err) == (0, "")
    first, *_ = shown.out.splitlines()
    assert re.fullmatch(
        r"# settings version 1, written \d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ by ctl-1: imported from the file at first start", first
    )
    assert tomllib.loads(shown.out)["guard"]["max_messages"] == 2048
    file = tmp_path / "document.toml"
    file.write_text(shown.out)
    applied = real("config", "apply", "-f", str(file))
    assert (applied.code, applied.out) == (0, "nothing changed: version 1 says that already\n")
    assert tomllib.loads(real("config", "show", "-o", "toml").out) == tomllib.loads(shown.out)


def test_a_shown_document_that_was_cut_anywhere_is_not_applied(real: Run, tmp_path: Path):
    lines = real("config", "show").out.splitlines(keepends=True)
    file = tmp_path / "document.toml"
    for count in range(1, len(lines)):
        file.write_text("".join(lines[:count]))
        for command in (("config", "apply", "-f", str(file)), ("config", "check", str(file))):
            ran = real(*command)
            assert ran.code == 3
            assert any(word in ran.err for word in ("not written whole", "is not TOML", "sets nothing")), ran.err
    assert version_of(real) == 1


def test_layers_tell_where_each_value_comes_from(real: Run):
    real("config", "set", "limits.max_parallel", "3")
    lines = real("config", "show", "--layers").out.splitlines()
    assert lines[0].split() == ["KEY", "VALUE", "FROM"]
    assert ["limits.max_parallel", "3", "document"] in [line.split() for line in lines]
    assert ["limits.tokens_per_minute", "0", "default"] in [line.split() for line in lines]


def test_a_key_is_told_with_whose_value_it_is(real: Run):
    assert real("config", "get", "guard.max_messages").out == "guard.max_messages = 2048  (from the settings)\n"
    assert real("config", "get", "guard.max_images").out == "guard.max_images = 0  (by default)\n"
    found = json.loads(real("config", "get", "placement.spread", "-o", "json").out)
    assert found == {"path": "placement.spread", "value": "facility", "origin": "default", "in_vain": None}
    assert tomllib.loads(real("config", "get", "limits", "-o", "toml").out)["limits"]["max_parallel"] == 0
    assert real("config", "get", 'engines."llama.cpp".load_limit_s').out.startswith('engines."llama.cpp".load_limit_s = ')
    assert real("config", "get", "lease.ttl_s").out == "lease.ttl_s = 15  (by default)\n"
    assert "nothing is set in [engines.<name>]" in real("config", "get", "engines").err
    wrong = real("config", "get", "guard.max_mesages")
    assert (wrong.code, wrong.err) == (4, "llmgw: there is no key guard.max_mesages; did you mean guard.max_messages?\n")


# --- changing single keys


def test_a_key_is_set_and_unset_and_the_answer_says_all_of_it(real: Run):
    ran = real("config", "set", "guard.max_messages", "7", "--reason", "too chatty")
    assert ran.code == 0
    assert ran.out == "guard.max_messages: 2048 -> 7\nsettings version 2 is written (durability: none)\nno restart is needed\n"
    restart = real("config", "set", "lease.ttl_s", "20")
    assert restart.out.splitlines() == [
        "lease.ttl_s: not set -> 20  (restart)",
        "settings version 3 is written (durability: none)",
        "control planes restart for lease.ttl_s, one after another: `llmgw ctl status`",
    ]
    assert real("config", "set", "placement.spread", "rack").out.startswith('placement.spread: not set -> "rack"\n')
    assert real("config", "set", "placement.spread", '"rack"').out == "nothing changed: version 4 says that already\n"
    assert real("config", "unset", "lease.ttl_s").out.startswith("lease.ttl_s: 20 -> not set  (restart)\n")
    assert json.loads(real("config", "set", "guard.max_messages", "8", "-o", "json").out)["version"] == 6


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("set", "guard.max_mesages", "7"), "guard.max_mesages: unknown key; did you mean guard.max_messages?"),
        (("set", "guard.max_messages", "many"), "guard.max_messages: 'many' is no value that TOML knows"),
        (("set", "guard.max_messages", '"many"'), "guard.max_messages: expected a whole number"),
        (("set", "guard.max_messages", "-1"), "guard.max_messages: "),
        (("set", "lease.renew_s", "14"), "lease.renew_s: "),
        (("set", "server.name", "x"), "server.name: is one machine's own key; it stands in that machine's file"),
        (("set", "guard", "7"), "guard: is a table; name one of its keys"),
        (("set", "guard = 3", "7"), "'guard = 3' is no key"),
        (("unset", "guard.nothing"), "guard.nothing: unknown key"),
        (("unset", ""), "'' is no key"),
    ],
)
def test_a_key_that_cannot_be_set_so_is_named_with_the_reason(real: Run, args: tuple[str, ...], told: str):
    ran = real("config", *args)
    assert (ran.code, ran.out) == (3, "")
    assert told in ran.err
    assert "Traceback" not in ran.err
    assert version_of(real) == 1


def test_a_key_is_set_on_top_of_what_somebody_wrote_meanwhile(ctl: Run, api: FakeApi):
    api.on("GET /api/v1/settings", {"version": 1, "toml": ""}, {"version": 2, "toml": ""})
    written = {"version": 3, "changes": [{"path": "guard.max_messages", "before": None, "after": 7, "applies": "live"}], "restart": []}
    api.on("PATCH /api/v1/settings", error(412, "somebody was faster", "revision_moved"), written)
    ran = ctl("config", "set", "guard.max_messages", "7")
    assert (ran.code, ran.out.splitlines()[1]) == (0, "settings version 3 is written")
    patches = [request for request in api.requests if request.method == "PATCH"]
    assert [request.headers["if-match"] for request in patches] == ['"1"', '"2"']
    assert len({request.headers["idempotency-key"] for request in patches}) == 2


def test_a_write_whose_answer_was_lost_is_sent_again_under_its_key(ctl: Run, api: FakeApi):
    api.on("GET /api/v1/settings", {"version": 1, "toml": ""})
    api.on("PATCH /api/v1/settings", Says(hang_up=True), {"version": 2, "changes": [], "restart": []})
    assert ctl("config", "set", "guard.max_messages", "7").code == 0
    patches = [request for request in api.requests if request.method == "PATCH"]
    assert len(patches) == 2
    assert len({request.headers["idempotency-key"] for request in patches}) == 1


# --- whole documents


def test_a_file_is_the_whole_document_and_a_dry_run_writes_nothing(real: Run, tmp_path: Path):
    file = tmp_path / "document.toml"
    file.write_text("# ours\n[limits]\nmax_parallel = 3\n")
    tried = real("config", "apply", "-f", str(file), "--dry-run")
    assert tried.code == 0
    assert "guard.max_messages: 2048 -> not set\n" in tried.out
    assert "limits.max_parallel: not set -> 3\n" in tried.out
    assert tried.out.endswith("no restart is needed\ndry run: nothing was written\n")
    assert version_of(real) == 1
    checked = real("config", "check", str(file))
    assert (checked.code, checked.out.splitlines()[-1]) == (0, f"{file}: fine")
    applied = real("config", "apply", "-f", str(file), "--reason", "a tidy document")
    assert "settings version 2 is written (durability: none)\n" in applied.out
    assert tomllib.loads(real("config", "show").out) == {"limits": {"max_parallel": 3}}


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "sets nothing, and applying it would put every key back to its default"),
        (b"\n# nothing\n[guard]\n", "sets nothing"),
        (b"[guard]\nmax_messages = \n", "line 2, column 16: the key max_messages has no value"),
        (b"[guard]\nmax_messages = ", "is not TOML at its end: a value is missing"),
        (b"[guard]\nmax_messages = 1\nmax_messages = 2\n", "line 3"),
        (b"[guard]\n\xff = 1\n", "is not UTF-8 text (line 2)"),
        (b"#" + b"x" * DOCUMENT_BYTES_MAX, f"is larger than {DOCUMENT_BYTES_MAX} bytes: that is no settings document"),
        (b"#" + b"x" * 10_000_000, "is larger than"),
        (b"[guard]\nmax_mesages = 1\n", "guard.max_mesages: unknown key; did you mean guard.max_messages?"),
        (b"[guard]\nmax_messages = true\n", "guard.max_messages: expected a whole number"),
        (b"[lease]\nttl_s = 15\nrenew_s = 6\n", "lease.renew_s: "),
        (b'[server]\nname = "a"\n[store]\n[guard]\nmax_messages = 1\n', "holds [server], [store], which are a machine's own"),
        (b'[[model]]\nname = "m"\n', "model: is no setting; models are changed with `llmgw ctl model`"),
    ],
)
def test_a_file_that_cannot_be_the_document_is_refused_with_place_and_reason(real: Run, tmp_path: Path, data: bytes, told: str):
    file = tmp_path / "document.toml"
    file.write_bytes(data)
    ran = real("config", "apply", "-f", str(file))
    assert (ran.code, ran.out) == (3, "")
    assert told in ran.err
    assert "Traceback" not in ran.err
    assert version_of(real) == 1
    checked = real("config", "check", str(file))
    assert checked.code == 3


def test_a_file_that_is_not_there_is_not_found(real: Run, tmp_path: Path):
    ran = real("config", "apply", "-f", str(tmp_path / "no.toml"))
    assert (ran.code, ran.err) == (4, f"llmgw: there is no file {tmp_path / 'no.toml'}\n")
    assert real("config", "check", str(tmp_path)).code == 3


def test_a_document_is_read_from_standard_input(real: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    file = tmp_path / "in"
    file.write_text("[limits]\nmax_parallel = 3\n")
    with file.open() as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        assert real("config", "apply", "-f", "-").code == 0
    assert version_of(real) == 2


# --- history, diff, rollback


def test_versions_are_listed_compared_and_taken_back(real: Run):
    real("config", "set", "guard.max_messages", "7", "--reason", "too chatty")
    listed = real("config", "history").out.splitlines()
    assert listed[0].split("  ")[0] == "VERSION"
    assert re.match(r"2 +\S+Z  admin +1 +too chatty +ctl-1$", listed[1])
    assert re.match(r"1 +\S+Z  ctl-1 +2 +imported from the file at first start$", listed[2])
    assert real("config", "diff", "1", "2").out == "guard.max_messages: 2048 -> 7\n"
    assert real("config", "diff", "1").out == "guard.max_messages: 2048 -> 7\n"
    assert real("config", "diff", "2", "1").out == "guard.max_messages: 7 -> 2048\n"
    assert real("config", "diff", "2").out == "versions 2 and 2 say the same\n"
    back = real("config", "rollback", "1", "--yes", "--reason", "quiet again")
    assert back.out == "guard.max_messages: 7 -> 2048\nsettings version 3 is written (durability: none)\nno restart is needed\n"
    assert "quiet again" in real("config", "history", "--limit", "1").out
    unasked = real("config", "rollback", "1")
    assert (unasked.code, "say --yes" in unasked.err) == (2, True)
    missing = real("config", "rollback", "9", "--yes")
    assert (missing.code, missing.err) == (4, "llmgw: there is no version 9; the newest is 3\n")
    assert real("config", "diff", "x").code == 2
    assert real("config", "rollback", "0").code == 2


def test_the_history_tells_who_refused_a_version_and_goes_on_over_pages(ctl: Run, api: FakeApi):
    def version(number: int, **more: object) -> dict[str, object]:
        return {"version": number, "created_at": "2030-01-01T00:00:00.123Z", "author": "ops", "changes": 1, "reason": "", **more}

    refused = version(3, refused_by=[{"name": "ctl-2", "why": "no such file"}], applied_by=["ctl-1", "ctl-3"], why_held="canary")
    api.on("GET /api/v1/settings/history?limit=3", {"versions": [refused, version(2)], "next": "2"})
    api.on("GET /api/v1/settings/history?limit=1&cursor=2", {"versions": [version(1)], "next": None})
    lines = ctl("config", "history", "--limit", "3").out.splitlines()
    assert re.split("  +", lines[0]) == ["VERSION", "WHEN", "AUTHOR", "CHANGES", "RUN BY", "REFUSED BY", "HELD"]
    assert re.split("  +", lines[1]) == ["3", "2030-01-01T00:00:00Z", "ops", "1", "ctl-1,ctl-3", "ctl-2: no such file", "canary"]
    assert [line.split()[0] for line in lines[1:]] == ["3", "2", "1"]


def test_long_lists_are_told_by_what_came_and_went():
    rules = [{"name": f"rule-{n}", "words": ["a" * 30], "action": "flag"} for n in range(3)]
    changes = [{"path": "guard.rule", "before": rules[:2], "after": rules[1:], "applies": "live"}]
    first, went, came = change_lines(changes)
    assert first == "guard.rule:"
    assert went.startswith('  - { name = "rule-0", ')
    assert came.startswith('  + { name = "rule-2", ')
    assert change_lines([{"path": "guard.rule", "before": rules, "after": rules[::-1], "applies": "live"}])[1] == "  in another order"


@pytest.mark.parametrize("value", [3, 2.5, True, "plain", 'a "quoted"\nline\\', [1, 2], [], {"a": 1, "b c": ["x"]}, {}, [{"a": "\x1b"}]])
def test_a_value_is_printed_as_toml_reads_it(value: object):
    line = toml_line(value)
    assert "\n" not in line
    assert tomllib.loads(f"v = {line}")["v"] == value


# --- pause, status, no store


def test_a_pause_is_seen_in_the_status_until_it_is_over(real: Run):
    assert real("pause", "--reason", "power work").out == "paused until `llmgw ctl resume` (durability: none)\n"
    assert "it was paused already by admin: power work; nothing was changed" in real("pause", "--reason", "other").out
    status = real("status")
    assert "settings  version 1, paused\n" in status.out
    assert re.search(r"- paused by admin since \S+: power work; roll-outs, moves and scaling stand still", status.out)
    assert real("status", "--check").code == 7
    assert real("resume").out.startswith("resumed")
    assert real("resume").out.startswith("there was no pause")
    assert real("status", "--check").code == 0


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"version": 3, "desired": 3, "live": 3, "applied": 3}, "version 3"),
        ({"version": 3, "desired": 3, "live": 3, "applied": 2, "rollout": "version 3: waiting for ctl-2"},
         "version 3, a part of it waits for a restart, version 3: waiting for ctl-2"),
        ({"version": 3, "desired": 3, "live": 2, "applied": 2}, "version 2, version 3 is wanted"),
    ],
)  # fmt: skip
def test_the_status_says_which_settings_are_in_force(settings: dict[str, object], line: str):
    lines = status_lines({**STATUS, "settings": settings}, lambda noun: [])
    assert f"settings  {line}" in lines


def test_without_a_store_the_file_is_shown_and_named_as_what_to_edit(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LLMGW_TOKEN", ADMIN)
    with served(tmp_path / "data", file="/etc/llmgw/llmgw.toml") as url:
        assert "# settings version 0: from /etc/llmgw/llmgw.toml\n" in run("ctl", "--server", url, "config", "show").out
        assert "by default" in run("ctl", "--server", url, "config", "get", "guard.max_messages").out
        for args in (("config", "set", "guard.max_messages", "7"), ("config", "rollback", "1", "--yes"), ("pause",)):
            ran = run("ctl", "--server", url, *args)
            assert ran.code == 4
            assert "/etc/llmgw/llmgw.toml" in ran.err
        assert "no versions" in run("ctl", "--server", url, "config", "history").out


def test_whoever_may_only_look_is_told_so(real: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LLMGW_TOKEN", VIEWER)
    assert real("config", "show").code == 0
    denied = real("config", "set", "guard.max_messages", "7")
    assert denied.code == 5
    assert "viewer" in denied.err


def test_these_commands_load_no_server():
    for command in (["ctl", "config", "set", "guard.max_messages", "7"], ["ctl", "pause", "--help"], ["ctl", "config", "edit", "--help"]):
        code = (
            "import sys\nfrom llmgw.cli.main import main\n"
            f"main({['ctl', '--server', 'http://127.0.0.1:1', *command[1:]]!r})\n"
            "bad = sorted(set(sys.modules) & {'trio', 'quart', 'hypercorn', 'apsw', 'httptools', 'xllamacpp'})\n"
            "assert not bad, bad\n"
        )
        environ = {**os.environ, "LLMGW_TOKEN": "t"}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=False, env=environ)
        assert done.returncode == 0, done.stderr


# --- the editor

EDITOR = """
import json, pathlib, sys, urllib.request
folder, file = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
steps = json.loads((folder / "steps.json").read_text())
step = steps.pop(0)
(folder / "steps.json").write_text(json.dumps(steps))
text = file.read_text()
with (folder / "given.json").open("a") as out:
    out.write(json.dumps({"text": text, "mode": file.stat().st_mode & 0o777, "path": str(file)}) + "\\n")
if "meanwhile" in step:
    url, token, version, keys = step["meanwhile"]
    headers = {"Authorization": "Bearer " + token, "If-Match": str(version)}
    body = json.dumps({"set": keys, "reason": "meanwhile"}).encode()
    urllib.request.urlopen(urllib.request.Request(url + "/api/v1/settings", body, headers, method="PATCH")).close()
if "replace" in step:
    before, after = step["replace"]
    assert before in text, text
    file.write_text(text.replace(before, after))
if "text" in step:
    file.write_bytes(step["text"].encode("latin1"))
sys.exit(step.get("code", 0))
"""


@attrs.frozen
class Edited:
    code: int
    shown: str
    given: list[dict[str, object]]

    @property
    def texts(self) -> list[str]:
        return [str(one["text"]) for one in self.given]

    @property
    def kept(self) -> Path:
        found = re.search(r"the text is kept in (\S+)", self.shown)
        assert found is not None, self.shown
        return Path(found[1])


@pytest.fixture
def edit(url: str, home: Path, tmp_path: Path) -> Callable[..., Edited]:
    """`llmgw ctl config edit` on a terminal of its own; each step is what the editor does, `answers` what the person types."""

    def run(*steps: dict[str, object], answers: str = "", args: tuple[str, ...] = (), editor: str | None = None) -> Edited:
        folder, temporary = tmp_path / "edit", tmp_path / "tmp"
        for one in (folder, temporary):
            one.mkdir(exist_ok=True)
        (folder / "steps.json").write_text(json.dumps(steps))
        (folder / "given.json").write_text("")
        (folder / "editor.py").write_text(EDITOR)
        environ = {
            **{name: value for name, value in os.environ.items() if name != "VISUAL"},
            "LLMGW_TOKEN": ADMIN,
            "EDITOR": f"{sys.executable} {folder / 'editor.py'} {folder}" if editor is None else editor,
            "TMPDIR": str(temporary),
        }
        code, shown = on_a_terminal([sys.executable, "-m", "llmgw", "ctl", "--server", url, "config", "edit", *args], environ, answers)
        given = [json.loads(line) for line in (folder / "given.json").read_text().splitlines()]
        return Edited(code, shown, given)

    return run


def on_a_terminal(command: list[str], environ: dict[str, str], answers: str) -> tuple[int, str]:
    ours, theirs = pty.openpty()
    try:
        process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environ, start_new_session=True)
        os.close(theirs)
        os.write(ours, answers.encode())
        shown = b""
        while select.select([ours], [], [], LIMIT_S)[0]:
            try:
                data = os.read(ours, 65536)
            except OSError as err:
                if err.errno == errno.EIO:  # the other end is closed
                    break
                raise
            if not data:
                break
            shown += data
        return process.wait(LIMIT_S), shown.decode().replace("\r\n", "\n")
    finally:
        os.close(ours)


def left(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "tmp").iterdir())


def test_an_edit_shows_what_changes_and_is_saved_when_it_is_said_so(edit: Callable[..., Edited], real: Run, tmp_path: Path):
    edited = edit({"replace": ["2048", "7"]}, answers="y\n", args=("--reason", "too chatty"))
    assert edited.code == 0, edited.shown
    assert edited.given[0]["mode"] == 0o600
    assert edited.texts[0].startswith("#: settings version 1, written ")
    assert "\n[guard]\nmax_messages = 2048\n" in edited.texts[0]
    assert "guard.max_messages: 2048 -> 7\n" in edited.shown
    assert "settings version 2 is written (durability: none)\n" in edited.shown
    assert json.loads(real("config", "show", "-o", "json").out)["reason"] == "too chatty"
    assert left(tmp_path) == []


@pytest.mark.parametrize(
    ("step", "told"),
    [
        ({}, "nothing was changed\n"),
        ({"text": ""}, "the text holds no key: nothing was changed\n"),
        ({"text": "#: only notes\n\n"}, "the text holds no key: nothing was changed\n"),
        ({"replace": ["max_messages = 2048", "max_messages = 2048 # as it was"]}, "version 1 says that already\n"),
    ],
)
def test_a_text_that_changes_nothing_writes_nothing(edit: Callable[..., Edited], real: Run, step: dict[str, object], told: str):
    edited = edit(step)
    assert edited.code == 0, edited.shown
    assert told in edited.shown
    assert version_of(real) == 1


def test_saying_no_writes_nothing_and_tells_where_the_text_is(edit: Callable[..., Edited], real: Run):
    edited = edit({"replace": ["2048", "7"]}, answers="n\n")
    assert edited.code == 130
    assert "nothing was changed; the text is kept in " in edited.shown
    assert "max_messages = 7\n" in edited.kept.read_text()
    assert edited.kept.stat().st_mode & 0o777 == 0o600
    assert version_of(real) == 1


def test_faults_stand_above_the_text_until_they_are_gone(edit: Callable[..., Edited], real: Run, tmp_path: Path):
    edited = edit(
        {"replace": ["max_messages = 2048", "max_mesages = 7 # mine"]},
        {"replace": ["max_mesages = 7", "max_messages = "]},
        {"replace": ["max_messages =  #", "max_messages = 7 #"]},
        answers="y\n",
    )
    assert edited.code == 0, edited.shown
    _, second, third = edited.texts
    assert second.startswith("#: This was not taken:\n#: the document is not valid:\n#:   guard.max_mesages: unknown key; did you mean")
    assert "max_mesages = 7 # mine\n" in second
    told = re.search(r"the text is not TOML at line (\d+), column 17: the key max_messages has no value", third)
    assert told is not None
    assert third.splitlines()[int(told[1]) - 1].startswith("max_messages = ")  # as the editor counts, with the notes above
    assert "unknown key" not in third
    assert "guard.max_messages: 2048 -> 7\n" in edited.shown
    assert (version_of(real), left(tmp_path)) == (2, [])


def test_faults_that_are_left_as_they_are_end_the_edit_and_the_text_is_kept(edit: Callable[..., Edited], real: Run):
    edited = edit({"replace": ["2048", '"many"']}, {})
    assert edited.code == 3
    assert "the text was saved with its faults as they were: nothing was changed" in edited.shown
    assert 'max_messages = "many"' in edited.kept.read_text()
    assert version_of(real) == 1


def test_an_edit_that_was_overtaken_goes_on_on_top_of_the_other_one(edit: Callable[..., Edited], real: Run, url: str, tmp_path: Path):
    meanwhile = [url, ADMIN, 1, {"limits.max_parallel": 3, "guard.max_images": 2}]
    edited = edit({"meanwhile": meanwhile, "replace": ["max_messages = 2048", "max_messages = 7\nmax_images = 5"]}, {}, answers="y\ny\n")
    assert edited.code == 0, edited.shown
    assert "somebody was faster:\n" in edited.shown
    again = edited.texts[1]
    assert again.startswith("#: Somebody was faster. Your changes stand on top of:\n#: settings version 2, written ")
    assert "#:   limits.max_parallel: not set -> 3\n" in again
    assert "#: guard.max_images: yours is 5, version 2 says 2\n" in again
    assert "max_messages = 7\n" in again
    assert "max_parallel = 3\n" in again
    document = json.loads(real("config", "show", "-o", "json").out)
    assert document["version"] == 3
    assert (document["document"]["guard"]["max_messages"], document["document"]["guard"]["max_images"]) == (7, 5)
    assert document["document"]["limits"] == {"max_parallel": 3}
    assert left(tmp_path) == []


def test_an_overtaken_edit_that_is_given_up_keeps_its_text(edit: Callable[..., Edited], real: Run, url: str):
    edited = edit({"meanwhile": [url, ADMIN, 1, {"limits.max_parallel": 3}], "replace": ["2048", "7"]}, answers="n\n")
    assert edited.code == 130
    assert "max_messages = 7\n" in edited.kept.read_text()
    assert version_of(real) == 2


def test_a_machines_own_file_pasted_into_the_editor_is_told_as_what_it_is(edit: Callable[..., Edited]):
    edited = edit({"text": '[server]\nname = "a"\n'}, {})
    assert "holds [server], which are a machine's own" in edited.texts[1]
    assert edited.code == 3


def test_what_is_no_text_at_all_is_kept_as_it_is(edit: Callable[..., Edited]):
    edited = edit({"text": "[guard]\nmax_messages = 7 # \xff\n"})
    assert edited.code == 3
    assert "the text is not UTF-8 text (line 2)" in edited.shown
    assert b"\xff" in edited.kept.read_bytes()


@pytest.mark.parametrize(
    ("editor", "told"),
    [
        ("/no/such/editor", "the editor '/no/such/editor' ($VISUAL, $EDITOR) cannot be started: No such file or directory"),
        ("false", "the editor 'false' ended with 1: nothing was changed"),
        ('"', "is no command"),
    ],
)
def test_an_editor_that_does_not_work_is_named(edit: Callable[..., Edited], editor: str, told: str, tmp_path: Path):
    edited = edit(editor=editor)
    assert edited.code == 3
    assert told in edited.shown
    assert left(tmp_path) == []


def test_without_a_terminal_an_edit_is_refused_before_anything_is_asked(real: Run):
    ran: Ran = real("config", "edit")
    assert ran.code == 2
    assert "edit needs a terminal" in ran.err


def test_a_rollback_on_a_terminal_asks_first(real: Run, url: str, home: Path):
    real("config", "set", "guard.max_messages", "7")
    environ = {**os.environ, "LLMGW_TOKEN": ADMIN}
    command = [sys.executable, "-m", "llmgw", "ctl", "--server", url, "config", "rollback", "1"]
    code, shown = on_a_terminal(command, environ, "n\n")
    assert code == 130
    assert "guard.max_messages: 7 -> 2048\nGo back to what version 1 says? [y/N]: " in shown
    assert version_of(real) == 2
    assert on_a_terminal(command, environ, "y\n")[0] == 0
    assert version_of(real) == 3
