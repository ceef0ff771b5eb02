"""May the holder of this certificate come in, as what it is? The rule for every door; values in, a reason out.

TLS has checked by then that the cluster's CA made the certificate and that it is valid now.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Protocol

import attrs

from llmgw.domain.identity import MachineRole, Presented

FOREIGN: Final = "certificate_foreign"
WRONG_ROLE: Final = "certificate_role"
REVOKED: Final = "certificate_revoked"
EXPIRED: Final = "certificate_expired"
NOT_JOINED: Final = "not_joined"


class Certified(Protocol):
    """What is known of one certificate that was given out."""

    @property
    def serial(self) -> str: ...
    @property
    def role(self) -> MachineRole: ...
    @property
    def name(self) -> str: ...
    @property
    def key(self) -> str: ...
    @property
    def revoked_wall_s(self) -> float | None: ...


@attrs.frozen
class Ended:
    """What was revoked. `serials`: by serial. `names`: machines that had a certificate revoked; of those one with a serial that is
    not `known` is refused too: a certificate of before the store was restored, say. Not so where its key is one of `keys`, by which
    such a machine has joined anew: a control plane makes its certificates itself, and whoever leads learns of them only later."""

    serials: frozenset[str] = frozenset()
    known: frozenset[str] = frozenset()
    names: frozenset[tuple[MachineRole, str]] = frozenset()
    keys: frozenset[tuple[MachineRole, str, str]] = frozenset()

    @classmethod
    def of(cls, certified: Iterable[Certified]) -> Ended:
        every = tuple(certified)
        revoked = [one for one in every if one.revoked_wall_s is not None]
        return cls(
            frozenset(one.serial for one in revoked),
            frozenset(one.serial for one in every),
            frozenset((one.role, one.name) for one in revoked),
            # A key that was revoked once stays so: joining anew draws another.
            frozenset(_key(one) for one in every) - frozenset(_key(one) for one in revoked),
        )

    def removed(self, role: MachineRole, name: str) -> bool:
        """Was that machine removed, and has it not joined anew? For whoever shows no certificate."""
        return (role, name) in self.names and all((known, of) != (role, name) for known, of, _ in self.keys)


def _key(one: Certified) -> tuple[MachineRole, str, str]:
    return one.role, one.name, one.key


def refusal(shown: Presented, cluster: str, allowed: Iterable[MachineRole], ended: Ended, now_wall_s: float) -> tuple[str, str] | None:
    """(code, words) where it may not come in, or None. A session may last longer than its certificate, so the time counts too."""
    identity = shown.identity
    if identity.cluster != cluster:
        return FOREIGN, f"the certificate is of {identity.label} of cluster {identity.cluster}, and this is {cluster}"
    roles = tuple(allowed)
    if identity.role not in roles:
        wanted = " or ".join(role.value for role in roles)
        return WRONG_ROLE, f"the certificate is of {identity.label}, and this is for a machine that has joined as {wanted}"
    unknown = shown.serial not in ended.known and (identity.role, identity.name) in ended.names
    unknown = unknown and (identity.role, identity.name, shown.key) not in ended.keys
    if shown.serial in ended.serials or unknown:
        return REVOKED, f"the certificate of {identity.label} was revoked; it joins anew, by a new join token"
    if shown.not_after_wall_s and now_wall_s > shown.not_after_wall_s:
        return (
            EXPIRED,
            f"the certificate of {identity.label} has expired, unless the clock here is wrong; it joins anew, by a new join token",
        )
    return None
