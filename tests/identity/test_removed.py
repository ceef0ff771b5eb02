"""A control plane that was removed, on the machine of one that was not: the files of that machine are no way back in."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from structlog.testing import capture_logs

from llmgw.settings.load import Role, load_bytes
from llmgw.wiring.identity_files import ensure_authority
from llmgw.wiring.machine import RealMachine
from llmgw.wiring.server import Running, run_control_plane
from tests.identity.conftest import Machine, Plane, file_of, until


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])
async def test_a_control_plane_that_was_removed_is_not_let_in_by_the_control_token(tmp_path: Path, host: str):
    """Over TLS the token let in whoever had shown a certificate that was revoked; over plain HTTP nobody asked for the name."""
    (tmp_path / "shared").mkdir()
    ensure_authority(RealMachine(), tmp_path / "shared" / "ca", "c-1")  # as `llmgw init` makes it
    async with trio.open_nursery() as nursery:

        async def start(name: str) -> Running:
            loaded = load_bytes(file_of(tmp_path, name, plain="loopback", host=host).encode(), source="test", role=Role.SERVER)
            return await nursery.start(run_control_plane, RealMachine(), loaded)

        removed, leader = await start("ctl-1"), await start("ctl-2")
        await until(removed.controller.peers.healthy, "the standby is known")
        removed.controller.leadership.hand_over()
        await until(lambda: leader.controller.leadership.is_leader, "the other leads")
        peers = leader.controller.peers
        await until(peers.healthy, "the one before stands by")
        with capture_logs() as logs:
            control = Plane(leader, tmp_path, Machine())
            assert (await control.call("POST", "/api/v1/identities/server/ctl-1/revoke"))[1]["change"] == "revoked"
            await until(lambda: any("does not take our word" in one["event"] for one in logs), "the standby hears why")
            await until(lambda: not peers.healthy(), "the leader does not hear it")
        (word,) = [one["why"] for one in logs if "does not take our word" in one["event"]]
        assert "ctl-1 was re" in word
        assert [(one["who"], one["code"]) for one in logs if one["event"] == "a peer was refused"] == [("server", "certificate_revoked")]
        assert any("does not compete for the lease" in one["event"] for one in logs)
        nursery.cancel_scope.cancel()
