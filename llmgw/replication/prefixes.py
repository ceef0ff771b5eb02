"""The names that an epoch's copy has: its prefix in the bucket, below the place's own, and its folder on disk. Pure.

A prefix is what a lease record names as its base. The tenure is in the name, so that no two holders ever share one, whatever
became of the epoch's number.
"""

from __future__ import annotations

import re
from typing import Final

import attrs

from llmgw.domain.errors import Invalid

PREFIXES: Final = "e"  # what they all stand below
TENURE_MAX: Final = 64  # a tenure is 32 hex digits; a name in a bucket or a folder is bounded
_NAME: Final = re.compile(rf"([1-9][0-9]{{0,15}})-([0-9a-z]{{1,{TENURE_MAX}}})\Z")


@attrs.frozen(order=True)
class EpochName:
    epoch: int
    tenure: str

    def __str__(self) -> str:
        return f"{self.epoch}-{self.tenure}"


def name_of(epoch: int, tenure: str) -> str:
    """`<epoch>-<tenure>`. Raises Invalid for what could not be read back."""
    name = f"{epoch}-{tenure}"
    if _NAME.match(name) is None:
        raise Invalid(f"no copy of the store can be called {name!r}: an epoch and a tenure of digits and small letters are expected")
    return name


def prefix_of(epoch: int, tenure: str) -> str:
    """Below the place's own prefix: `e/<epoch>-<tenure>`. Raises Invalid."""
    return f"{PREFIXES}/{name_of(epoch, tenure)}"


def parse_name(name: str) -> EpochName | None:
    """None for what is none of ours."""
    found = _NAME.match(name)
    return None if found is None else EpochName(int(found[1]), found[2])


def parse(prefix: str) -> EpochName | None:
    """None for what is no prefix of an epoch."""
    folder, slash, name = prefix.partition("/")
    return parse_name(name) if slash and folder == PREFIXES else None
