"""The lease of control planes on different machines: one object of a bucket for each role, replaced by conditional writes.

    <prefix>/lease/<role>.json      the record; made with If-None-Match: *, replaced with If-Match on the ETag that it was read with

- The client repeats nothing by itself: a second try of a write that was taken would be refused, and look like a loss (R-B8).
- A refused write is read back, and what stands there decides: `Lost` carries it, also where it is this very write, which an
  intermediary has repeated. Everything else is `Unknown`, and whoever asked reads the record before it tries again.
- An ETag may be a hash of the content: no two records are equal, since each has a write id of its own (R-B11).
- The lease's object is never deleted, only a probe's.

`LeaseBucket` is synchronous and loads no trio; `object_leases` is the port on it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Final

import attrs
import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from llmgw.domain.errors import Invalid
from llmgw.lease.bucket import open_bucket
from llmgw.lease.record import RECORD_BYTES_MAX, LeaseRecord, decode, encode
from llmgw.lease.store import Lost, Unknown
from llmgw.lease.store_answers import Failure, failure
from llmgw.settings.object_place import ObjectPlace

FOLDER: Final = "lease"
ETAGS_MAX: Final = 8  # of the last records seen; a compare-and-set expects one of them


class _NotDone(Exception):
    """The store did not do it."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.why)
        self.failure = failure


@attrs.frozen
class _Stored:
    record: LeaseRecord
    etag: str


def _go_on() -> None:
    return None


class LeaseBucket:
    """Records in a bucket, synchronous. Its methods may be called from any thread, several at once.

    `timeout_s` ends a request, of which a read is one and a replace up to three; `go_on` is called between them and may raise.
    """

    def __init__(self, place: ObjectPlace, timeout_s: float) -> None:
        """Asks nobody for anything."""
        self.place = place
        self._timeout = timedelta(seconds=timeout_s)
        self._turn = threading.Lock()
        self._client: S3Store | None = None
        self._etags: dict[str, str] = {}  # by write id

    def read(self, role: str) -> LeaseRecord | None:
        """Raises Unknown, and Invalid for credentials that are not there."""
        try:
            found = self._get(role)
        except _NotDone as err:
            if err.failure.absent:
                return None
            raise self._unknown(err.failure) from err
        self._remember(found.record, found.etag)
        return found.record

    def replace(self, role: str, expected: LeaseRecord | None, new: LeaseRecord, go_on: Callable[[], None] = _go_on) -> None:
        """Returns when the store has taken the record. Raises Lost, Unknown, and Invalid for credentials that are not there."""
        etag = None
        if expected is not None and (etag := self._etag_of(expected)) is None:
            # Never seen, or long ago: its version has to be asked for, and may be another one by now.
            current = self.read(role)
            if current is None or current.write_id != expected.write_id:
                raise Lost(current)
            etag = self._etag_of(expected)
            go_on()
        try:
            stored = self._put(role, encode(new), etag)
        except _NotDone as err:
            if not err.failure.refused:
                raise self._unknown(err.failure) from err
            go_on()
            raise Lost(self.read(role)) from err
        self._remember(new, stored)

    def remove(self, role: str) -> None:
        """For a probe's record only: the lease's is never deleted, or a late write could make it anew. Raises Unknown, Invalid."""
        try:
            with self._translated() as client:
                obstore.delete(client, self._name(role))
        except _NotDone as err:
            if not err.failure.absent:
                raise self._unknown(err.failure) from err

    # --- requests

    def _get(self, role: str) -> _Stored:
        with self._translated() as client:
            found = obstore.get(client, self._name(role))
            size, etag = found.meta["size"], found.meta.get("e_tag")
            data = bytes(found.bytes()) if size <= RECORD_BYTES_MAX else None
        where = f"{self._name(role)} of {self.place}"
        if data is None:
            raise Unknown(f"{where} is {size} bytes long; at most {RECORD_BYTES_MAX} are read", fault=True)
        try:
            record = decode(data)
        except Invalid as err:
            raise Unknown(f"{where}: {err.message}", fault=True) from err
        if not etag:
            raise Unknown(f"{where} came without an ETag, without which no condition can be made", fault=True)
        return _Stored(record, etag)

    def _put(self, role: str, data: bytes, etag: str | None) -> str:
        """The new ETag; `etag` None makes the object where there is none."""
        with self._translated() as client:
            stored = obstore.put(client, self._name(role), data, mode="create" if etag is None else {"e_tag": etag})
        return stored["e_tag"] or ""

    @contextmanager
    def _translated(self) -> Iterator[S3Store]:
        client = None
        try:
            with self._turn:
                client = self._client = self._client or self._open()
            yield client
        except (BaseError, FileNotFoundError) as err:
            found = failure(str(err))
            if found.of_credentials:
                with self._turn:
                    if self._client is client:
                        self._client = None  # the next request reads them anew: a file of them may have been replaced
            raise _NotDone(found) from err

    def _open(self) -> S3Store:
        return open_bucket(self.place, FOLDER, self._timeout)

    @staticmethod
    def _name(role: str) -> str:
        return f"{role}.json"

    def _unknown(self, found: Failure) -> Unknown:
        return Unknown(f"{self.place}: {found.why}", fault=found.needs_repair)

    # --- what versions the records had

    def _etag_of(self, record: LeaseRecord) -> str | None:
        with self._turn:
            return self._etags.get(record.write_id)

    def _remember(self, record: LeaseRecord, etag: str) -> None:
        with self._turn:
            self._etags.pop(record.write_id, None)
            self._etags[record.write_id] = etag
            while len(self._etags) > ETAGS_MAX:
                del self._etags[next(iter(self._etags))]
