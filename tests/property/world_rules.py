"""Protecting rules outside of the lease's own, each with what takes it away in the product's module, and who must miss it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, Final
from unittest import mock

import attrs

from llmgw.agent import fence as agent_fence
from llmgw.control import controller, planning, powers, rollout, settings_in_force
from llmgw.control.attention import Attention
from llmgw.control.inventory import Inventory
from llmgw.control.restart import Rollouts
from llmgw.domain.lease import Fence, FencingToken
from llmgw.protocol import list_delta
from llmgw.router.follow import Follower
from llmgw.store import connection
from llmgw.store import settings as settings_rows
from tests.property.schedules import BUSY, CONTROL, LISTS, SETTINGS_KIND, STORM, Kind

Removal = Callable[[], AbstractContextManager[object]]


@attrs.frozen
class WorldRule:
    """`first` is the seed that the search begins with: one or two before a schedule that shows it, so that it takes seconds."""

    invariant: str
    kind: Kind
    remove: Removal
    first: int = 0


def _obey(highest: FencingToken | None, token: FencingToken) -> Fence:
    return Fence.OBEY


async def _remember_in_memory(self: agent_fence.Fence, token: FencingToken) -> None:
    self._highest = token


def _without(owner: object, name: str, replacement: Any) -> Removal:
    return lambda: mock.patch.object(owner, name, replacement)


@contextmanager
def _without_router_fence() -> Iterator[None]:
    with ExitStack() as patches:
        patches.enter_context(mock.patch("tests.property.world.Follower", partial(Follower, rule=_obey)))
        patches.enter_context(mock.patch("llmgw.sim.router.fence", _obey))
        yield


def _unprotected(**rules: bool) -> Removal:
    return lambda: mock.patch("tests.property.world.PROTECT", settings_in_force.Protect(**rules))


def _rolled_out_without(*rules: str) -> Removal:
    return lambda: mock.patch("tests.property.world.RULES_OF_ROLLOUT", rollout.Rules(**dict.fromkeys(rules, False)))


WORLD_RULES: Final = {
    "an agent refuses a lower epoch": WorldRule(
        "AgentFence", STORM, lambda: mock.patch("llmgw.sim.node.Fence", partial(agent_fence.Fence, rule=_obey)), first=14
    ),
    "an agent has the epoch on disk before it obeys": WorldRule(
        "AgentFence", STORM, _without(agent_fence.Fence, "_store", _remember_in_memory)
    ),
    "a router refuses a lower epoch": WorldRule("RouterFence", STORM, _without_router_fence, first=16),
    "a delta counts over the list that it was made from, for the list that it makes": WorldRule(
        "ListsAgree", LISTS, _without(list_delta, "_is_that", lambda known, fingerprint: True)
    ),
    "what may run on a node that has not answered is not missing": WorldRule(
        "AdoptionIdempotent", CONTROL, _without(planning, "barrier", lambda grace_s, observed: ""), first=6
    ),
    "a write compares its epoch in its transaction": WorldRule(
        "NoDeposedWrite", STORM, _without(connection, "_check_epoch", lambda connection, epoch: None), first=34
    ),
    "a stop waits until routers have let go": WorldRule(
        "PublishBeforeStop", BUSY, _without(controller, "acknowledged_by_all", lambda sources, generation: generation)
    ),
    "an unconfirmed leader only restores": WorldRule(
        "UnconfirmedRestraint", BUSY, _without(powers, "allows", lambda *given: True), first=40
    ),
    "silence counts only while we listened": WorldRule(
        "AdoptionIdempotent", CONTROL, _without(Attention, "now_s", lambda self: self._machine.now_s()), first=136
    ),
    "an order that a broken session has lost is given again": WorldRule(
        "NothingLeftToPlan", BUSY, _without(Inventory, "_forget_untaken", lambda self, entry: None), first=7
    ),
    "settings are in force when the store has taken them": WorldRule(
        "NothingBeforeDurable", SETTINGS_KIND, _unprotected(durable_first=False)
    ),
    "a document that is not what was written is not applied": WorldRule("NoTorn", SETTINGS_KIND, _unprotected(check_digest=False)),
    "a version that does not load on a machine is not applied there": WorldRule(
        "NeverUnloadable", SETTINGS_KIND, _unprotected(only_loadable=False)
    ),
    "a changed file is read when it has hashed the same twice": WorldRule("NoTorn", SETTINGS_KIND, _unprotected(read_twice=False)),
    "an edit names the version that it began from": WorldRule(
        "SettingsLinear", SETTINGS_KIND, _without(settings_rows, "_check_parent", lambda head, parent: None)
    ),
    "only who has the token restarts": WorldRule(
        "MaxOneDown", SETTINGS_KIND, _without(Rollouts, "_is_told", lambda self, row: self._in_force.pending > 0)
    ),
    "the leader restarts last": WorldRule("LeaderLast", SETTINGS_KIND, _rolled_out_without("leader_last")),
    "a successor proves itself first": WorldRule("LeaderLast", SETTINGS_KIND, _rolled_out_without("proving_delay")),
    "a version that has failed goes no further": WorldRule("CanaryStops", SETTINGS_KIND, _rolled_out_without("canary_stops")),
}
