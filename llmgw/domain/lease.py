"""The right to lead, as the other rooms see it: the fencing token that travels with every command."""

from __future__ import annotations

import enum

import attrs

from llmgw.domain.ids import ClusterId, OwnerId


class Power(enum.Enum):
    """What a leader's claim may do now (control.md 2.2)."""

    CONFIRMED = "confirmed"  # the lease is proven: everything
    UNCONFIRMED = "unconfirmed"  # the store is silent: only what restores what is already asked for


class LeaseRole(enum.Enum):
    """Where a control plane stands towards the lease (control.md 2.1), as people and the other rooms see it."""

    FOLLOW = "follow"
    ACQUIRING = "acquiring"  # its write that takes the lease is on its way, or its outcome is not known yet
    WARMING = "warming"  # it holds the lease and gets ready to lead
    CONFIRMED = "confirmed"
    UNCONFIRMED = "unconfirmed"
    STEPPING_DOWN = "stepping_down"
    FENCED = "fenced"  # somebody else holds the lease; what it did as a leader is being ended


class Fence(enum.Enum):
    """What the holder of a highest-met token says of another token."""

    OBEY = "obey"
    FOREIGN = "foreign"  # of another cluster
    STALE = "stale"  # a lower epoch, or an equal one of another owner


@attrs.frozen
class FencingToken:
    """Sent with every command and list. An agent and a router obey the highest `(epoch, owner)` they have met."""

    cluster_id: ClusterId
    epoch: int
    owner: OwnerId


def fence(highest: FencingToken | None, token: FencingToken) -> Fence:
    """May a command that carries `token` be obeyed by one whose highest token met is `highest`?

    None means first contact: the token is taken, and with it the cluster id is pinned.
    """
    if highest is None:
        return Fence.OBEY
    if token.cluster_id != highest.cluster_id:
        return Fence.FOREIGN
    if token.epoch < highest.epoch:
        return Fence.STALE
    if token.epoch == highest.epoch and token.owner != highest.owner:
        return Fence.STALE
    return Fence.OBEY
