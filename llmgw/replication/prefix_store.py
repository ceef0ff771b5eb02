"""The prefixes of epochs in the bucket: which there are, how old they are by the store's own clock, and their removal.

Synchronous, for a thread; requests end by their own time-out and are not repeated. Never touches what is not below an epoch's prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Final

import attrs
import obstore
from obstore.exceptions import BaseError

from llmgw.domain.errors import Broken, Unavailable
from llmgw.lease.bucket import open_bucket
from llmgw.lease.record import ROLE
from llmgw.lease.store_answers import Failure, failure
from llmgw.replication import prefixes
from llmgw.settings.object_place import ObjectPlace

REQUEST_S: Final = 5.0  # chosen: a listing of a thousand names takes some 100 ms; a take-over waits for one, and has 10 s
REMOVE_BATCH: Final = 50  # names; between two batches it is asked whether to go on
LEASE: Final = f"lease/{ROLE}.json"  # renewed every few seconds: when it was last written is what time it is over there


@attrs.frozen
class Seen:
    """A prefix, its objects (names below the place) and their size, and when the newest was written (the store's clock)."""

    prefix: str
    names: tuple[str, ...]
    written: datetime
    bytes: int = 0


class StoreFailed(Unavailable):
    """The object store did not do it; `failure` is what it answered."""

    def __init__(self, place: ObjectPlace, failure: Failure) -> None:
        super().__init__(f"{place}: {failure.why}", code="replica_unavailable")
        self.failure = failure


class PrefixStore:
    def __init__(self, place: ObjectPlace, timeout_s: float = REQUEST_S) -> None:
        self.place = place
        self._timeout = timedelta(seconds=timeout_s)

    def has(self, prefix: str) -> bool:
        """Is anything there? Raises StoreFailed, Invalid."""
        with self._opened() as client:
            return any(bool(batch) for batch in obstore.list(client, prefix=prefix, chunk_size=1))

    def prefixes(self) -> tuple[str, ...]:
        """Those of epochs, in their order; some stores list one for a while after its last object went. Raises StoreFailed, Invalid."""
        with self._opened() as client:
            found = obstore.list_with_delimiter(client, prefix=prefixes.PREFIXES)["common_prefixes"]
        parsed = sorted((name, prefix) for prefix in found if (name := prefixes.parse(prefix.strip("/"))) is not None)
        return tuple(prefix.strip("/") for _, prefix in parsed)

    def copies(self) -> tuple[str, ...]:
        """The prefixes under which something is. Raises StoreFailed, Invalid."""
        return tuple(prefix for prefix in self.prefixes() if self.has(prefix))

    def look(self, prefix: str) -> Seen | None:
        """None where nothing is left. Raises StoreFailed, Invalid."""
        with self._opened() as client:
            found = [one for batch in obstore.list(client, prefix=prefix) for one in batch]
        if not found:
            return None
        return Seen(
            prefix,
            tuple(sorted(one["path"] for one in found)),
            max(one["last_modified"] for one in found),
            sum(one["size"] for one in found),
        )

    def now(self) -> datetime | None:
        """By the store's clock, seconds ago at most while somebody leads; None where there is no lease. Raises StoreFailed, Invalid."""
        try:
            with self._opened() as client:
                # Read whole, 400 bytes: an answer without a body cannot say whether the object or the bucket is missing.
                return obstore.get(client, LEASE).meta["last_modified"]
        except FileNotFoundError:
            return None

    def remove(self, seen: Seen, go_on: Callable[[], bool]) -> bool:
        """Removes what was seen of it; False where `go_on` said no before the end. Raises StoreFailed, Invalid."""
        wrong = [name for name in seen.names if prefixes.parse("/".join(name.split("/")[:2])) is None]
        if wrong:
            raise Broken(f"{wrong[0]} is not of an epoch's copy")
        with self._opened() as client:
            for first in range(0, len(seen.names), REMOVE_BATCH):
                if not go_on():
                    return False
                obstore.delete(client, list(seen.names[first : first + REMOVE_BATCH]))
        return True

    @contextmanager
    def _opened(self) -> Iterator[obstore.store.S3Store]:
        try:
            yield open_bucket(self.place, "", self._timeout)
        except FileNotFoundError as err:
            if (found := failure(str(err))).absent:
                raise
            raise StoreFailed(self.place, found) from err
        except BaseError as err:
            raise StoreFailed(self.place, failure(str(err))) from err
