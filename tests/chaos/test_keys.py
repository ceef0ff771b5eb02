"""Keys of clients, as real processes: made by `ctl`, known to a router of its own, ended everywhere by a revocation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.planes import figure, since
from tests.chaos.test_following import FollowedSite
from tests.programs import call, wait_for

pytestmark = pytest.mark.slow
OLD = "a-key-of-the-file"


class KeysSite(FollowedSite):
    """Keys are asked for, and the control plane's file holds one of before."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        server = folder / "server.toml"
        text = server.read_text().replace("[auth]\nrequired = false", f'[auth]\nrequired = true\n[[auth.key]]\nname = "old"\nkey = "{OLD}"')
        server.write_text(text)

    def ctl(self, *words: str) -> str:
        environ = {**os.environ, "LLMGW_TOKEN": (self.folder / "server" / "admin-token").read_text().strip(), "HOME": str(self.folder)}
        command = [sys.executable, "-m", "llmgw", "ctl", "--server", f"http://127.0.0.1:{self.admin_port}", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environ, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def status(self, secret: str) -> int:
        return call(self.address, "GET", "/v1/models", headers={"authorization": f"Bearer {secret}"})[0]

    def wait_status(self, secret: str, status: int) -> None:
        wait_for(lambda: self.status(secret) == status, f"the router answers {status}")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[KeysSite]:
    one = KeysSite(tmp_path)
    yield one
    one.close()


def test_a_key_is_made_used_and_revoked_and_a_router_of_its_own_knows_it_also_when_it_is_alone(
    site: KeysSite, request: pytest.FixtureRequest
) -> None:
    server = site.start_server()
    router = site.start_router()
    site.wait_status(OLD, 200)
    secret, kept = (site.ctl("key", "create", name).splitlines()[1] for name in ("team-a", "team-b"))
    for one in (secret, kept):
        site.wait_status(one, 200)
    site.ctl("key", "revoke", "old", "--yes")
    site.wait_status(OLD, 401)
    site.admin("POST", "/keys/team-a/revoke", {})
    begun_s = time.monotonic()
    site.wait_status(secret, 401)
    figure(request, "a revoked key is refused by a separate router after", f"{since(begun_s):.2f} s")
    assert [row["name"] for row in json.loads(site.ctl("key", "list", "-o", "json"))["keys"]] == ["team-b"]

    server.kill()
    pushed = site.folder / "router" / "pushed.json"
    wait_for(lambda: "team-b" in pushed.read_text() and "team-a" not in pushed.read_text(), "it is on the router's disk")
    assert router.end() == 0
    site.start_router()
    assert [site.status(one) for one in (kept, secret, OLD)] == [200, 401, 401]

    server = site.start_server()  # the file still holds the old key, and brings it back to nobody
    wait_for(lambda: site.metric("llmgw_router_session") == 1, "the router follows again")
    assert [site.status(one) for one in (kept, secret, OLD)] == [200, 401, 401]
    assert "keys of clients in the file have no effect" in server.output
    for text in (site.folder / "server.log").read_text(), (site.folder / "router.log").read_text(), pushed.read_text():
        assert secret not in text
        assert kept not in text
    assert all(kept.encode() not in file.read_bytes() for file in (site.folder / "server").iterdir() if file.is_file())
