"""Keys of clients as the control plane holds them: in force when durable, pushed with the policy, one truth with a store."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from structlog.testing import capture_logs

from llmgw.control.event_log import EventLog
from llmgw.control.keys import Keys
from llmgw.domain.errors import Conflict, Unavailable
from llmgw.domain.policy import ApiKey
from llmgw.settings.objects import hash_key
from llmgw.sim.machine import SimMachine
from llmgw.store.connection import MEMORY
from tests.control.settings_world import Store_, _inline
from tests.control.test_following import RouterProcess, site
from tests.control.world import World, run_world

SOURCE = "/etc/llmgw/llmgw.toml"


@attrs.define
class Owner:
    keys: Keys
    store: Store_
    pushed: list[tuple[str, ...]]


async def owner(file: str = "") -> Owner:
    machine, store = SimMachine(1), await Store_.open(MEMORY, _inline)
    pushed: list[tuple[str, ...]] = []

    async def append(batch: tuple[Any, ...]) -> tuple[Any, ...]:
        return batch

    events = EventLog(machine, append, lambda: 1)
    keys = Keys(machine, store, lambda: 1, events, lambda: pushed.append(tuple(key.name for key in keys.in_force)), lambda: None, file)
    return Owner(keys, store, pushed)


async def test_nothing_is_in_force_that_the_store_has_not_taken() -> None:
    one = await owner()
    await one.keys.create({"name": "a"})
    one.store.full = True
    with pytest.raises(Unavailable):
        await one.keys.create({"name": "b"})
    with pytest.raises(Unavailable):
        await one.keys.revoke("a")
    assert one.pushed == [("a",)]
    one.store.full = False
    await one.keys.revoke("a")
    assert one.pushed == [("a",), ()]


async def test_reading_the_same_again_pushes_nothing() -> None:
    one = await owner()
    await one.keys.create({"name": "a"})
    for _ in range(3):
        await one.keys.reload()
    assert one.pushed == [("a",)]


async def test_a_made_secret_is_what_its_hash_says_and_no_two_are_alike() -> None:
    one = await owner()
    made = [await one.keys.create({"name": f"k{number}"}) for number in range(20)]
    assert len({each.secret for each in made}) == 20
    for each in made:
        assert hash_key(each.secret) == each.stored.key.sha256
        assert each.secret not in repr(each)


async def test_without_a_store_the_file_is_the_truth_and_an_edit_of_it_replaces_all() -> None:
    one = await owner(SOURCE)
    one.keys.replace_from_file((ApiKey("b", "b" * 64), ApiKey("a", "a" * 64)))
    one.keys.replace_from_file((ApiKey("b", "b" * 64),))
    assert one.pushed == [("a", "b"), ("b",)]
    with pytest.raises(Conflict, match=SOURCE):
        await one.keys.revoke("b")


async def test_keys_that_a_file_holds_in_vain_are_told_once_and_those_that_differ_by_name() -> None:
    one = await owner()
    digest = (await one.keys.create({"name": "same"})).stored.key.sha256
    file = (ApiKey("same", digest), ApiKey("mine", "c" * 64))
    with capture_logs() as lines:
        one.keys.warn_of_file(file, SOURCE)
        one.keys.warn_of_file(file, SOURCE)
        one.keys.warn_of_file((), SOURCE)
    assert [(line["keys"], line["differ"]) for line in lines if line["log_level"] == "warning"] == [("same, mine", "mine")]


def test_a_router_of_its_own_is_told_of_a_revoked_key_and_knows_it_after_a_restart_without_a_control_plane() -> None:
    async def main(world: World) -> None:
        (router,) = await site(world)
        assert world.control is not None
        keys = world.control.controller.keys
        for name in ("old", "new"):
            await keys.create({"name": name})
        await world.wait(lambda: names(router) == ["new", "old"], "the router knows the keys")
        await keys.revoke("old")
        await world.wait(lambda: names(router) == ["new"], "the router knows that one is revoked")
        await world.wait(lambda: b'"new"' in kept(router) and b'"old"' not in kept(router), "it is on its disk")
        await router.kill()
        router.cut = True
        await router.start()
        assert names(router) == ["new"]

    run_world(main)


def names(router: RouterProcess) -> list[str]:
    policy = router.router.policy
    return [] if policy is None else [key.name for key in policy.keys]


def kept(router: RouterProcess) -> bytes:
    (data,) = [data for path, data in router.machine.disk.files.items() if path.name == "pushed.json"]
    return data
