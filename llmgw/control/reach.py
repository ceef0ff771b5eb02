"""Where machines that joined reach the control planes: the list that the leader tells agents and routers. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from llmgw.protocol.messages import ControlPlanes
from llmgw.protocol.planes import PLANES_MAX


def planes_told(
    name: str, reached_at: str, heard: Mapping[str, str], members: Iterable[str], removed: Callable[[str], bool]
) -> ControlPlanes | None:
    """`name` is this leader's, `heard` says of each standby that has presented itself where it is reached, `members` are the control
    planes that have a certificate. None: there is nothing to tell.

    The list is whole, so that whoever gets it forgets all others, only where every member is on it: a leader that has just begun has
    not heard from all of them, and one that is down comes back under the address that is remembered of it.
    """
    known = {name: reached_at} | {other: url for other, url in heard.items() if other != name and not removed(other)}
    urls = tuple(dict.fromkeys(url.rstrip("/") for _, url in sorted(known.items()) if url.startswith("https://")))[:PLANES_MAX]
    members = frozenset(members)
    whole = name in members and all(known.get(member, "").startswith("https://") for member in members)
    return ControlPlanes(urls, whole) if urls else None
