"""The cluster settings' owner: what an edit writes, what it leaves alone, and that nothing is applied before it is durable."""

from __future__ import annotations

import attrs
import pytest
import trio

from llmgw.control.settings_in_force import Protect
from llmgw.control.settings_writer import REASON_MAX
from llmgw.domain.errors import Conflict, Invalid, NotFound, PreconditionFailed, StaleEpoch, Unavailable
from llmgw.domain.settings_version import Applied, Pause, PlaneSettings
from llmgw.settings.document import BASELINE_GUARD, EMPTY, parse_document, value_at
from llmgw.store import settings as rows
from tests.control.settings_world import ANN, FILE, SettingsWorld, what


def of(text: str):
    return parse_document(text, "t")


async def events(world: SettingsWorld) -> list[tuple[str, str]]:
    """What the history has been told."""
    log = world.writer._events
    async with trio.open_nursery() as nursery:
        nursery.start_soon(log.run)
        await log.flush()
        nursery.cancel_scope.cancel()
    return [(event.kind, event.text) for event in world.events]


async def test_a_written_version_is_in_force_here_when_the_call_returns_and_the_others_are_told(autojump_clock):
    world = await SettingsWorld.make("")
    version, planned = await world.writer.write(of("route.retries = 5"), 1, "busier", None, ANN)
    assert (version.version, version.parent, version.author, version.reason) == (2, 1, "ann", "busier")
    assert [(one.path, one.before, one.after) for one in planned.differences] == [("route.retries", None, 5)]
    assert planned.restart == ()
    assert world.settings.route.retries == 5
    assert world.changes == 1
    assert await events(world) == [("settings.written", "version 2 by ann: route.retries (busier)")]


async def test_an_edit_that_changes_nothing_writes_nothing_and_tells_nothing(autojump_clock):
    world = await SettingsWorld.make("route.retries = 5")
    version, planned = await world.writer.write(of("route.retries = 5"), 1, "again", None, ANN)
    assert (version.version, planned.differences) == (1, ())
    assert await events(world) == []
    assert len(await world.writer.history(10, None)) == 1


async def test_who_was_slower_is_told_and_nothing_of_the_edit_is_left(autojump_clock):
    world = await SettingsWorld.make("", "route.retries = 3")
    with pytest.raises(PreconditionFailed, match="at version 2, the edit began from 1") as refused:
        await world.writer.write(of("route.retries = 9"), 1, "", "k", ANN)
    assert refused.value.code == "revision_moved"
    assert world.settings.route.retries == 3
    assert (world.applied, world.changes, await events(world)) == ([], 0, [])


async def test_an_edit_of_a_version_that_never_was_is_refused(autojump_clock):
    world = await SettingsWorld.make("")
    with pytest.raises(NotFound, match="no version 7; the newest is 1"):
        await world.writer.write(of(""), 7, "", None, ANN)


async def test_of_edits_at_once_from_one_version_exactly_one_is_written(autojump_clock):
    world = await SettingsWorld.make("")
    won, lost = [], []

    async def edit(number: int) -> None:
        try:
            version, _ = await world.writer.write(of(f"events.keep_days = {number + 1}"), 1, "", f"k{number}", ANN)
        except PreconditionFailed:
            lost.append(number)
        else:
            won.append((number, version.version))

    async with trio.open_nursery() as nursery:
        for number in range(6):
            nursery.start_soon(edit, number)
    ((winner, version),) = won
    assert (version, len(lost)) == (2, 5)
    assert world.settings.events.keep_days == winner + 1


async def test_b161_an_older_copy_is_not_written_over_what_came_since(autojump_clock):
    """BerriAI/litellm#25553: an edit that began before a change put the old value back."""
    world = await SettingsWorld.make("route.retries = 1")
    version, old = await world.writer.newest()
    await world.writer.write(of("route.retries = 7"), version.version, "", None, ANN)
    with pytest.raises(PreconditionFailed):
        await world.writer.write(attrs.evolve(old, text=old.text + "\n[events]\nkeep_days = 3\n"), version.version, "", None, ANN)
    await world.look(3)
    assert world.settings.route.retries == 7


async def test_a_repeat_of_an_edit_gets_the_first_answer_and_no_second_version(autojump_clock):
    world = await SettingsWorld.make("")
    first, _ = await world.writer.write(of("route.retries = 5"), 1, "", "k", ANN)
    await world.writer.write(of("route.retries = 6"), 2, "", None, ANN)
    again, _ = await world.writer.write(of("route.retries = 5"), 1, "", "k", ANN)
    assert again == first
    assert world.settings.route.retries == 6
    assert [version.version for version in await world.writer.history(10, None)] == [3, 2, 1]
    assert [kind for kind, _ in await events(world)] == ["settings.written"] * 2


async def test_taking_a_version_back_writes_its_content_as_a_new_one(autojump_clock):
    world = await SettingsWorld.make("route.retries = 3", "route.retries = 9\nevents.keep_days = 5")
    _, content = await world.writer.version(1)
    version, planned = await world.writer.write(content, 2, "back to 1", None, ANN)
    assert (version.version, version.parent) == (3, 2)
    assert version.document == (await world.writer.version(1))[0].document
    assert [(one.path, one.before, one.after) for one in planned.differences] == [("route.retries", 9, 3), ("events.keep_days", 5, None)]
    assert (world.settings.route.retries, world.settings.events.keep_days) == (3, 90)


# --- durable before applied


async def test_nothing_is_applied_told_or_shown_before_the_store_has_it(autojump_clock):
    world = await SettingsWorld.make("route.retries = 3")
    world.store.full = True
    with pytest.raises(Unavailable, match="disk is full"):
        await world.writer.write(of("route.retries = 9"), 1, "", None, ANN)
    await world.look(3)
    assert (world.applied, world.changes, world.in_force.live) == ([], 0, 1)
    assert (await world.writer.newest())[0].version == 1
    assert await events(world) == []


async def test_without_the_rule_that_durable_comes_first_a_full_disk_leaves_a_change_that_nobody_else_has(autojump_clock):
    """What the rule is for: this control plane runs a version that the store never took."""
    world = await SettingsWorld.make("route.retries = 3", protect=Protect(durable_first=False))
    world.store.full = True
    with pytest.raises(Unavailable):
        await world.writer.write(of("route.retries = 9"), 1, "", None, ANN)
    assert world.settings.route.retries == 9
    assert (await world.writer.newest())[0].version == 1


async def test_who_does_not_lead_any_more_writes_and_applies_nothing(autojump_clock):
    world = await SettingsWorld.make("route.retries = 3")
    await rows.save_applied(world.store, 5, [Applied("http://b", "b", PlaneSettings(), 1.0)])
    for call in (
        lambda: world.writer.write(of("route.retries = 9"), 1, "", None, ANN),
        lambda: world.writer.pause("works", ANN),
        lambda: world.writer.resume(ANN),
    ):
        with pytest.raises(StaleEpoch):
            await call()
    await world.look()
    assert (world.applied, world.changes, world.poller.pause) == ([], 0, None)


async def test_an_edit_that_needs_a_restart_says_for_which_keys_and_takes_the_rest(autojump_clock):
    world = await SettingsWorld.make("")
    _, planned = await world.writer.write(of("lease.ttl_s = 30\nroute.retries = 5"), 1, "", None, ANN)
    assert planned.restart == ("lease.ttl_s",)
    assert (world.settings.lease.ttl_s, world.settings.route.retries) == (15, 5)
    assert what(world.in_force) == PlaneSettings(live=2, applied=1, pending=2)


async def test_a_plan_of_an_edit_writes_nothing(autojump_clock):
    world = await SettingsWorld.make("")
    planned = world.writer.plan(EMPTY, of("lease.ttl_s = 30"))
    assert [one.path for one in planned.differences] == ["lease.ttl_s"]
    assert len(await world.writer.history(10, None)) == 1


async def test_a_version_that_this_machine_refuses_is_written_all_the_same_and_said_to_be_refused_here(autojump_clock):
    """It may load on every other machine: which can run it is each machine's own finding."""
    world = await SettingsWorld.make("")
    world.why_not = "no such file"
    version, _ = await world.writer.write(of("lease.ttl_s = 30"), 1, "", None, ANN)
    assert version.version == 2
    assert what(world.in_force) == PlaneSettings(live=1, applied=1, refused=2, why="no such file")


async def test_a_reason_has_an_end(autojump_clock):
    world = await SettingsWorld.make("")
    for call in (world.writer.write(of("route.retries = 5"), 1, "x" * (REASON_MAX + 1), None, ANN), world.writer.pause("x" * 1001, ANN)):
        with pytest.raises(Invalid) as refused:
            await call
        assert refused.value.param == "reason"
    await world.writer.write(of("route.retries = 5"), 1, "x" * REASON_MAX, None, ANN)


# --- what there is


async def test_the_settings_of_a_store_without_a_version_are_the_empty_version_0(autojump_clock):
    world = await SettingsWorld.make()
    version, document = await world.writer.newest()
    assert (version.version, document) == (0, EMPTY)
    assert await world.writer.history(10, None) == ()


async def test_two_versions_are_compared_in_either_direction_and_with_nothing(autojump_clock):
    world = await SettingsWorld.make("route.retries = 3", "route.retries = 4")
    assert [(one.before, one.after) for one in await world.writer.diff(1, 2)] == [(3, 4)]
    assert [(one.before, one.after) for one in await world.writer.diff(2, 1)] == [(4, 3)]
    assert [(one.before, one.after) for one in await world.writer.diff(0, 2)] == [(None, 4)]
    assert [(one.before, one.after) for one in await world.writer.diff(2, 0)] == [(4, None)]
    assert await world.writer.diff(2, 2) == ()
    with pytest.raises(NotFound):
        await world.writer.diff(1, 3)


async def test_a_version_that_this_build_cannot_load_is_shown_and_can_be_taken_back(autojump_clock):
    world = await SettingsWorld.make("route.retries = 3")
    await world.write_raw('[route]\nretrys = 5\n[queues."a=b"]\nx = 1\n')
    version, document = await world.writer.newest()
    assert (version.version, document.text) == (2, '[route]\nretrys = 5\n[queues."a=b"]\nx = 1\n')
    assert {one.path for one in await world.writer.diff(1, 2)} == {"route.retries", "route.retrys", 'queues."a=b".x'}
    _, content = await world.writer.version(1)
    written, _ = await world.writer.write(content, 2, "back", None, ANN)
    assert written.version == 3
    assert what(world.in_force) == PlaneSettings(live=3, applied=3)


# --- a cluster on its file


async def test_without_a_store_the_file_is_shown_as_version_0_and_every_write_names_it(autojump_clock):
    world = await SettingsWorld.make(file="route.retries = 3", file_mode=True)
    version, document = await world.writer.newest()
    assert (version.version, value_at(document, "route.retries")) == (0, 3)
    assert await world.writer.history(10, None) == ()
    assert await world.writer.refused() == ()
    for call in (lambda: world.writer.write(of(""), 0, "", None, ANN), lambda: _raise(world.writer.check_writable)):
        with pytest.raises(Conflict) as refused:
            await call()
        assert refused.value.code == "file_holds_it"
        assert str(FILE) in refused.value.message
    with pytest.raises(NotFound) as missing:
        await world.writer.version(1)
    assert missing.value.code == "file_holds_it"
    assert await rows.newest(world.store) is None


async def _raise(call) -> None:
    call()


# --- the first version


async def test_the_first_start_imports_the_file_with_the_baseline_guard_and_says_so_once(autojump_clock):
    world = await SettingsWorld.make(
        file="route.retries = 3\nserver.name = 'x'\n[[model]]\nname = 'm'\n[[model.profile]]\nengine = 'vllm'\ncheckpoint = '/m'"
    )
    version = await world.writer.import_first(lambda connection, epoch: None)
    assert version is not None
    document = of(version.document)
    assert document.paths == ("route.retries", "guard.max_messages", "guard.rule")
    assert value_at(document, "guard") == BASELINE_GUARD
    assert await world.writer.import_first(lambda connection, epoch: None) is None
    assert await events(world) == [("settings.imported", f"version 1 is imported from {FILE}")]
    await world.look()
    assert what(world.in_force) == PlaneSettings(live=1, applied=1)


async def test_b160_a_file_left_in_place_is_not_imported_again_over_what_was_edited(autojump_clock):
    world = await SettingsWorld.make(file="route.retries = 3")
    for _ in range(3):
        await world.writer.import_first(lambda connection, epoch: None)
        await world.start()
    version, document = await world.writer.newest()
    await world.writer.write(of("route.retries = 8"), version.version, "", None, ANN)
    await world.start()
    assert await world.writer.import_first(lambda connection, epoch: None) is None
    await world.look()
    assert world.settings.route.retries == 8
    assert value_at(document, "route.retries") == 3


async def test_of_two_first_starts_exactly_one_imports(autojump_clock):
    world = await SettingsWorld.make(file="route.retries = 3")
    other = await SettingsWorld.make(file="route.retries = 4")
    other.writer._store = world.store
    imported = [await each.writer.import_first(lambda connection, epoch: None) for each in (world, other)]
    assert [version is not None for version in imported] == [True, False]
    assert value_at((await other.writer.newest())[1], "route.retries") == 3


async def test_an_import_that_fails_halfway_says_nothing_in_the_history_and_can_be_tried_again(autojump_clock):
    world = await SettingsWorld.make(file="route.retries = 3")

    def die(connection, epoch) -> None:
        raise Unavailable("the disk is full")

    with pytest.raises(Unavailable):
        await world.writer.import_first(die)
    assert await rows.newest(world.store) is None
    assert await events(world) == []
    assert await world.writer.import_first(lambda connection, epoch: None) is not None


# --- a pause


async def test_a_pause_stands_when_the_call_returns_and_until_somebody_resumes(autojump_clock):
    world = await SettingsWorld.make("")
    pause = await world.writer.pause("works", ANN)
    assert pause == Pause("works", "ann", ANN.at_wall_s) == world.poller.pause
    assert await world.writer.resume(ANN) is True
    assert world.poller.pause is None
    assert await world.writer.resume(ANN) is False
    assert await events(world) == [("cluster.paused", "paused by ann: works"), ("cluster.resumed", "resumed by ann")]
