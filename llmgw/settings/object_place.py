"""Where `[store] replica` is, and the credentials for it: what every client of the object store is told.

Speaks to no store. A secret is read when somebody asks for it, and not kept: a file of credentials may be replaced at any time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import parse_qsl, urlencode, urlsplit

import attrs

from llmgw.domain.errors import Invalid
from llmgw.settings.schema import StoreSettings
from llmgw.settings.secrets import read_environment, read_secret_file

ACCESS_KEY_ID: Final = "AWS_ACCESS_KEY_ID"
SECRET_ACCESS_KEY: Final = "AWS_SECRET_ACCESS_KEY"
SESSION_TOKEN: Final = "AWS_SESSION_TOKEN"
NAMES: Final = (ACCESS_KEY_ID, SECRET_ACCESS_KEY, SESSION_TOKEN)
KEY: Final = "store.s3_credentials"
_SCHEME: Final = "s3://"
_FILE: Final = "file:"
_PRINTABLE: Final = re.compile(r"[!-~]+\Z")  # they travel in HTTP headers
_SECTION: Final = re.compile(r"\[[^\[\]]*\]\Z")


@attrs.frozen
class Credentials:
    """What a request is signed with. `session_token` is "" for credentials that last."""

    access_key_id: str = attrs.field(repr=False)
    secret_access_key: str = attrs.field(repr=False)
    session_token: str = attrs.field(default="", repr=False)


@attrs.frozen
class ObjectPlace:
    """A bucket and a prefix in it, of a store at `endpoint`. Requests name the bucket in the path, which all stores understand."""

    bucket: str
    prefix: str  # without a slash at either end; "" is the whole bucket
    endpoint: str  # scheme://host[:port], without a slash at the end
    region: str
    credentials: str = "env"  # a reference: "env" or "file:/PATH"

    @classmethod
    def of(cls, store: StoreSettings) -> ObjectPlace:
        """From settings that name a replica and have passed their checks."""
        bucket, _, prefix = store.replica.removeprefix(_SCHEME).partition("/")
        endpoint = store.s3_endpoint.rstrip("/") or f"https://s3.{store.s3_region}.amazonaws.com"
        return cls(bucket, prefix.strip("/"), endpoint, store.s3_region, store.s3_credentials)

    def key(self, name: str) -> str:
        """The whole name, in the bucket, of an object below the prefix."""
        return f"{self.prefix}/{name}" if self.prefix else name

    def __str__(self) -> str:
        """For people: the address as it stands in the settings, and the store that it is asked of."""
        below = f"/{self.prefix}" if self.prefix else ""
        return f"{_SCHEME}{self.bucket}{below} at {self.endpoint}"

    @property
    def address(self) -> str:
        """All of it in one line, for `parse`: what a process leaves behind for whoever tidies up after it. Holds no secret."""
        return f"{_SCHEME}{self.bucket}/{self.prefix}?" + urlencode(
            {"endpoint": self.endpoint, "region": self.region, "credentials": self.credentials}
        )

    @classmethod
    def parse(cls, address: str) -> ObjectPlace | None:
        """None for what is no `address`."""
        where = urlsplit(address)
        said = dict(parse_qsl(where.query))
        if not address.startswith(_SCHEME) or not where.netloc or not {"endpoint", "region", "credentials"} <= said.keys():
            return None
        return cls(where.netloc, where.path.strip("/"), said["endpoint"], said["region"], said["credentials"])

    def read_credentials(self, environ: Mapping[str, str] | None = None) -> Credentials:
        """As they are now. Raises Invalid that names the variable or the file, and never what is in it."""
        if self.credentials.startswith(_FILE):
            file = Path(self.credentials.removeprefix(_FILE))
            return _checked(_parse(read_secret_file(file, KEY), file), str(file))
        found = {name: read_environment(name, KEY, environ) for name in (ACCESS_KEY_ID, SECRET_ACCESS_KEY)}
        return _checked(found | _optional(environ), "the environment")


def _optional(environ: Mapping[str, str] | None) -> dict[str, str]:
    try:
        return {SESSION_TOKEN: read_environment(SESSION_TOKEN, KEY, environ)}
    except Invalid:  # not set, or empty: credentials that last have none
        return {}


def _parse(text: str, file: Path) -> dict[str, str]:
    """Lines NAME=value; what begins with # is a comment. AWS's own file of one section is read as well: names in any case."""
    found: dict[str, str] = {}
    sections = 0
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        if _SECTION.match(line) is not None:
            sections += 1
            if sections > 1:
                raise _fault(f"{file} line {number} begins a second section; one is read")
            continue
        name, equals, value = line.partition("=")
        name = name.strip().upper()
        if not equals:
            raise _fault(f"{file} line {number} is not NAME=value")
        if name in found:
            raise _fault(f"{file} line {number} gives {name} a second time")
        if name in NAMES:
            found[name] = value.strip()
    return found


def _checked(found: Mapping[str, str], where: str) -> Credentials:
    for name in (ACCESS_KEY_ID, SECRET_ACCESS_KEY):
        if not found.get(name):
            raise _fault(f"{where} has no {name}")
    for name, value in found.items():
        if value and _PRINTABLE.match(value) is None:
            raise _fault(f"{name} of {where} has characters that no such value has (a space, a line end, or no ASCII)")
    return Credentials(found[ACCESS_KEY_ID], found[SECRET_ACCESS_KEY], found.get(SESSION_TOKEN, ""))


def _fault(reason: str) -> Invalid:
    return Invalid(f"{KEY}: {reason}", param=KEY)
