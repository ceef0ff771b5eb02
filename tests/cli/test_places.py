"""Which server ctl talks to and which token it shows there: never a token to a server that it was not kept for."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from llmgw.cli.ctl.places import Places, Target, find
from llmgw.domain.errors import Invalid, Unauthenticated, Unavailable
from tests.cli.fake_api import error, fake_api

CLOSED = "http://127.0.0.1:1"  # nothing listens on this port


@attrs.frozen
class Machine:
    """A machine's files."""

    places: Places

    def user(self, text: str) -> None:
        self.places.user_file.write_text(text)

    def dev(self, server: str, token: str) -> None:
        self.places.dev_file.write_text(f'server = "{server}"\ntoken = "{token}"\n')

    def admin_token(self, token: str, listen: str | None = None) -> None:
        (self.places.machine_dir / "admin-token").write_text(f"{token}\n")
        if listen:
            self.places.machine_file.write_text(f'[server]\nadmin_listen = "{listen}"\ndata_dir = "{self.places.machine_dir}"\n')

    def find(self, asked: str = "", token: str = "") -> Target:
        return find(asked, {"LLMGW_TOKEN": token}, self.places)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(Places(tmp_path / "user.toml", tmp_path / "dev.toml", tmp_path / "llmgw.toml", tmp_path))


def test_a_flag_and_the_environment_go_first(machine: Machine):
    machine.user('server = "https://u"\ntoken = "user"')
    assert machine.find("https://a/", "env") == Target("https://a", "env")
    assert machine.find("", "env") == Target("https://u", "env")
    assert machine.find() == Target("https://u", "user")


def test_a_kept_token_is_not_shown_to_another_server(machine: Machine):
    machine.user('server = "https://u"\ntoken = "user"\nca = "/ca"')
    with pytest.raises(Unauthenticated, match="no token for https://a: set LLMGW_TOKEN"):
        machine.find("https://a")
    assert machine.find("https://U:443/") == Target("https://U:443", "user", "/ca")
    with pytest.raises(Unauthenticated):
        machine.find("http://u")


def test_a_running_dev_is_found_and_a_dead_one_is_not(machine: Machine):
    with fake_api() as api:
        machine.dev(api.url, "dev")
        assert machine.find() == Target(api.url, "dev")
        assert machine.find(api.url.replace("127.0.0.1", "localhost")).token == "dev"
        machine.admin_token("machine")
        assert machine.find().token == "dev"
    machine.dev(CLOSED, "dev")
    assert machine.find() == Target("http://127.0.0.1:8081", "machine")


def test_this_machines_control_plane_is_found_where_its_file_says(machine: Machine):
    machine.admin_token("machine", "0.0.0.0:9")
    assert machine.find() == Target("http://127.0.0.1:9", "machine")
    assert machine.find("http://localhost:9").token == "machine"
    with pytest.raises(Unavailable, match="nothing answers at http://localhost:1"):
        machine.find("http://localhost:1")


def test_the_machines_token_is_not_shown_to_another_local_server(machine: Machine):
    machine.admin_token("machine", "127.0.0.1:9")
    with fake_api() as api, pytest.raises(Unauthenticated):
        machine.find(api.url)


def test_with_nothing_to_go_by_ctl_says_what_is_missing(machine: Machine):
    machine.admin_token("", "127.0.0.1:1")
    with pytest.raises(Unavailable, match=r"is a control plane running here\?"):
        machine.find()


def test_the_port_of_a_router_is_told_as_such_before_a_token_is_asked_for(machine: Machine):
    with fake_api() as router:
        router.unauthenticated = error(404, "this is a router's port", "router_port")
        with pytest.raises(Invalid, match=r"http://127\.0\.0\.1:\d+ is a router's port and no admin API: name the control plane's"):
            machine.find(router.url)
        assert [request.headers.get("authorization") for request in router.requests] == [None]
    with fake_api() as api, pytest.raises(Unauthenticated):
        machine.find(api.url)


def test_a_broken_file_or_address_is_an_error(machine: Machine):
    with pytest.raises(Invalid, match="--server: expected an http"):
        machine.find("ctl-1:8081")
    machine.user("server = ")
    with pytest.raises(Invalid, match=r"user\.toml is not TOML at its end: a value is missing"):
        machine.find()
    machine.user("server = 3")
    with pytest.raises(Invalid, match="server: expected a string, not a whole number"):
        machine.find()
    machine.user('server = "nonsense"')
    with pytest.raises(Invalid, match="server: expected an http"):
        machine.find()


def test_a_token_never_shows_in_a_repr(machine: Machine):
    assert "s3cret" not in repr(machine.find("http://h", "s3cret"))
