"""Which control planes an agent or a router dials: those of its file, and those that a leader has told it of. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from llmgw.protocol.messages import ControlPlanes

PLANES_MAX: Final = 64  # more addresses than any cluster has control planes


def remembered(before: Iterable[str], told: ControlPlanes) -> tuple[str, ...]:
    """What is known after this word of a leader's: one that does not know all of them adds, and takes none away."""
    urls = told.urls if told.whole else (*told.urls, *before)
    good = (url.rstrip("/") for url in urls if url.startswith(("http://", "https://")))
    return tuple(dict.fromkeys(good))[:PLANES_MAX]


def without_second_names(configured: Iterable[str], known: Iterable[str], reached_at: Mapping[str, str]) -> tuple[str, ...]:
    """Those of `known` that no configured address stands for: a control plane is dialled once, by the name that the file gives it.

    `reached_at` has what each address that answered has said of itself.
    """
    own = {url.rstrip("/") for url in configured}
    own |= {reached_at[url].rstrip("/") for url in own if url in reached_at}
    return tuple(url for url in known if url not in own)


def dialled(configured: Iterable[str], known: Iterable[str], reached_at: Mapping[str, str]) -> tuple[str, ...]:
    """Every address to be dialled, once; those of the file are always among them."""
    own = tuple(dict.fromkeys(url.rstrip("/") for url in configured))
    return (*own, *without_second_names(own, known, reached_at))
