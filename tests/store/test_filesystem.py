"""A store belongs on a local disk."""

from __future__ import annotations

import pytest

from llmgw.domain.errors import Invalid
from llmgw.store import connection


async def test_a_store_on_a_network_file_system_is_refused_by_name(tmp_path, monkeypatch):
    async def inline(work):
        return work()

    monkeypatch.setattr(connection, "network_file_system", lambda folder: "nfs4")
    with pytest.raises(Invalid, match="nfs4"):
        await connection.FileStore.open(tmp_path / "llmgw.db", inline)
    assert list(tmp_path.iterdir()) == []
