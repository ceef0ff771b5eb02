"""Real processes: the guard of a control plane's file in its own router, in one that follows it, and in that one by itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.test_following import FollowedSite
from tests.chaos.test_processes import Site
from tests.programs import chat, wait_for

pytestmark = pytest.mark.slow
RULE = '[[guard.rule]]\nname = "r"\nwords = ["heron"]\n'


def guarded(one: Site) -> Site:
    server = one.folder / "server.toml"
    server.write_text(server.read_text() + RULE)
    return one


@pytest.fixture
def embedded(tmp_path: Path) -> Iterator[Site]:
    one = Site(tmp_path)
    yield guarded(one)
    one.close()


@pytest.fixture
def followed(tmp_path: Path) -> Iterator[FollowedSite]:
    one = FollowedSite(tmp_path)
    guarded(one)
    yield one
    one.close()


def code(address: str, text: str) -> str | None:
    """The code of the answer for a model without a replica, which what passes the guard gets as well."""
    return chat(address, "a", text)[1].get("error", {}).get("code")  # type: ignore[no-any-return]


def test_a_control_planes_own_router_obeys_its_guard(embedded: Site) -> None:
    embedded.start_server()
    embedded.admin.apply(embedded.model("a"))
    wait_for(lambda: code(embedded.address, "heron") == "guard_blocked", "the guard holds")
    assert code(embedded.address, "egret") not in (None, "guard_blocked", "model_not_found")


def test_a_router_that_follows_obeys_the_guard_also_after_its_own_restart_without_a_control_plane(followed: FollowedSite) -> None:
    server = followed.start_server()
    router = followed.start_router()
    followed.admin.apply(followed.model("a"))
    wait_for(lambda: code(followed.address, "heron") == "guard_blocked", "the guard is pushed")
    assert code(followed.address, "egret") not in (None, "guard_blocked", "model_not_found")
    wait_for(lambda: '"heron"' in (followed.folder / "router" / "pushed.json").read_text(), "on disk")
    server.kill()
    assert code(followed.address, "heron") == "guard_blocked"
    assert router.end() == 0
    followed.start_router()
    assert code(followed.address, "heron") == "guard_blocked"
    assert code(followed.address, "egret") not in (None, "guard_blocked", "model_not_found")
