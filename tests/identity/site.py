"""A control plane that `llmgw init` has set up, and what its operator's shell knows: for tests that type commands."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

from tests.programs import Program, free_port

HOST = "127.0.0.2"


def llmgw(*args: str, stdin: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("LLMGW_", "XDG_"))}
    return subprocess.run(
        [sys.executable, "-m", "llmgw", *args], input=stdin, capture_output=True, text=True, timeout=60, check=False, env={**env, **environ}
    )


class Site:
    """A control plane set up by `init` on another address than 127.0.0.1, and what its operator's shell knows."""

    def __init__(self, folder: Path, *more: str, lease: str = "") -> None:
        """`more` options of `init`."""
        self.folder = folder
        self.config = folder / "ctl.toml"
        self.data_dir = folder / "ctl"
        self.url = f"https://{HOST}:{free_port()}"
        done = llmgw(
            "init", "--yes", "--config", str(self.config), "--name", "ctl-1", "--listen", self.url.removeprefix("https://"),
            "--advertise", self.url, "--data-dir", str(self.data_dir), *more,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        self.said = done.stdout
        # Loopback is all that a test has: this makes it the address of another machine.
        text = self.config.read_text().replace("127.0.0.1:8080", f"{HOST}:{free_port()}")
        self.config.write_text(text.replace("required = true", "required = false") + f'[tls]\nplain = "never"\n{lease}')

    @property
    def token(self) -> str:
        return (self.data_dir / "admin-token").read_text().strip()

    def ctl(self, *args: str, url: str = "") -> subprocess.CompletedProcess[str]:
        environ = {"LLMGW_TOKEN": self.token, "LLMGW_CA": str(self.data_dir / "ca" / "ca.pem"), "HOME": str(self.folder)}
        return llmgw(*args, "--server", url or self.url, **environ)

    def rows(self, *args: str, noun: str) -> dict[str, dict]:
        done = self.ctl(*args, "--output", "json")
        assert done.returncode == 0, done.stderr
        return {row["name"]: row for row in json.loads(done.stdout)[noun]}

    def added(self, *args: str) -> str:
        """The token of the command that is printed."""
        done = self.ctl(*args)
        assert done.returncode == 0, done.stderr
        (line,) = done.stdout.splitlines()
        words = shlex.split(line)
        assert (words[0], words[2:]) == ("echo", ["|", "sudo", "llmgw", "join"])
        return words[1]

    def serves(self, one: Program) -> None:
        one.wait_output("serving")
