"""A bundle: one file by which a machine becomes a control plane that could reach nobody while it was set up."""

from __future__ import annotations

import json
import shlex
import signal
import stat
import tomllib
from contextlib import AbstractContextManager
from pathlib import Path

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.domain.errors import Invalid, Unavailable
from llmgw.domain.identity import MachineIdentity, MachineRole
from llmgw.domain.ids import ClusterId
from llmgw.identity.bundle import FORM, Bundle, parse_bundle, print_bundle
from llmgw.identity.ca import issue, make_ca, public_key_of
from llmgw.identity.join_tokens import JoinToken
from llmgw.settings.file_edit import with_keys
from llmgw.wiring import pending_join
from llmgw.wiring.join_command import prepare_by
from llmgw.wiring.joining import Joined
from llmgw.wiring.machine import RealMachine
from tests.identity.conftest import plane
from tests.identity.site import Site, llmgw
from tests.lease.places import write_credentials
from tests.programs import Program, free_port, program, wait_for
from tests.seaweed import ACCESS_KEY_ID, BUCKET, SECRET_ACCESS_KEY, Seaweed, seaweed

CA_MADE_WALL_S = 1_700_000_000.0
CA = make_ca("c-1", CA_MADE_WALL_S, "0a" * 8)
TOKEN = JoinToken("ab" * 32, MachineRole.SERVER, "ctl-2", CA.pin, ("https://ctl-1.example:8081",))
BUNDLE = Bundle("c-1", TOKEN, 4e9, "ctl-2.example", CA.pem, {"replica": "s3://bucket/p"}, 3, "[route]\nretries = 1\n")
WHOLE = print_bundle(BUNDLE).encode()


@given(st.builds(
    Bundle, st.just("c-1"), st.just(TOKEN), st.floats(0, 1e12), st.text(), st.just(CA.pem), st.dictionaries(st.text(), st.text()),
    st.integers(0, 2**53), st.text(st.characters(codec="utf-8")),
))  # fmt: skip
def test_what_is_written_is_read_back(bundle: Bundle) -> None:
    text = print_bundle(bundle)
    assert text.isascii()
    assert parse_bundle(text.encode(), "x") == bundle


@given(st.integers(0, len(WHOLE) - 1), st.integers(1, 255))
@settings(max_examples=500)
def test_a_bundle_with_any_byte_changed_is_refused(at: int, by: int) -> None:
    damaged = WHOLE[:at] + bytes([WHOLE[at] ^ by]) + WHOLE[at + 1 :]
    with pytest.raises(Invalid, match=r"^x "):
        parse_bundle(damaged, "x")


@given(st.integers(0, len(WHOLE) - 1))
def test_a_bundle_that_was_cut_or_has_more_behind_it_is_refused(at: int) -> None:
    for other in (WHOLE[:at], WHOLE + WHOLE[: at + 1]):
        with pytest.raises(Invalid, match=r"^x "):
            parse_bundle(other, "x")


def test_each_fault_of_a_bundle_is_told_as_what_it_is() -> None:
    newer = WHOLE.replace(b"bundle-%d " % FORM, b"bundle-%d " % (FORM + 1), 1)
    for data, words in ((b"", "is no bundle"), (b"\x00\xff", "is no bundle"), (newer, "of form 2"), (WHOLE[:-1], "is not whole")):
        with pytest.raises(Invalid, match=words):
            parse_bundle(data, "x")


class Cluster:
    """The first control plane on a bucket, and the place of a second one that cannot reach it yet."""

    def __init__(self, folder: Path, s3: Seaweed) -> None:
        self.folder, self.keys = folder, folder / "keys"
        write_credentials(self.keys, ACCESS_KEY_ID, SECRET_ACCESS_KEY)
        store = ("--store", f"s3://{BUCKET}/cluster", "--s3-endpoint", s3.endpoint, "--s3-credentials", f"file:{self.keys}")
        self.site = Site(folder, *store, lease="[lease]\nttl_s = 3\nrenew_s = 1\npoll_s = 0.3\n")
        self.config, self.data_dir, self.bundle = folder / "other.toml", folder / "other", folder / "ctl-2.bundle"
        self.url = f"https://127.0.0.3:{free_port()}"
        port = self.url.rpartition(":")[2]
        self.config.write_text(f'[server]\nadmin_listen = "127.0.0.1:{port}"  # kept\n[lease]\nttl_s = 3\nrenew_s = 1\npoll_s = 0.3\n')

    def first(self, name: str) -> AbstractContextManager[Program]:
        return program(["server", "--config", str(self.site.config)], self.folder, name)

    def init(self, *more: str):
        return llmgw("init", "--bundle", str(self.bundle), "--config", str(self.config), "--data-dir", str(self.data_dir), *more)

    def give_what_is_its_own(self) -> None:
        text = with_keys(self.config.read_text(), "store", {"s3_credentials": f"file:{self.keys}"})
        self.config.write_text(f'{text}[router]\nlisten = "127.0.0.3:{free_port()}"\n[tls]\nplain = "never"\n')


def test_a_control_plane_that_reached_nobody_while_it_was_set_up_joins_at_its_first_start(tmp_path: Path) -> None:
    bucket = tmp_path / "s3"
    bucket.mkdir()
    with seaweed(bucket) as s3:
        cluster = Cluster(tmp_path, s3)
        site, bundle, identity = cluster.site, cluster.bundle, cluster.data_dir / "identity"
        with cluster.first("first") as first:
            site.serves(first)
            assert site.ctl("ctl", "config", "set", "route.retries", "1", "--reason", "x").returncode == 0
            made = site.ctl("server", "add", "ctl-2", "--bundle", str(bundle), "--address", "127.0.0.3", "--expires", "1h")
            assert made.returncode == 0, made.stderr
            assert shlex.split(made.stdout) == ["sudo", "llmgw", "init", "--bundle", "ctl-2.bundle"]
            assert stat.S_IMODE(bundle.stat().st_mode) == 0o600
            before = bundle.read_bytes()
            again = site.ctl("server", "add", "ctl-2", "--bundle", str(bundle))
            assert (again.returncode, "is there already" in again.stderr, bundle.read_bytes() == before) == (4, True, True), again.stderr
            assert len([row for row in site.rows("server", "list", noun="machines").values() if row["state"] == "invited"]) == 1
        # Nobody answers now. A second time does no harm.
        token = json.loads(before.split(b"\n", 1)[1])["token"]
        for words in ("prepared the join of control plane ctl-2", "kept the join of control plane ctl-2"):
            done = cluster.init()
            assert done.returncode == 0, done.stderr
            assert words in done.stdout
            assert token not in done.stdout
        said = tomllib.loads(cluster.config.read_text())
        assert (said["server"]["advertise"], said["store"]["replica"]) == (cluster.url, f"s3://{BUCKET}/cluster")
        assert len(list(tmp_path.glob("other.toml.before-join*"))) == 1
        for secret in identity.iterdir():
            assert stat.S_IMODE(secret.stat().st_mode) == 0o600
        cluster.give_what_is_its_own()
        with program(["server", "--config", str(cluster.config)], tmp_path, "lonely") as lonely:
            lonely.wait_output("this machine has not joined yet")
            assert lonely.end(signal.SIGTERM) == 0
        with program(["server", "--config", str(cluster.config)], tmp_path, "second") as second:
            second.wait_output("this machine has not joined yet")
            with cluster.first("again") as first:
                second.wait_output("event=joined")
                site.serves(second)
                first.wait_output("a control plane stands by")
                assert not list(identity.glob("joining*"))
                assert site.rows("server", "list", noun="machines")["ctl-2"]["state"] == "valid"
                shown = site.ctl("ctl", "config", "get", "route.retries", url=cluster.url)
                assert shown.stdout == "route.retries = 1  (from the settings)\n", shown.stderr
                refused = cluster.init()
                assert (refused.returncode, "has joined already" in refused.stderr, refused.stderr.count("\n")) == (4, True, 1)
        for one in (first, second, lonely):
            assert token not in one.output
            assert "Traceback" not in one.output


def test_a_bundle_whose_token_was_used_or_revoked_ends_the_start_with_what_to_do(tmp_path: Path) -> None:
    bucket = tmp_path / "s3"
    bucket.mkdir()
    with seaweed(bucket) as s3:
        cluster = Cluster(tmp_path, s3)
        with cluster.first("first") as first:
            cluster.site.serves(first)
            made = cluster.site.ctl("server", "add", "ctl-2", "--bundle", str(cluster.bundle), "--address", "127.0.0.3", "--output", "json")
            told = json.loads(made.stdout)
            assert (told["bundle"], "token" in told) == (str(cluster.bundle), False)
            assert cluster.init().returncode == 0
            cluster.give_what_is_its_own()
            assert cluster.site.ctl("server", "rm", "ctl-2", "--yes").returncode == 0
            with program(["server", "--config", str(cluster.config)], tmp_path, "second") as second:
                wait_for(lambda: second.process.poll() is not None, "it ends")
                (line,) = [one for one in second.output.splitlines() if "is not let in" in one]
            assert "was revoked" in line
            assert "llmgw server add ctl-2 --bundle FILE" in line
            assert second.process.returncode == 5
            # Another bundle takes the place of the one that was of no use.
            cluster.bundle.unlink()
            made = cluster.site.ctl("server", "add", "ctl-2", "--bundle", str(cluster.bundle), "--address", "127.0.0.3")
            assert made.returncode == 0, made.stderr
            done = cluster.init()
            assert (done.returncode, "prepared" in done.stdout) == (0, True), done.stderr
            with program(["server", "--config", str(cluster.config)], tmp_path, "third") as third:
                cluster.site.serves(third)


def test_whatever_is_wrong_with_a_bundle_is_told_before_anything_is_written(tmp_path: Path) -> None:
    config, data_dir, file = tmp_path / "x.toml", tmp_path / "x", tmp_path / "b"
    base = ("init", "--bundle", str(file), "--config", str(config), "--data-dir", str(data_dir))

    def refused(text: str, words: str, *more: str, code: int = 3) -> None:
        file.write_text(text)
        done = llmgw(*base, *more)
        assert (done.returncode, words in done.stderr, "Traceback" in done.stderr) == (code, True, False), done.stderr
        assert not config.exists()
        assert not data_dir.exists()

    refused("hello", "is no bundle")
    refused(print_bundle(BUNDLE)[:-1], "is not whole")
    refused(print_bundle(attrs.evolve(BUNDLE, expires_wall_s=1.0)), "has expired", code=5)
    refused(print_bundle(attrs.evolve(BUNDLE, address="")), "say --address HOST")
    refused(print_bundle(BUNDLE), "--address: ", "--address", "no host")
    refused(print_bundle(attrs.evolve(BUNDLE, settings="[route]\nno_such_key = 1\n")), "no_such_key")
    for more in (("--role", "agent"), ("--new-admin-token",), ("--store", "none")):
        done = llmgw(*base, *more)
        assert (done.returncode, "--bundle says what this machine is to be" in done.stderr) == (2, True), done.stderr
    alone = llmgw("init", "--yes", "--config", str(config), "--address", "a.example")
    assert (alone.returncode, config.exists()) == (2, False)
    missing = llmgw("init", "--bundle", str(tmp_path / "none"), "--config", str(config))
    assert (missing.returncode, "there is no file" in missing.stderr) == (4, True)


def test_a_machine_that_is_a_control_plane_already_takes_no_bundle(tmp_path: Path) -> None:
    site = Site(tmp_path)
    file = tmp_path / "b"
    file.write_text(print_bundle(BUNDLE))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    refused = llmgw("init", "--bundle", str(file), "--config", str(site.config))
    assert (refused.returncode, "holds a CA already" in refused.stderr) == (4, True), refused.stderr
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


async def test_a_first_start_that_broke_off_after_it_was_let_in_asks_again_by_the_same_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: list[str] = []

    def let_in(token: JoinToken, name: str, addresses: list[str], others: str, key: str, ca_pem: str) -> Joined:
        keys.append(key)
        identity = MachineIdentity(ClusterId("c-1"), MachineRole.SERVER, name)
        issued = issue(CA, public_key_of(key), identity, tuple(addresses), CA_MADE_WALL_S, "0b" * 8)
        return Joined(name, token.role, "c-1", key, issued.pem, ca_pem, token.addresses, CA.key_pem, {})

    def fail(*given: object) -> None:
        raise Unavailable("the disk is full")

    machine, identity = RealMachine(), tmp_path / "data" / "identity"
    prepare_by(BUNDLE, tmp_path / "x.toml", "", tmp_path / "data")
    monkeypatch.setattr(pending_join, "join", let_in)
    for what in ("save_held", "forget"):
        with monkeypatch.context() as patch:
            patch.setattr(pending_join, what, fail)
            with pytest.raises(Unavailable):
                await pending_join.redeem(machine, tmp_path / "data", "")
    await pending_join.redeem(machine, tmp_path / "data", "")
    assert len(keys) == 3
    assert len(set(keys)) == 1
    assert (identity / "key.pem").read_text() == keys[0]
    assert not list(identity.glob("joining*"))
    await pending_join.redeem(machine, tmp_path / "data", "")  # nothing is left to be done
    assert len(keys) == 3


async def test_what_a_bundle_cannot_be_made_for_is_told_with_the_part_that_is_wrong(tmp_path: Path) -> None:
    server = {"role": "server", "name": "ctl-2"}
    wrong = [
        ({"role": "agent", "name": "gpu-1", "bundle": True}, "bundle"),
        ({"role": "server", "bundle": True}, "bundle"),
        ({**server, "bundle": "yes"}, "bundle"),
        ({**server, "address": "ctl-2.example"}, "address"),
        ({**server, "bundle": True, "address": "not a host"}, "address"),
        ({**server, "bundle": True, "address": 5}, "address"),
    ]
    async with plane(tmp_path) as one:
        for body, param in wrong:
            status, answer = await one.call("POST", "/api/v1/join-tokens", body)
            assert (status, answer["error"]["param"]) == (400, param), body
        assert (await one.call("GET", "/api/v1/join-tokens"))[1]["join-tokens"] == []
        status, answer = await one.call("POST", "/api/v1/join-tokens", {**server, "bundle": True})
        assert (status, answer["error"]["code"]) == (409, "no_replicated_store")
