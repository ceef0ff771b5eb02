"""Which settings a process acts on: what it takes at once, what waits for its restart, and what it says of itself."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.control.settings_in_force import PROTECT, Protect, Read, SettingsInForce, newest_loadable, read_version
from llmgw.domain.errors import Invalid
from llmgw.domain.settings_version import PlaneSettings, SettingsVersion
from llmgw.settings.document import document_of, restart_keys
from llmgw.settings.load import Loaded, load_text
from tests.control.settings_world import what
from tests.settings.strategies import cluster_values


def file(text: str = "") -> Loaded:
    return load_text(text, source="f")


def version(number: int, text: str) -> SettingsVersion:
    document = document_of(load_text(text, source="t").cluster_values, "t")
    return SettingsVersion(number, number - 1, document.text, document.sha256)


def begun(number: int, text: str, own: str = "", **options) -> SettingsInForce:
    mine = file(own)
    return SettingsInForce(mine, read_version(version(number, text), mine), **options)


def take(in_force: SettingsInForce, number: int, text: str) -> tuple[str, ...]:
    return in_force.take(in_force.reads(version(number, text)))


def test_a_live_key_is_in_force_at_once_and_the_version_applied() -> None:
    in_force = begun(1, "")
    assert take(in_force, 2, "route.retries = 5") == ()
    assert in_force.settings.route.retries == 5
    assert what(in_force, 3.21) == PlaneSettings(live=2, applied=2, up_s=3.2)


def test_a_key_that_needs_a_restart_waits_and_the_live_ones_beside_it_do_not() -> None:
    in_force = begun(1, "")
    assert take(in_force, 2, "route.retries = 5\nlease.ttl_s = 30") == ("lease.ttl_s",)
    assert (in_force.settings.route.retries, in_force.settings.lease.ttl_s) == (5, 15)
    assert what(in_force, 0) == PlaneSettings(live=2, applied=1, pending=2)


def test_a_pending_key_taken_back_leaves_nothing_to_wait_for() -> None:
    in_force = begun(1, "")
    take(in_force, 2, "lease.ttl_s = 30")
    assert take(in_force, 3, "route.retries = 5") == ()
    assert what(in_force, 0) == PlaneSettings(live=3, applied=3)


def test_what_waits_is_judged_by_what_the_process_started_with() -> None:
    in_force = begun(1, "lease.ttl_s = 20")
    assert take(in_force, 2, "lease.ttl_s = 30") == ("lease.ttl_s",)
    assert take(in_force, 3, "lease.ttl_s = 30\nroute.retries = 5") == ("lease.ttl_s",)
    assert in_force.settings.lease.ttl_s == 20
    assert what(in_force, 0) == PlaneSettings(live=3, applied=1, pending=3)


def test_a_lone_control_plane_without_a_lease_waits_for_nothing() -> None:
    in_force = begun(1, "", settles_alone=True)
    assert take(in_force, 2, "lease.ttl_s = 30") == ()
    assert what(in_force, 0) == PlaneSettings(live=2, applied=2)
    assert in_force.settings.lease.ttl_s == 30


def test_a_version_that_is_refused_leaves_what_is_in_force() -> None:
    in_force = begun(1, "route.retries = 5")
    before = in_force.settings
    with pytest.raises(Invalid):
        in_force.reads(SettingsVersion(2, 1, "lease.ttl_s = 1", document_of({}, "t").sha256))
    in_force.refuse(2, "why")
    assert in_force.settings is before
    assert what(in_force, 0) == PlaneSettings(live=1, applied=1, refused=2, why="why")


@pytest.mark.parametrize(("taken", "refused"), [(1, 2), (2, 0), (3, 0)])
def test_a_refusal_is_told_until_that_version_or_a_newer_one_is_taken(taken: int, refused: int) -> None:
    in_force = begun(1, "")
    in_force.refuse(2, "why")
    take(in_force, taken, "route.retries = 3")
    assert (in_force.refused, bool(in_force.why)) == (refused, bool(refused))


def test_a_document_that_is_not_what_was_written_is_not_read() -> None:
    damaged = attrs.evolve(version(2, "route.retries = 5"), document="[route]\nretries = 6\n")
    with pytest.raises(Invalid, match="version 2 is not what was written") as caught:
        read_version(damaged, file())
    assert caught.value.code == "damaged_version"
    assert read_version(damaged, file(), Protect(check_digest=False)).settings.route.retries == 6


def test_a_version_with_a_machines_key_does_not_load() -> None:
    text = 'server.name = "x"'
    stored = SettingsVersion(2, 1, text, document_of({}, "t").sha256)
    with pytest.raises(Invalid, match=r"settings version 2 is not valid:\n.*server"):
        read_version(stored, file(), attrs.evolve(PROTECT, check_digest=False))


def test_the_newest_version_that_loads_and_may_be_used_is_found_and_what_was_passed_over_is_told() -> None:
    damaged = attrs.evolve(version(4, ""), sha256="0" * 64)
    versions = (version(5, "route.retries = 5"), damaged, version(3, "route.retries = 3"), version(2, ""))
    read, passed = newest_loadable(versions, lambda number: "held" if number == 5 else "", file('server.name = "x"'))
    assert read is not None
    assert (read.version.version, read.settings.route.retries, read.settings.server.name) == (3, 3, "x")
    assert [number for number, _ in passed] == [5, 4]
    assert passed[0][1] == "held"
    assert newest_loadable((damaged,), lambda number: "", file())[0] is None
    assert newest_loadable((), lambda number: "", file()) == (None, ())


# --- the machine's file


def test_without_a_document_the_files_cluster_keys_are_in_force_at_once() -> None:
    in_force = SettingsInForce(file("route.retries = 2"))
    assert in_force.take_file(file("route.retries = 5")) == ()
    assert in_force.settings.route.retries == 5
    assert what(in_force, 0) == PlaneSettings()


def test_with_a_document_a_cluster_key_of_the_file_changes_nothing() -> None:
    in_force = begun(1, "route.retries = 3")
    assert in_force.take_file(file("route.retries = 5")) == ()
    assert in_force.settings.route.retries == 3


def test_a_machine_key_waits_for_a_restart_and_stays_until_then() -> None:
    in_force = begun(1, "", 'server.name = "a"')
    assert in_force.take_file(file('server.name = "b"\nrouter.listen = "127.0.0.1:9"')) == ("server.name", "router.listen")
    assert in_force.settings.server.name == "a"
    assert in_force.said(0).restart_for_file is True
    take(in_force, 2, "route.retries = 5")
    assert (in_force.settings.server.name, in_force.settings.route.retries) == ("a", 5)
    assert in_force.said(0).restart_for_file is True
    assert in_force.take_file(file('server.name = "a"')) == ()
    assert in_force.said(0).restart_for_file is False


@pytest.mark.parametrize(
    "own", ['agent.name = "n"', "router.workers = 3", 'router.control_planes = ["http://h:1"]', 'agent.labels = {a = "b"}']
)
def test_a_key_of_an_agent_or_of_a_router_of_its_own_restarts_no_control_plane(own: str) -> None:
    in_force = begun(1, "", "router.embedded = false")
    assert in_force.take_file(file(f"router.embedded = false\n{own}")) == ()
    assert in_force.restart_for_file == ()


def test_where_the_router_runs_in_this_process_its_keys_restart_it() -> None:
    assert begun(1, "").take_file(file("router.cors_origins = ['*']")) == ("router.cors_origins",)
    assert begun(1, "").take_file(file("router.embedded = false")) == ("router.embedded",)
    assert begun(1, "", "router.embedded = false").take_file(file("router.embedded = true")) == ("router.embedded",)


def test_the_address_of_a_separate_router_concerns_the_control_plane_whose_console_asks_it() -> None:
    in_force = begun(1, "", "router.embedded = false")
    assert in_force.take_file(file('router.embedded = false\nrouter.listen = "127.0.0.1:9"')) == ("router.listen",)


def test_a_changed_file_takes_no_pending_key_of_the_document_with_it() -> None:
    in_force = begun(1, "")
    take(in_force, 2, "lease.ttl_s = 30\nroute.retries = 5")
    in_force.take_file(file("events.keep_days = 3"))
    assert (in_force.settings.lease.ttl_s, in_force.settings.route.retries) == (15, 5)
    assert what(in_force, 0) == PlaneSettings(live=2, applied=1, pending=2)


def test_a_lone_control_plane_on_its_file_keeps_its_lease_timings_of_no_concern() -> None:
    in_force = SettingsInForce(file("lease.ttl_s = 20"), settles_alone=True)
    in_force.take_file(file("lease.ttl_s = 30"))
    assert in_force.settings.lease.ttl_s == 30
    assert what(in_force, 0) == PlaneSettings()


documents = cluster_values().map(lambda values: document_of(values, "t"))


@settings(deadline=None, max_examples=100)
@given(st.lists(documents, min_size=1, max_size=5))
def test_whatever_versions_come_live_keys_are_the_newest_ones_and_restart_keys_those_of_the_start(found) -> None:
    mine = file('server.name = "x"')
    versions = [SettingsVersion(number, number - 1, one.text, one.sha256) for number, one in enumerate(found, 1)]
    in_force = SettingsInForce(mine, read_version(versions[0], mine))
    for stored, document in zip(versions[1:], found[1:], strict=True):
        waits = in_force.take(in_force.reads(stored))
        assert in_force.settings.lease == found[0].settings.lease
        assert attrs.evolve(in_force.settings, lease=document.settings.lease, server=document.settings.server) == document.settings
        assert waits == restart_keys(found[0].settings, document.settings)
        assert (in_force.applied == stored.version) == (not waits)
        assert in_force.pending == (stored.version if waits else 0)
        assert in_force.live == stored.version
        assert in_force.settings.server.name == "x"
    assert isinstance(in_force.read, Read)
