"""An object store that keeps leases, in memory: every dialect that real ones speak, and every way they fail, by script.

`Bucket` is the store itself: objects with ETags and conditional writes, and writes that are applied late. `SimLeases` is one
client's way to it, which fails as its script says. A write that is late is applied when somebody next looks, in its order.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Callable
from typing import Final

import attrs

from llmgw.domain.errors import Invalid
from llmgw.domain.ports import Machine
from llmgw.lease.record import LeaseRecord, decode, encode
from llmgw.lease.store import Lost, Unknown

ETAGS_MAX: Final = 8  # of the last records that a client has seen; a compare-and-set expects one of them
REFUSED: Final = frozenset({304, 404, 412})  # "not the one you expect", as one store or another says it


@attrs.frozen
class Dialect:
    """How a store answers. `conditions` False: it takes every write with 200, whatever it was asked to compare.

    `atomic` False: it compares first and writes a moment later, so that of several writes at once each is taken.
    """

    content_etags: bool = True  # an ETag is a hash of the content: equal bytes are one version
    mismatch: int = 412  # If-Match names another version
    missing: int = 404  # If-Match, and there is no object; 200 writes all the same
    exists: int = 412  # If-None-Match: *, and there is an object
    conditions: bool = True
    atomic: bool = True


AWS: Final = Dialect()
DIALECTS: Final = {
    "aws": AWS,
    "ceph": Dialect(missing=412),
    "minio": Dialect(content_etags=False, mismatch=412),
    "minio-304": Dialect(mismatch=304, exists=304),
}
BROKEN_DIALECTS: Final = {
    "ignores": Dialect(conditions=False),
    "writes-where-missing": Dialect(missing=200),
    "compares-too-early": Dialect(atomic=False),
}


@attrs.frozen
class Fault:
    """What happens to one request. Seconds; `status` answers it without doing it; 0 does it."""

    before_s: float = 0.0  # until it is done
    after_s: float = 0.0  # until its answer is here
    status: int = 0
    lose_reply: bool = False  # done, and answered with silence
    late_s: float | None = None  # silence at once, done this much later


FINE: Final = Fault()


@attrs.frozen
class Request:
    """What a script looks at: "get", "put" or "delete", the key, and which request of this client it is, from 0."""

    method: str
    key: str
    number: int


@attrs.frozen
class Object:
    data: bytes
    etag: str


@attrs.frozen
class Put:
    key: str
    data: bytes
    if_match: str | None
    if_absent: bool


class Bucket:
    """`now_s` is the store's clock. `writes` holds every write that was taken, oldest first."""

    def __init__(self, now_s: Callable[[], float], dialect: Dialect = AWS) -> None:
        self._now_s = now_s
        self.dialect = dialect
        self._objects: dict[str, Object] = {}
        self._late: list[tuple[float, int, Put]] = []
        self._numbers = 0
        self.writes: list[tuple[str, bytes]] = []

    def get(self, key: str) -> Object | None:
        self._settle()
        return self._objects.get(key)

    def put(self, put: Put) -> tuple[int, str]:
        """(status, the object's ETag after a 200)."""
        self._settle()
        return self._put(put)

    def put_late(self, put: Put, after_s: float) -> None:
        """Done once that long has passed, whoever still waits for it."""
        self._numbers += 1
        bisect.insort(self._late, (self._now_s() + after_s, self._numbers, put), key=lambda late: late[:2])

    def delete(self, key: str) -> None:
        """A probe's object; a lease's own by hand alone: no control plane ever does."""
        self._settle()
        self._objects.pop(key, None)

    def names(self) -> tuple[str, ...]:
        """Of the objects that are there now."""
        self._settle()
        return tuple(self._objects)

    def restore(self, key: str, data: bytes) -> None:
        """By hand: what an old copy held."""
        self._objects[key] = Object(data, self._etag(data))

    def _settle(self) -> None:
        while self._late and self._late[0][0] <= self._now_s():
            self._put(self._late.pop(0)[2])

    def compare(self, put: Put) -> int:
        """The status with which the write is refused now; 200 where it is not."""
        there = self._objects.get(put.key)
        if self.dialect.conditions:
            if put.if_absent and there is not None:
                return self.dialect.exists
            if put.if_match is not None and there is None:
                return self.dialect.missing
            if put.if_match is not None and there is not None and there.etag != put.if_match:
                return self.dialect.mismatch
        return 200

    def set(self, put: Put) -> str:
        """Writes, whatever stands there; the object's ETag."""
        etag = self._etag(put.data)
        self._objects[put.key] = Object(put.data, etag)
        self.writes.append((put.key, put.data))
        return etag

    def _put(self, put: Put) -> tuple[int, str]:
        status = self.compare(put)
        return (status, self.set(put)) if status == 200 else (status, "")

    def _etag(self, data: bytes) -> str:
        if self.dialect.content_etags:
            return hashlib.md5(data, usedforsecurity=False).hexdigest()
        self._numbers += 1
        return f"v{self._numbers}"


class SimLeases:
    """The port `LeaseStore` of one client. `script(request)` says what happens to each request; `cut` loses all of them."""

    def __init__(self, machine: Machine, bucket: Bucket, script: Callable[[Request], Fault] = lambda request: FINE) -> None:
        self._machine = machine
        self._bucket = bucket
        self.script = script
        self.cut = False
        self.requests = 0
        self._etags: dict[str, str] = {}  # by write id

    async def read(self, role: str) -> LeaseRecord | None:
        found = await self._get(role)
        return None if found is None else self._decoded(found)

    async def replace(self, role: str, expected: LeaseRecord | None, new: LeaseRecord) -> None:
        etag = None if expected is None else self._etags.get(expected.write_id)
        if expected is not None and etag is None:
            # Never seen, or long ago: its version has to be asked for, and may be another one by now.
            current = await self.read(role)
            if current is None or current.write_id != expected.write_id:
                raise Lost(current)
            etag = self._etags[expected.write_id]
        status, stored = await self._send(Put(role, encode(new), etag, expected is None))
        if status == 200:
            self._remember(new, stored)
        elif status in REFUSED:
            raise Lost(await self.read(role))
        else:
            raise Unknown(f"the store answered {status}")  # a conflict of two writes (409) is neither yes nor no

    async def remove(self, role: str) -> None:
        fault = await self._begin("delete", role)
        self._bucket.delete(role)
        await self._end(fault)

    async def _get(self, key: str) -> Object | None:
        fault = await self._begin("get", key)
        found = self._bucket.get(key)
        await self._end(fault)
        return found

    async def _send(self, put: Put) -> tuple[int, str]:
        try:
            fault = await self._begin("put", put.key)
        except _Late as late:
            self._bucket.put_late(put, late.after_s)
            await self._silence()
        answer = await self._put(put)
        await self._end(fault)
        return answer

    async def _put(self, put: Put) -> tuple[int, str]:
        if self._bucket.dialect.atomic:
            return self._bucket.put(put)
        if (status := self._bucket.compare(put)) != 200:
            return status, ""
        await self._machine.sleep_until(self._machine.now_s() + _LATE_S)
        return 200, self._bucket.set(put)

    async def _begin(self, method: str, key: str) -> Fault:
        request = Request(method, key, self.requests)
        self.requests += 1
        fault = self.script(request)
        await self._machine.sleep_until(self._machine.now_s() + fault.before_s)
        if self.cut:
            await self._silence()
        if fault.late_s is not None and method == "put":
            raise _Late(fault.late_s)
        if fault.status:
            raise Unknown(f"the store answered {fault.status}")
        return fault

    async def _end(self, fault: Fault) -> None:
        await self._machine.sleep_until(self._machine.now_s() + fault.after_s)
        if fault.lose_reply or self.cut:
            await self._silence()

    async def _silence(self) -> None:
        """A black hole: no answer and no refusal, until whoever waits gives up."""
        while True:
            await self._machine.sleep_until(self._machine.now_s() + _SILENCE_S)

    def _decoded(self, found: Object) -> LeaseRecord:
        try:
            record = decode(found.data)
        except Invalid as err:
            raise Unknown(err.message, fault=True) from err
        self._remember(record, found.etag)
        return record

    def _remember(self, record: LeaseRecord, etag: str) -> None:
        self._etags.pop(record.write_id, None)
        self._etags[record.write_id] = etag
        while len(self._etags) > ETAGS_MAX:
            del self._etags[next(iter(self._etags))]


_SILENCE_S: Final = 3600.0  # far beyond any time-out
_LATE_S: Final = 0.01  # between comparing and writing, where that is not one


class _Late(Exception):
    def __init__(self, after_s: float) -> None:
        super().__init__("applied late")
        self.after_s = after_s


class SimLock:
    """The holder's lock of one machine, in memory: one of these for the machine, a `SimLockClient` for each process."""

    def __init__(self) -> None:
        self.holder: SimLockClient | None = None
        self.name = ""


class SimLockClient:
    """The port `HolderLock` of one process. `die` is what the kernel does when the process ends: it takes nothing after that."""

    def __init__(self, lock: SimLock) -> None:
        self._lock = lock
        self._dead = False

    async def take(self, name: str, if_named: str | None) -> bool:
        return self.take_now(name, if_named)

    async def let_go(self) -> None:
        self._release()

    def take_now(self, name: str, if_named: str | None) -> bool:
        lock = self._lock
        if self._dead:  # a task of it that has not been unwound yet
            return False
        if lock.holder not in (None, self) or (if_named is not None and lock.name != if_named):
            return False
        lock.holder, lock.name = self, name
        return True

    def die(self) -> None:
        self._dead = True
        self._release()

    def _release(self) -> None:
        if self._lock.holder is self:
            self._lock.holder = None
