"""Keys of clients of /v1: which there are, and how they change. The owner that the admin API calls.

A change is durable first, then in force here and pushed to routers, then told to the other control planes. With a store the file's
`[[auth.key]]` tables are imported once; from then on the store's keys are all there are, so no name can mean two. Without one the
file's are. A secret is made here, handed out once, and never kept or logged.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import attrs
import structlog

from llmgw.control.event_log import EventLog
from llmgw.domain.errors import Conflict, Invalid, NotFound, PreconditionFailed
from llmgw.domain.policy import ApiKey
from llmgw.domain.ports import Machine
from llmgw.settings.objects import hash_key, key_from_table, key_to_table
from llmgw.store import api_keys
from llmgw.store.api_keys import KeyRows, StoredKey
from llmgw.store.audit import CLUSTER, Origin
from llmgw.store.connection import Store

SECRET_BYTES: Final = 32  # 256 bits (operations.md 4)
SECRET_BEGIN: Final = "sk-"  # what scanners for leaked secrets look for
PREFIX_CHARACTERS: Final = 10  # of the secret, for people to tell keys apart by; the 57 hex digits left cannot be guessed
NEAR: Final = 0.6  # difflib's ratio from which a name is offered as the one that was meant
log = structlog.get_logger("llmgw.keys")


@attrs.frozen
class Created:
    """`secret` is "" where a repeat is answered, whose first answer held it, or where the caller brought the hash of its own."""

    stored: StoredKey
    secret: str = attrs.field(default="", repr=False)
    new: bool = True


class Keys:
    """`changed()` is called at each change of what routers must know, `told()` after one of the store's rows.

    `file` names the file whose `[[auth.key]]` tables are the keys ("" with a store).
    """

    def __init__(
        self,
        machine: Machine,
        store: Store,
        epoch: Callable[[], int],
        events: EventLog,
        changed: Callable[[], None],
        told: Callable[[], None],
        file: str,
    ) -> None:
        self._machine = machine
        self._store = store
        self._epoch = epoch
        self._events = events
        self._changed = changed
        self._told = told
        self._file = file
        self._rows = KeyRows()
        self._in_force: tuple[ApiKey, ...] = ()
        self._warned_of: tuple[ApiKey, ...] = ()

    # --- what there is

    @property
    def in_force(self) -> tuple[ApiKey, ...]:
        """What routers are told: every key that is not revoked. An expired one is among them, and they see to its end by themselves."""
        return self._in_force

    @property
    def all(self) -> tuple[StoredKey, ...]:
        """Sorted by name, revoked ones among them."""
        return self._rows.keys

    @property
    def durability(self) -> str:
        return self._store.durability

    def get(self, name: str) -> StoredKey:
        """Raises NotFound, naming the nearest."""
        found = self._rows.find(name)
        if found is None:
            near = difflib.get_close_matches(name[:100], [stored.key.name for stored in self.all], 1, NEAR)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise NotFound(f"there is no key {name[:100]!r}{hint}", code="no_such_key")
        return found

    async def reload(self) -> None:
        """What another leader may have changed. With a store only."""
        self._take(await api_keys.load(self._store))

    def replace_from_file(self, keys: Sequence[ApiKey]) -> None:
        """Without a store: the file's keys are all there are."""
        self._take(KeyRows(keys=tuple(StoredKey(key) for key in sorted(keys, key=lambda key: key.name))))

    def told_import(self, imported: bool, keys: Sequence[ApiKey]) -> None:
        """For the history: the file's keys were taken at the first start against a store without any."""
        if imported and keys:
            self._warned_of = tuple(keys)
            names = ", ".join(key.name for key in keys)
            self._events.record("keys.imported", "keys", f"imported from the file at first start: {names}")

    def warn_of_file(self, keys: tuple[ApiKey, ...], source: str) -> None:
        """Once for each set of keys that a file holds in vain, because the store holds them."""
        if not keys or keys == self._warned_of:
            return
        self._warned_of = keys
        stored = {one.key.name: one for one in self.all}
        differ = [key.name for key in keys if (found := stored.get(key.name)) is None or found.revoked or found.key != key]
        log.warning(
            "keys of clients in the file have no effect: the store holds them; `llmgw ctl key` changes them",
            file=source,
            keys=", ".join(key.name for key in keys),
            **({"differ": ", ".join(differ)} if differ else {}),
        )

    # --- what changes it

    async def create(self, table: Mapping[str, Any], idempotency_key: str | None = None, origin: Origin = CLUSTER) -> Created:
        """A key as its `[[auth.key]]` table says. Without `sha256` a secret is made, which only this answer holds.

        Raises Invalid with every fault and for a key that may use nothing, Conflict (`key_exists`), StaleEpoch, Unavailable.
        """
        self._check_writable()
        secret = "" if table.get("sha256") else f"{SECRET_BEGIN}{self._machine.fresh_hex(SECRET_BYTES)}"
        key = key_from_table({**table, "sha256": hash_key(secret)} if secret else table)
        _check_use(key)
        if key.sha256.lower() == hash_key(""):
            raise Invalid("sha256 is the hash of nothing: the secret that was meant is empty", param="sha256", code="empty_secret")
        if key.expires_wall_s is not None and key.expires_wall_s <= self._machine.wall_s():
            raise Invalid("expires lies in the past: the key would never be valid", param="expires", code="expired")
        request = json.dumps(table, sort_keys=True)
        new = StoredKey(key, secret[:PREFIX_CHARACTERS])
        stored, is_new = await api_keys.create(self._store, self._epoch(), new, request, idempotency_key, origin)
        if is_new:
            self._events.record("key.created", f"key/{key.name}", f"key {key.name} was created{_by(origin)}")
        await self._reread()
        return Created(stored, secret if is_new else "", is_new)

    async def update(
        self,
        name: str,
        changes: Mapping[str, Any],
        expected: int | None = None,
        idempotency_key: str | None = None,
        origin: Origin = CLUSTER,
    ) -> tuple[StoredKey, tuple[str, ...]]:
        """Changes fields of its table; (the key, the fields that differ now). The secret stays.

        Raises Invalid, NotFound, Conflict (`key_revoked`), PreconditionFailed when somebody was faster than `expected`.
        """
        self._check_writable()
        before = self.get(name).key
        after = key_from_table({**key_to_table(before), **changes})
        if "models" in changes:  # one of a file may be like that, and its other fields are changed all the same
            _check_use(after)
        try:
            stored = await api_keys.update(self._store, self._epoch(), after, expected, idempotency_key, origin)
        except Conflict as err:
            if err.code == "revision_moved" and expected is not None:
                raise PreconditionFailed(err.message) from err
            raise
        differs = tuple(field.name for field in attrs.fields(ApiKey) if getattr(before, field.name) != getattr(stored.key, field.name))
        if differs:
            fields = ", ".join(_SHOWN.get(field, field) for field in differs)
            self._events.record("key.updated", f"key/{name}", f"key {name} was changed{_by(origin)}: {fields}")
        await self._reread()
        return stored, differs

    async def revoke(self, name: str, idempotency_key: str | None = None, origin: Origin = CLUSTER) -> tuple[StoredKey, bool]:
        """No router takes it from here on, and nothing brings it back; (the key, whether it was valid before). Raises NotFound."""
        self._check_writable()
        was_valid = not self.get(name).revoked
        stored = await api_keys.revoke(self._store, self._epoch(), name, idempotency_key, origin)
        if was_valid:
            self._events.record("key.revoked", f"key/{name}", f"key {name} was revoked{_by(origin)}")
        await self._reread()
        return stored, was_valid

    def _check_writable(self) -> None:
        if self._file:
            raise Conflict(
                f"without [store] the keys stand in {self._file} as [[auth.key]] tables: edit that file, a change is taken live",
                code="file_holds_it",
            )

    async def _reread(self) -> None:
        await self.reload()
        self._told()

    def _take(self, found: KeyRows) -> None:
        if found == self._rows:
            return
        self._rows = found
        self._in_force = tuple(stored.key for stored in found.keys if not stored.revoked)
        self._changed()


_SHOWN: Final = {"expires_wall_s": "expires"}  # fields as their tables call them


def _check_use(key: ApiKey) -> None:
    if not key.models:
        raise Invalid('models is empty: the key could use nothing; name models, or "*" for all', param="models")


def _by(origin: Origin) -> str:
    return f" by {origin.who}" if origin.who else ""
