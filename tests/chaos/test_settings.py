"""Cluster settings, as real processes under load: what is live is everywhere at once, what takes a restart goes round one by one,
and what breaks a control plane is taken back, while no request fails and no engine moves.

The short form is part of `make test`; `make chaos` waits as long as the field does. Nothing is asserted by time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import altered
from tests.chaos.planes import FULL, MODEL, Plane, Site, figure, since
from tests.programs import Admin, chat, wait_for

pytestmark = pytest.mark.slow

LEASE = {"ttl_s": 15.0, "renew_s": 5.0, "poll_s": 1.0} if FULL else {"ttl_s": 6.0, "renew_s": 1.0, "poll_s": 0.3}
DELAY_S = 30 if FULL else 5  # of the leader's restart, after its successor was confirmed
TIMEOUT_S = 120 if FULL else 20


class SettingsSite(Site):
    """A site whose control planes are altered, as `tests/chaos/altered.py` knows it: all of them, or `only` one."""

    def __init__(self, folder: Path, altered: str = "", only: str = "") -> None:
        super().__init__(folder, **LEASE)
        for plane in self.planes.values():
            with plane.file.open("a") as file:
                file.write(f"[rollout]\nleader_delay_s = {DELAY_S}\nstandby_timeout_s = {TIMEOUT_S}\n")
            if altered and only in ("", plane.name):
                plane.altered = (altered,)

    def settings(self, plane: Plane | None = None) -> dict[str, Any]:
        return (plane or self.leader()).admin("GET", "/settings")

    def change(self, reason: str = "", **keys: Any) -> int:
        """Sets dotted keys (`__` for the dot); the version that says so."""
        before = self.settings()
        given = {name.replace("__", "."): value for name, value in keys.items()}
        answer = self.leader().admin("PATCH", "/settings", {"set": given, "reason": reason}, **{"if-match": f'"{before["version"]}"'})
        return int(answer["version"])

    def planes_say(self) -> dict[str, dict[str, Any]]:
        """What the leader knows of each control plane, by name."""
        return {one["name"]: one for one in self.settings()["control_planes"]}

    def wait_applied(self, version: int) -> None:
        def applied() -> bool:
            said = self.planes_say()
            return len(said) == len(self.planes) and all(one["applied"] == version for one in said.values())

        wait_for(applied, f"every control plane runs version {version}; {self.planes_say()}", limit_s=DELAY_S + TIMEOUT_S + 60)

    def pids(self) -> dict[str, int]:
        return {name: plane.program.process.pid for name, plane in self.planes.items()}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SettingsSite]:
    site = SettingsSite(tmp_path_factory.mktemp("settings"))
    try:
        site.start_all()
        yield site
    finally:
        site.close()


def rollout_events(site: SettingsSite) -> list[str]:
    return [event["kind"] for event in site.leader().admin.events("rollout.")]


def refused(address: str) -> bool:
    """Is a prompt of three messages refused there?"""
    messages = [{"role": "user", "content": "hi"}] * 3
    status, answer = chat(address, MODEL, messages=messages)
    assert status in (200, 400), answer
    return status == 400


def test_a_guard_limit_is_in_force_in_every_router_at_once_and_its_roll_back_too(
    site: SettingsSite, request: pytest.FixtureRequest
) -> None:
    routers = [site.address, *(f"127.0.0.1:{plane.router_port}" for plane in site.planes.values())]
    site.wait_whole()
    for router in routers:
        wait_for(lambda at=router: not refused(at), "it is served at first")
    with site.undisturbed():
        begun_s = time.monotonic()
        version = site.change("a test", guard__max_messages=2)
        for router in routers:
            wait_for(lambda at=router: refused(at), "the limit is in force")
        took_s = since(begun_s)
        site.wait_applied(version)
        leader = site.leader().admin
        answer = leader("POST", "/settings/rollback", {"version": version - 1, "reason": "back"}, **{"if-match": f'"{version}"'})
        assert answer["version"] == version + 1
        for router in routers:
            wait_for(lambda at=router: not refused(at), "it is served again")
    history = site.leader().admin("GET", "/settings/history")["versions"]
    assert [(one["version"], one["reason"]) for one in history[:2]] == [(version + 1, "back"), (version, "a test")]
    figure(request, "live settings change in force in two embedded routers and a separate one after", f"{took_s:.2f} s")


def test_a_change_that_takes_a_restart_goes_round_with_the_leader_last_and_nobody_notices(
    site: SettingsSite, request: pytest.FixtureRequest
) -> None:
    site.wait_whole()
    led = site.leader()
    standby = site.other(led)
    marks = {name: len(plane.output) for name, plane in site.planes.items()}
    pids = site.pids()
    begun_s = time.monotonic()
    with site.undisturbed():
        version = site.change("slower", lease__renew_s=LEASE["renew_s"] * 0.9)
        site.wait_applied(version)
    took_s = since(begun_s)
    assert site.pids() == pids  # without a supervisor each becomes its successor in place
    assert len(standby.log_of("event=restarting", marks[standby.name])) == 1
    assert len(led.log_of("event=restarting", marks[led.name])) == 1
    assert stamp(standby.log_of("event=serving", marks[standby.name])[0]) < stamp(led.log_of("event=restarting", marks[led.name])[0])
    wait_for(lambda: site.settings()["rollout"]["phase"] == "idle", "the roll-out is over")
    told = wait_for(lambda: (now := rollout_events(site))[-1] == "rollout.done" and now, "the history says so")
    assert told[-2:] == ["rollout.begun", "rollout.done"]
    figure(request, f"restart change round two control planes (leader_delay_s {DELAY_S})", f"{took_s:.1f} s")


def test_a_changed_machine_file_restarts_that_control_plane_alone(site: SettingsSite) -> None:
    site.wait_whole()
    standby = site.other(site.leader())
    marks = {name: len(plane.output) for name, plane in site.planes.items()}
    text = standby.file.read_text()
    with site.undisturbed():
        standby.file.write_text(text + '[log]\nlevel = "debug"\n')
        wait_for(lambda: standby.log_of("level=debug", marks[standby.name]), "it runs with the new level")
    other = site.other(standby)
    assert not other.log_of("event=restarting", marks[other.name])
    standby.file.write_text("[log\n")
    wait_for(lambda: standby.log_of("the changed file was not taken", marks[standby.name]), "a broken file is refused")
    standby.file.write_text(text)
    site.wait_whole()


def stamp(line: str) -> str:
    return line.split("timestamp=", 1)[1].split(" ", 1)[0] if "timestamp=" in line else line.split(" ", 1)[0]


def started(folder: Path, altered: str, only: str = "") -> SettingsSite:
    site = SettingsSite(folder, altered, only)
    site.start_all()
    return site


def test_a_version_that_one_machine_does_not_know_is_refused_there_and_in_force_elsewhere(tmp_path: Path) -> None:
    site = started(tmp_path, "knows-one-key-less", "ctl-b")
    try:
        version = site.change("new key", route__retries=altered.RETRIES_UNKNOWN)
        wait_for(lambda: site.planes_say()["ctl-a"]["applied"] == version, "the other machine runs it")
        said = wait_for(lambda: (one := site.planes_say()["ctl-b"])["refused"] == version and one, "it is refused on one machine")
        assert (said["applied"], "route.retries" in said["why"]) == (version - 1, True)

        def newest() -> dict[str, Any]:
            return site.leader().admin("GET", "/settings/history")["versions"][0]

        # The history is read from the store, which the leader writes a moment after it has heard of it.
        wait_for(lambda: [one["name"] for one in newest()["refused_by"]] == ["ctl-b"], "the history names who refused it")
        assert newest()["applied_by"] == ["ctl-a"]
    finally:
        site.close()


def test_a_version_that_breaks_while_starting_stops_at_the_standby_with_the_leader_untouched(tmp_path: Path) -> None:
    site = started(tmp_path, "dies-starting")
    try:
        led = site.leader()
        standby = site.other(led)
        mark = len(led.output)
        with site.undisturbed():
            version = site.change("a bomb", lease__poll_s=altered.POLL_STARTING_S)
            # Nobody brings a process without a supervisor back; here the test is the supervisor.
            for _ in range(2):
                wait_for(lambda: standby.program.process.poll() is not None, "it died of it")
                standby.start()
            standby.wait_serving()
            frozen = wait_for(lambda: (now := site.settings())["rollout"]["phase"] == "frozen" and now, "the roll-out is frozen")
            assert frozen["held"]
            assert frozen["desired"] == version - 1
            site.wait_applied(version - 1)
        assert site.leader() is led
        assert not led.log_of("event=restarting", mark)
        assert f"version {version}" in frozen["rollout"]["reason"]
        site.change("better", lease__poll_s=LEASE["poll_s"])
        wait_for(lambda: site.settings()["rollout"]["phase"] == "idle", "the next version ends it")
    finally:
        site.close()


def test_a_version_that_breaks_only_while_leading_is_taken_back(tmp_path: Path) -> None:
    site = started(tmp_path, "dies-leading")
    try:
        led = site.leader()
        successor = site.other(led)
        with site.undisturbed():
            version = site.change("a bomb", lease__poll_s=altered.POLL_LEADING_S)
            wait_for(lambda: successor.program.process.poll() is not None, "it died of leading", limit_s=TIMEOUT_S + DELAY_S + 60)

            def settled() -> dict[str, Any] | None:
                """The test is the supervisor: whoever comes back before the other has looked leads once more, and dies of it again."""
                if successor.program.process.poll() is not None:
                    successor.start()
                now = site.settings()
                planes = {one["name"]: one["applied"] for one in now["control_planes"]}
                frozen = now["rollout"]["phase"] == "frozen" and now["held"]
                return now if frozen and planes == dict.fromkeys(site.planes, version - 1) else None

            frozen = wait_for(settled, "the version is held, and both are back at the one before", limit_s=TIMEOUT_S + DELAY_S + 60)
        assert f"version {version}" in frozen["rollout"]["reason"]
    finally:
        site.close()


def test_two_editors_at_both_control_planes_lose_nothing(site: SettingsSite) -> None:
    site.wait_whole()
    before = site.settings()["version"]
    admins: list[Admin] = [plane.admin for plane in site.planes.values()]
    won = 0
    for number in range(10):
        base = site.settings()["version"]
        answers = []
        for index, admin in enumerate(admins):
            body = {"set": {"route.retries": (number + index) % 3}, "reason": f"editor {index}"}
            answers.append(_status(admin, body, base))
        won += answers.count(200)
        assert answers[0] == 200
        assert answers[1] in (200, 412)
    after = site.settings()["version"]
    assert after - before <= won
    versions = [site.leader().admin("GET", f"/settings/versions/{number}") for number in range(1, after + 1)]
    assert [(one["version"], one["parent"]) for one in versions] == [(number, number - 1) for number in range(1, after + 1)]


def _status(admin: Admin, body: Any, base: int) -> int:
    from tests.programs import call

    headers = {**admin.headers, "if-match": f'"{base}"', "idempotency-key": f"k-{json.dumps(body)}-{base}".replace(" ", "")}
    return call(admin.address, "PATCH", "/api/v1/settings", body, headers)[0]
