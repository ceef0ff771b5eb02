"""What an object store's answer means for the lease, and how an operator is told. Pure: reads the text of what its client raised.

Only two answers decide anything: NoSuchKey to a read (there is no record) and 304, 404 or 412 to a write (it was refused). Of all
others nothing is known but why. The text is read and not the kind of error, which makes one of a missing object and a missing
bucket, and one of a refused condition and a conflict of two writes; a text that is not understood decides nothing. What a store
says of itself is repeated only as its one-word code: bodies may hold what is nobody's business.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import attrs

NO_ANSWER: Final = 0
REFUSED: Final = frozenset({304, 404, 412})  # "not the one you expect", as one store or another says it (R-B23)
CONFLICT: Final = 409  # two writes at once: neither yes nor no (R-B22)
TOO_MANY: Final = 429
NO_SUCH_KEY: Final = "NoSuchKey"
NO_SUCH_BUCKET: Final = "NoSuchBucket"

EXPIRED: Final = "the credentials have expired"
WRONG: Final = "the credentials are not right"
FORBIDDEN: Final = "the credentials do not allow it (to read, write, list and delete below the prefix is needed)"
NO_BUCKET: Final = "there is no such bucket"
REGION: Final = "the bucket is in another region than store.s3_region says"
SKEW: Final = "this machine's clock and the store's are too far apart"
SLOW: Final = "it asks for fewer requests"
RACE: Final = "another write was under way"
NO_CONDITIONS: Final = "it does not know writes with a condition"
FOREIGN: Final = "whatever answers there is no object store with this bucket"

# By the code, whatever the status beside it is: stores differ in that.
_BY_CODE: Final[Mapping[str, str]] = MappingProxyType({
    "ExpiredToken": EXPIRED,
    "ExpiredTokenException": EXPIRED,
    "TokenRefreshRequired": EXPIRED,
    "InvalidAccessKeyId": WRONG,
    "InvalidToken": WRONG,
    "SignatureDoesNotMatch": WRONG,
    "Unauthorized": WRONG,
    "AccessDenied": FORBIDDEN,
    NO_SUCH_BUCKET: NO_BUCKET,
    "AuthorizationHeaderMalformed": REGION,
    "PermanentRedirect": REGION,
    "TemporaryRedirect": REGION,
    "IllegalLocationConstraintException": REGION,
    "RequestTimeTooSkewed": SKEW,
    "RequestExpired": SKEW,
    "SlowDown": SLOW,
    "ConditionalRequestConflict": RACE,
    "OperationAborted": RACE,
    "NotImplemented": NO_CONDITIONS,
})  # fmt: skip
_BY_STATUS: Final[Mapping[int, str]] = MappingProxyType({
    301: REGION, 307: REGION, 308: REGION, 401: WRONG, 403: FORBIDDEN, CONFLICT: RACE, TOO_MANY: SLOW, 501: NO_CONDITIONS,
})  # fmt: skip
# What this machine, or the way to the store, can do: words that stand in the text, why, and whether waiting is in vain. The first counts.
_ON_THE_WAY: Final = (
    ("No CA certificates were loaded", "this machine has no certificates to trust (Debian's package ca-certificates has them)", True),
    ("redirect without LOCATION", f"it redirects without an address: {REGION}", True),
    ("TooManyRedirects", "it redirects again and again", True),
    ("MissingEtag", "its answer to a write has no ETag, without which no condition can be made", True),
    ("dns error", "its name cannot be resolved", False),
    ("TimedOut", "it did not answer in time", False),
    ("kind: Timeout", "it did not answer in time", False),
    ("ConnectionRefused", "it refuses connections", False),
    ("InvalidCertificate", "its certificate is not trusted here", True),
    ("invalid peer certificate", "its certificate is not trusted here", True),
    ("tcp connect error", "it cannot be reached", False),
    ("Parse(", "whatever answers there does not speak HTTP", True),
    ("corrupt message", "whatever answers there does not speak TLS", True),
    ("InvalidContentType", "whatever answers there does not speak TLS", True),
    ("kind: Body", "it cut the connection in the middle of an answer", False),
    ("IncompleteMessage", "it cut the connection", False),
    ("ConnectionReset", "it cut the connection", False),
    ("UnexpectedEof", "it cut the connection", False),
)
_LOST_ON_THE_WAY: Final = "the request failed on its way"
_TO_BE_REPAIRED: Final = frozenset({EXPIRED, WRONG, FORBIDDEN, NO_BUCKET, REGION, SKEW, NO_CONDITIONS, FOREIGN})
_OF_CREDENTIALS: Final = frozenset({EXPIRED, WRONG, FORBIDDEN})

_STATUS: Final = re.compile(r"non-2xx status code: (\d{3})")
_CODE: Final = re.compile(r"<Code>([A-Za-z0-9.]{1,64})</Code>")
_BUCKETS_REGION: Final = re.compile(r"<Region>([a-z0-9-]{1,64})</Region>")
_DETAIL: Final = "\n\nDebug source:"  # what the client adds for programmers; the cause of a request that got no answer stands there


@attrs.frozen
class Failure:
    """An answer that is no success, or none. `why` is for an operator and holds nothing secret."""

    status: int  # NO_ANSWER: none came
    code: str  # the store's word for it; "": it has none
    why: str
    needs_repair: bool = False  # waiting does not help
    of_credentials: bool = False  # others may be at hand by now

    @property
    def absent(self) -> bool:
        """To a read: does the store say that there is no such object? A 404 that does not say so may be anybody's."""
        return self.status == 404 and self.code == NO_SUCH_KEY

    @property
    def refused(self) -> bool:
        """To a write: was what it expects not there? What is there instead is read next, and decides."""
        return self.status in REFUSED


def failure(text: str) -> Failure:
    """What the client's error `text` says. Total."""
    said, _, detail = text.partition(_DETAIL)
    found = _STATUS.search(said)
    if found is None:
        for word, why, needs_repair in _ON_THE_WAY:
            if word in said or word in detail:
                return Failure(NO_ANSWER, "", why, needs_repair)
        return Failure(NO_ANSWER, "", _LOST_ON_THE_WAY)
    rest = said[found.end() :]
    code = match[1] if (match := _CODE.search(rest)) is not None else ""
    region = match[1] if (match := _BUCKETS_REGION.search(rest)) is not None else ""
    return answered(int(found[1]), code, region)


def answered(status: int, code: str, region: str = "") -> Failure:
    """What it means that a store answered `status`, with its own word `code` ("": none) and where it says the bucket is. Total."""
    meaning = _BY_CODE.get(code) or _BY_STATUS.get(status, "")
    if status == 404 and code not in (NO_SUCH_KEY, NO_SUCH_BUCKET):
        meaning = FOREIGN
    why = f"it answered {status}{f' {code}' if code else ''}{f': {meaning}' if meaning else ''}"
    if meaning == REGION and region:
        why += f" ({region})"
    return Failure(status, code, why, meaning in _TO_BE_REPAIRED, meaning in _OF_CREDENTIALS)
