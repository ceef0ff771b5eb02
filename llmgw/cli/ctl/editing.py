"""`ctl config edit`: the document in an editor, round after round until it is saved or given up. The text is never lost.

What the server finds wrong stands as comments above the text, and the editor opens again. Where somebody was faster, the person's
changes are put on top of theirs and shown again.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import attrs
import click

from llmgw.cli.ctl.config import Newest, change_lines, checked_text, header, newest, toml_line, warn, written_lines
from llmgw.cli.ctl.output import Ctl, echo, items
from llmgw.domain.errors import Invalid, LlmgwError, PreconditionFailed

NOTE: Final = "#: "  # begins a line of ours; those are taken out of what comes back
HELP: Final = (
    "This is the whole document: a key that is not here has its default. `llmgw ctl config show --layers` lists every key.",
    "Lines that begin with #: are dropped. Saved unchanged or without any key, nothing is changed.",
)


@attrs.define
class _Round:
    """What the editor is given: notes above the text, and what an unchanged text means."""

    base: Newest
    text: str
    notes: tuple[str, ...] = ()
    faulty: bool = False
    merged: bool = False


def edit_settings(ctl: Ctl, reason: str) -> None:
    """Until the edit is saved or given up. Raises LlmgwError, click.Abort; a text that was changed is kept then, and told where."""
    base = newest(ctl)
    handle, name = tempfile.mkstemp(prefix="llmgw-settings-", suffix=".toml")  # for this user alone (0600)
    os.close(handle)
    file = Path(name)
    state = _Round(base, base.toml, tuple(header(base)))
    with _kept(file, base.toml):
        while True:
            following = _one_round(ctl, file, state, base.toml, reason)
            if following is None:
                return
            state = following


def _one_round(ctl: Ctl, file: Path, state: _Round, original: str, reason: str) -> _Round | None:
    """What to show next; None when it is over."""
    notes = "".join(f"{NOTE}{line}\n" for line in (*state.notes, *HELP))
    file.write_text(f"{notes}\n{state.text}", encoding="utf-8")
    _run_editor(file)
    try:
        saved = _without_notes(file.read_bytes())
    except OSError as err:
        raise Invalid(f"the editor left no file {file}: nothing was changed") from err
    text = saved.decode("utf-8", "surrogateescape")
    unchanged = text.strip() == state.text.strip()
    if state.faulty and unchanged:
        raise Invalid("the text was saved with its faults as they were: nothing was changed")
    if unchanged and not state.merged:
        echo("nothing was changed")
        return None
    if not text.strip() or all(line.lstrip().startswith("#") or not line.strip() for line in text.splitlines()):
        echo("the text holds no key: nothing was changed")
        return None
    try:
        checked_text(saved, "the text")
        tried = ctl.client.send("PUT", "settings?dry_run=true", {"toml": text, "reason": reason}, state.base.match).body
        if not items(tried, "changes"):
            echo(f"nothing was changed: version {state.base.version} says that already")
            return None
        warn(tried)
        for line in written_lines(tried, "", dry_run=True):
            echo(line)
        if not click.confirm("Save this?"):
            raise click.Abort
        answer = ctl.client.send("PUT", "settings", {"toml": text, "reason": reason}, state.base.match)
    except PreconditionFailed:
        return _on_top(ctl, state.base, text)
    except Invalid as err:
        _check_readable(saved, err)
        return _Round(state.base, text, _told(err), faulty=True)
    ctl.print(answer.body, lambda: written_lines(answer.body, "", dry_run=False))
    file.write_text(original, encoding="utf-8")  # done: nothing is left to keep
    return None


def _told(err: Invalid) -> tuple[str, ...]:
    """The faults as notes. Lines are counted as the editor will count them, with the notes above the text."""
    found = ("This was not taken:", *err.message.splitlines(), "")
    above = len(found) + len(HELP) + 1  # an empty line stands between
    return tuple(re.sub(r"\bline (\d+)", lambda line: f"line {int(line[1]) + above}", text) for text in found)


def _check_readable(saved: bytes, err: Invalid) -> None:
    """What is no text cannot be shown again; the file keeps it as it is. Raises `err`."""
    try:
        saved.decode("utf-8")
    except UnicodeDecodeError:
        raise err from None


def _on_top(ctl: Ctl, base: Newest, text: str) -> _Round:
    """Somebody wrote a version meanwhile: the person's changes on top of it. Raises click.Abort when they are given up."""
    from llmgw.settings.document import Difference, differences, parse_document, with_keys

    now = newest(ctl)
    meanwhile = items(ctl.client.get("settings/diff", {"from": base.version, "to": now.version}).body, "changes")
    theirs = [*header(now), *(f"  {line}" for line in change_lines(meanwhile))]
    echo("somebody was faster:")
    for line in theirs:
        echo(line)
    notes = ["Somebody was faster. Your changes stand on top of:", *theirs, ""]
    try:
        mine: tuple[Difference, ...] = differences(parse_document(base.toml, "version"), parse_document(text, "the text"))
        given = {change.path: change.after for change in mine if change.after is not None}
        merged = with_keys(parse_document(now.toml, "version"), given, [change.path for change in mine if change.after is None]).text
        both = {change.get("path"): change.get("after") for change in meanwhile}
        clashes = [change for change in mine if change.path in both and both[change.path] != change.after]
    except LlmgwError:  # this build does not read what the server's does: the person puts the two together
        merged, clashes = text, []
        notes[0] = "Somebody was faster, and your text does not hold what this version changed:"
    for clash in clashes:
        notes.append(f"{clash.path}: yours is {toml_line(clash.after)}, version {now.version} says {toml_line(both[clash.path])}")
    if clashes:
        notes.append("")
    if not click.confirm(f"Edit again on top of version {now.version}?", default=True):
        raise click.Abort
    return _Round(now, merged, tuple(notes), merged=True)


def _without_notes(data: bytes) -> bytes:
    lines = data.removeprefix(b"\xef\xbb\xbf").splitlines(keepends=True)
    return b"".join(line for line in lines if not line.startswith(NOTE.strip().encode())).lstrip(b"\r\n")


def _run_editor(file: Path) -> None:
    """Raises Invalid where there is none, or where it failed."""
    asked = os.environ.get("VISUAL", "").strip() or os.environ.get("EDITOR", "").strip() or "vi"
    try:
        command = shlex.split(asked)
    except ValueError as err:
        raise Invalid(f"the editor {asked!r} ($VISUAL, $EDITOR) is no command: {err}") from err
    # Ctrl-C on this terminal is the editor's; a handler is not inherited, as an ignored signal would be.
    before = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        code = subprocess.run([*command, str(file)], check=False).returncode
    except OSError as err:
        raise Invalid(f"the editor {asked!r} ($VISUAL, $EDITOR) cannot be started: {err.strerror or err}") from err
    finally:
        signal.signal(signal.SIGINT, before)
    if code:
        raise Invalid(f"the editor {asked!r} ended with {code}: nothing was changed")


@contextlib.contextmanager
def _kept(file: Path, original: str) -> Iterator[None]:
    """The file goes with the edit, unless it holds something that is written nowhere else."""
    said = ""
    try:
        yield
    except click.Abort:
        said = "nothing was changed; "
        raise
    finally:
        try:
            text = _without_notes(file.read_bytes()).strip()
        except OSError:
            text = b""
        if not text or text == original.strip().encode():
            with contextlib.suppress(OSError):
                file.unlink()
        else:
            click.echo(f"{said}the text is kept in {file}", err=True)
