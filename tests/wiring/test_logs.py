"""What is logged: whatever engines, agents and clients wrote steers no terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

HOSTILE = "\x1b]0;owned\x07\x1b[35;7mred\x1b[0m\nllmgw: a line of its own\x9b2J\u202e"
PROGRAM = f"""
import logging, structlog
from llmgw.settings.schema import LogSettings
from llmgw.wiring.logs import configure_logs
configure_logs(LogSettings(level="info", format={{format!r}}))
hostile = {HOSTILE!r}
log = structlog.get_logger("x")
log.warning(hostile, text=hostile, listed=[hostile])
try:
    raise ValueError(hostile)
except ValueError:
    log.exception("it broke")
logging.getLogger("web").warning("%s", hostile)
"""


def logged(kind: str) -> str:
    """Everything that reaches the standard error, a terminal."""
    leader, follower = pty.openpty()
    try:
        subprocess.run([sys.executable, "-c", PROGRAM.format(format=kind)], stderr=follower, check=True, timeout=60)
        os.close(follower)
        data = b""
        while True:
            try:
                data += os.read(leader, 65_536)
            except OSError:  # how a terminal says that the other end is closed
                return data.decode()
    finally:
        os.close(leader)


def test_yes_and_no_have_their_key_beside_them() -> None:
    """`event=follows epoch=1 leads` had a word without a key, which no parser of logfmt knows what to do with."""
    program = (
        "import structlog\nfrom llmgw.settings.schema import LogSettings\nfrom llmgw.wiring.logs import configure_logs\n"
        "configure_logs(LogSettings(level='info', format='logfmt'))\n"
        "structlog.get_logger('x').info('follows', leads=True, serves=False, epoch=1)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert {"leads=true", "serves=false", "epoch=1"} <= set(done.stderr.split())
    assert all("=" in word for word in done.stderr.split())


@pytest.mark.parametrize("kind", ["auto", "console", "logfmt", "json"])
@pytest.mark.slow
def test_nothing_that_others_wrote_steers_the_terminal_or_makes_a_line_of_ours(kind: str) -> None:
    text = logged(kind)
    assert "red" in text
    assert "it broke" in text
    for steering in ("\x1b]", "\x1b[35;7m", "\x9b", "\u202e", "\x07"):
        assert steering not in text
    first = next(line for line in text.splitlines() if "red" in line)
    assert "llmgw: a line of its own" in first, "its line break is none of the log's"
