"""What Litestream says when it fails, put in words for an operator. Pure: reads the text of its answers and of its log.

What the object store answered through it means what it means for the lease (`lease.store_answers`); the rest is this machine's.
A text that is not understood is repeated cut short: Litestream's own words hold names and no secrets.
"""

from __future__ import annotations

import re
from typing import Final

import attrs

from llmgw.lease.store_answers import answered

DISK_FULL: Final = "the disk is full"
NOTHING_THERE: Final = "there is no copy under this prefix"
LATE: Final = "the object store did not answer in time"
SAID_MAX: Final = 300  # of words that are not understood

_STATUS: Final = re.compile(r"StatusCode: (\d{3})")
_CODE: Final = re.compile(r"(?:api error |HostID: [^,]*, )([A-Z][A-Za-z0-9.]{1,63}):")
# Words that stand in the text, why, and whether waiting is in vain. The first counts: Go adds the outer story before the inner.
_HERE: Final = (
    ("no space left on device", DISK_FULL, True),
    ("database or disk is full", DISK_FULL, True),
    ("disk quota exceeded", "this user's share of the disk is used up", True),
    ("read-only file system", "the file system is read-only", True),
    ("no matching backup files available", NOTHING_THERE, True),
    ("database disk image is malformed", "the file is damaged", True),
    ("integrity check failed", "the restored copy fails its check", True),
    ("x509:", "the object store's certificate is not trusted here", True),
    ("server gave HTTP response to HTTPS client", "whatever answers there does not speak TLS", True),
    ("malformed HTTP response", "whatever answers there does not speak HTTP", True),
    ("no such host", "the object store's name cannot be resolved", False),
    ("connection refused", "the object store refuses connections", False),
    ("connection reset", "the object store cut the connection", False),
    ("network is unreachable", "the object store cannot be reached", False),
    ("no route to host", "the object store cannot be reached", False),
    ("deadline exceeded", LATE, False),
    ("i/o timeout", LATE, False),
    ("too many open files", "the process has too many files open", False),
    ("permission denied", "this user may not use the files of the store", True),
)


@attrs.frozen
class Trouble:
    """`needs_repair`: waiting does not help. `of_credentials`: others may be at hand by now. `absent`: there is nothing to restore.
    `silent`: there was no answer in time, which says nothing of why."""

    why: str
    needs_repair: bool = False
    of_credentials: bool = False
    absent: bool = False
    silent: bool = False


def trouble(text: str) -> Trouble:
    """Total."""
    if (status := _STATUS.search(text)) is not None and int(status[1]) > 0:
        code = _CODE.search(text)
        failure = answered(int(status[1]), "" if code is None else code[1])
        return Trouble(f"of the object store: {failure.why}", failure.needs_repair, failure.of_credentials)
    low = text.lower()
    for word, why, needs_repair in _HERE:
        if word.lower() in low:
            return Trouble(why, needs_repair, absent=why == NOTHING_THERE, silent=why == LATE)
    said = " ".join(text.split())
    return Trouble(f"Litestream says: {said[:SAID_MAX]}" if said else "Litestream says nothing of why")
