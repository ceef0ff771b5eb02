"""Which server ctl talks to and which token it shows there: never a token to a server that it was not kept for."""

from __future__ import annotations

import os
from pathlib import Path

import attrs
import pytest

from llmgw.cli.ctl.places import Places, Target, find
from llmgw.domain.errors import Invalid, Unauthenticated, Unavailable
from llmgw.settings.running import hold
from tests.cli.fake_api import error, fake_api

CLOSED = "http://127.0.0.1:1"  # nothing listens on this port


@attrs.frozen
class Machine:
    """A machine's files."""

    places: Places

    def user(self, text: str) -> None:
        self.places.user_file.write_text(text)

    def dev(self, server: str, token: str, name: str = "dev") -> int:
        """As a running `llmgw dev` leaves it; whoever closes the descriptor has ended that process."""
        file = self.places.dev_dir / f"{name}.toml"
        self.places.dev_dir.mkdir(exist_ok=True)
        file.write_text(f'server = "{server}"\ntoken = "{token}"\nagent_token_file = "/x"\n')
        return hold(file)

    def admin_token(self, token: str, listen: str | None = None) -> None:
        (self.places.machine_dir / "admin-token").write_text(f"{token}\n")
        if listen:
            self.places.machine_file.write_text(f'[server]\nadmin_listen = "{listen}"\ndata_dir = "{self.places.machine_dir}"\n')

    def find(self, asked: str = "", token: str = "") -> Target:
        return find(asked, {"LLMGW_TOKEN": token}, self.places)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(Places(tmp_path / "user.toml", tmp_path / "running", tmp_path / "llmgw.toml", tmp_path))


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
        process = machine.dev(api.url, "dev")
        assert machine.find() == Target(api.url, "dev")
        assert machine.find(api.url.replace("127.0.0.1", "localhost")).token == "dev"
        machine.admin_token("machine")
        assert machine.find().token == "dev"
        os.close(process)  # killed: what it left behind counts no more, though somebody answers at that address
        assert machine.find() == Target("http://127.0.0.1:8081", "machine")
        with pytest.raises(Unauthenticated):
            machine.find(api.url)
    process = machine.dev(CLOSED, "dev")
    assert machine.find() == Target("http://127.0.0.1:8081", "machine")
    os.close(process)


def test_of_two_devs_each_is_found_by_its_address_and_without_one_both_are_named(machine: Machine):
    with fake_api() as one, fake_api() as other:
        processes = [machine.dev(one.url, "first", "1"), machine.dev(other.url, "second", "2")]
        assert machine.find(one.url) == Target(one.url, "first")
        assert machine.find(other.url) == Target(other.url, "second")
        with pytest.raises(Invalid, match=f"several `llmgw dev` run here: {one.url}, {other.url}; --server names one of them"):
            machine.find()
        os.close(processes[0])
        assert machine.find() == Target(other.url, "second")
        os.close(processes[1])


@pytest.mark.parametrize(
    ("more", "folder", "target"),
    [
        ("", "", ("https://127.0.0.1:9", True)),
        ("[store]\n", "", ("https://127.0.0.1:9", True)),
        ('[store]\npath = "../shared/llmgw.db"\n', "../shared", ("https://127.0.0.1:9", True)),
        ('[store]\nreplica = "s3://b/p"\n', "", ("https://127.0.0.1:9", True)),
        ('[tls]\nplain = "anywhere"\n', "", ("http://127.0.0.1:9", False)),
        ('[tls]\ncertificate = "/a"\nkey = "/b"\n', "", ("https://127.0.0.1:9", False)),
    ],
)
def test_one_that_speaks_tls_is_asked_so_and_checked_by_the_clusters_ca(machine: Machine, more: str, folder: str, target):
    machine.admin_token("machine", "0.0.0.0:9")
    with machine.places.machine_file.open("a") as file:
        file.write(more)
    ca = machine.places.machine_dir / folder / "ca" / "ca.pem"
    ca.parent.mkdir(parents=True)
    ca.write_text("PEM")
    found = machine.find()
    assert (found.server, found.ca != "") == target
    assert not found.ca or ca.samefile(found.ca)


def test_a_file_of_certificates_may_be_named_for_any_server(machine: Machine):
    found = find("https://far:1", {"LLMGW_TOKEN": "t", "LLMGW_CA": "/ca.pem"}, machine.places)
    assert (found.server, found.ca) == ("https://far:1", "/ca.pem")


def test_this_machines_control_plane_is_found_where_its_file_says(machine: Machine):
    machine.admin_token("machine", "127.0.0.1:9")
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
