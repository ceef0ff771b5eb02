"""Facts about the whole database: which cluster it is of, and the highest epoch it has met.

The cluster id is made once and never changes; the epoch only rises. Units of work for `Store.write` and `Store.read`.
"""

from __future__ import annotations

import apsw
import attrs

from llmgw.domain.ids import ClusterId, OwnerId
from llmgw.store.connection import Store
from llmgw.store.rows import row


@attrs.frozen
class Meta:
    """`cluster_id` None: never started. `owner` is who raised the epoch, "" where it did not say."""

    cluster_id: ClusterId | None
    epoch: int
    owner: OwnerId
    models_revision: int
    models_imported: bool


async def load(store: Store) -> Meta:
    return await store.read(read_meta)


async def ensure_cluster_id(store: Store, epoch: int, fresh: str) -> ClusterId:
    """The cluster's id; `fresh` becomes it when there is none yet. Of two that ask at once both get the same one."""
    return await store.write(_ensure_cluster_id, epoch, fresh)


def read_meta(connection: apsw.Connection) -> Meta:
    cluster_id, epoch, owner, revision, imported = row(
        connection, "SELECT cluster_id, epoch, owner, models_revision, models_imported FROM meta"
    )
    return Meta(None if cluster_id is None else ClusterId(cluster_id), epoch, OwnerId(owner), revision, bool(imported))


def raise_epoch(connection: apsw.Connection, epoch: int, owner: str = "") -> int:
    """A unit for `Store.write`: from now on lower epochs are refused. Only upward; returns the epoch that stands."""
    connection.execute("UPDATE meta SET epoch = ?, owner = ? WHERE epoch <= ?", (epoch, owner, epoch))
    return int(row(connection, "SELECT epoch FROM meta")[0])


def next_models_revision(connection: apsw.Connection) -> int:
    """Raises the counter of the set of models and returns it; inside a write."""
    return int(row(connection, "UPDATE meta SET models_revision = models_revision + 1 RETURNING models_revision")[0])


def _ensure_cluster_id(connection: apsw.Connection, epoch: int, fresh: str) -> ClusterId:
    connection.execute("UPDATE meta SET cluster_id = ? WHERE cluster_id IS NULL", (fresh,))
    return ClusterId(row(connection, "SELECT cluster_id FROM meta")[0])
