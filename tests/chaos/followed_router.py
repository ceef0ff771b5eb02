"""A real `llmgw router` that follows a control plane of a test, and the engines behind it, as processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import attrs
import trio

from llmgw.domain.endpoint import Endpoint
from llmgw.domain.ids import EndpointId
from tests.chaos import hash_engine
from tests.chaos.router_control_plane import TOKEN, RouterControlPlane
from tests.programs import Program, call, chat, free_port, wait_for

ENGINE_LIMIT_S = 60.0


class FollowedRouter:
    """The router's process. It begins without any list."""

    def __init__(self, folder: Path, plane: RouterControlPlane, workers: int = 2) -> None:
        self.folder, self.port = folder, free_port()
        (folder / "token").write_text(f"{TOKEN}\n")
        (folder / "token").chmod(0o600)
        file = folder / "router.toml"
        file.write_text(
            f"""
[router]
listen = "127.0.0.1:{self.port}"
control_planes = ["{plane.url}"]
data_dir = "{folder}/router"
token_file = "{folder}/token"
workers = {workers}
[auth]
required = false
[route]
drain_s = 5
"""
        )
        self.program = Program(["router", "--config", str(file)], folder, "router")

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def metrics(self, name: str) -> dict[str, float]:
        """Each series of that name, by its labels as text."""
        lines = [line for line in call(self.address, "GET", "/metrics")[1].splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
        return {line.rpartition(" ")[0].removeprefix(name): float(line.rpartition(" ")[2]) for line in lines}

    async def wait_serving(self, model: str) -> None:
        """Until it answers for the model."""

        def answers() -> bool:
            assert self.program.process.poll() is None, self.program.output
            try:
                return chat(self.address, model)[0] == 200
            except OSError:
                return False

        await trio.to_thread.run_sync(lambda: wait_for(answers, f"the router answers; it said {self.program.output}"))


@attrs.frozen
class NamedEngine:
    """A `hash_engine` that says in each answer who it is. Every start has a name of its own, and unless told otherwise a key."""

    name: str
    model: str
    port: int
    key: str
    process: subprocess.Popen[bytes]

    @property
    def id(self) -> EndpointId:
        return EndpointId(self.name)

    def endpoint(self, id: EndpointId | None = None) -> Endpoint:
        """As a list has it; under another id where it stands in for one that was there before."""
        return Endpoint(id or self.id, f"http://127.0.0.1:{self.port}", (self.model,), key=self.key)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)


async def start_engine(name: str, model: str, port: int, *options: str, key: str = "") -> NamedEngine:
    """Once it answers."""
    key = key or f"key-of-{name}"
    command = [sys.executable, hash_engine.__file__, "--port", str(port), "--name", name, *options]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env={**os.environ, "LLMGW_API_KEY": key})

    def is_up() -> bool:
        assert process.poll() is None, f"{name} ended with {process.returncode}"
        try:
            return call(f"127.0.0.1:{port}", "GET", "/health")[0] == 200
        except OSError:
            return False

    try:
        await trio.to_thread.run_sync(lambda: wait_for(is_up, f"{name} answers", ENGINE_LIMIT_S))
    except BaseException:
        process.kill()
        raise
    return NamedEngine(name, model, port, key, process)
