"""Is a file a whole copy of a store of ours, and of which? Looked at as it lies: not a byte of it, nor beside it, is changed.

For a restored base, a backup, a standby's copy. Blocking.
"""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path
from typing import Final
from urllib.parse import quote

import apsw
import attrs

from llmgw.domain.errors import Unavailable
from llmgw.settings.database_file import contents, transaction
from llmgw.store.migrations import APPLICATION_ID

DAMAGED: Final = "copy_damaged"
FAULTS_MAX: Final = 3  # of a damaged file; the first names the page


@attrs.frozen
class Copy:
    """`cluster_id` "": the store has never been started. `settings_version` 0: it has no settings yet."""

    cluster_id: str
    epoch: int
    schema: int
    settings_version: int
    settings_sha256: str
    bytes: int


def verify(path: Path) -> Copy:
    """What is in it, all of it checked. The file has no log beside it, and nobody writes it. Raises Unavailable, code `copy_damaged`."""
    try:
        size = path.stat().st_size
        with contextlib.closing(_open(path)) as connection, transaction(connection, "BEGIN"):
            faults = [str(fault) for (fault,) in connection.execute(f"PRAGMA quick_check({FAULTS_MAX})")]
            if faults != ["ok"]:
                raise _damaged(path, f"SQLite finds: {'; '.join(faults)}")
            found = contents(connection)
            if found.application_id != APPLICATION_ID:
                raise _damaged(path, "it is no database of llmgw")
            cluster_id, epoch = next(connection.execute("SELECT cluster_id, epoch FROM meta"))
            version, sha256 = 0, ""
            if "cluster_settings" in found.tables:
                for version, sha256, document in connection.execute(
                    "SELECT version, sha256, document FROM cluster_settings ORDER BY version DESC LIMIT 1"
                ):
                    if hashlib.sha256(document.encode()).hexdigest() != sha256:
                        raise _damaged(path, f"the settings of version {version} are not those that were written")
            return Copy(cluster_id or "", epoch, found.version, version, sha256, size)
    except (apsw.Error, OSError, StopIteration) as err:
        raise _damaged(path, str(err) or type(err).__name__) from err


def _open(path: Path) -> apsw.Connection:
    return apsw.Connection(f"file:{quote(str(path))}?mode=ro&immutable=1", flags=apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI)


def _damaged(path: Path, why: str) -> Unavailable:
    return Unavailable(f"the copy of the store {path} fails its check: {why}", code=DAMAGED)
