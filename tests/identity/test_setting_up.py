"""`init`, `join`, `node`, `server` and `router` add, list, rm: as a person types them, against real processes."""

from __future__ import annotations

import signal
import stat
import time
import tomllib
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.domain.errors import Conflict, Unavailable
from llmgw.domain.identity import MachineIdentity, MachineRole
from llmgw.domain.ids import ClusterId
from llmgw.identity import ca
from llmgw.identity.ca import Authority
from llmgw.identity.join_tokens import JoinToken, parse_token
from llmgw.settings.file_edit import with_keys
from llmgw.settings.load import load_file
from llmgw.wiring import join_command, pending_join, setting_up, setup_files
from llmgw.wiring.joining import Joined
from tests.identity.site import HOST, Site, llmgw
from tests.lease.places import write_credentials
from tests.programs import free_port, free_ports, program, wait_for
from tests.seaweed import ACCESS_KEY_ID, BUCKET, SECRET_ACCESS_KEY, seaweed


@pytest.fixture
def authority() -> Authority:
    return ca.make_ca("c-1", time.time(), "0a" * 8)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_init_makes_a_file_that_checks_a_ca_and_a_token_and_changes_nothing_when_it_is_run_again(site: Site):
    assert "made the CA of cluster c-" in site.said
    key, token = site.data_dir / "ca" / "ca.key", site.data_dir / "admin-token"
    for secret in (key, token):
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert llmgw("check", str(site.config)).returncode == 0
    before = {path: path.read_bytes() for path in site.folder.rglob("*") if path.is_file()}
    again = llmgw("init", "--yes", "--config", str(site.config))
    assert again.returncode == 0, again.stderr
    assert "kept" in again.stdout
    assert {path: path.read_bytes() for path in site.folder.rglob("*") if path.is_file()} == before
    refused = llmgw("init", "--yes", "--config", str(site.config), "--name", "other")
    assert refused.returncode == 2
    assert "is not overwritten" in refused.stderr
    assert token.read_text().strip() not in site.said + again.stdout


def test_without_a_terminal_nothing_is_written_or_removed_unless_yes_is_said(tmp_path: Path):
    config = tmp_path / "x.toml"
    refused = llmgw("init", "--config", str(config), "--data-dir", str(tmp_path / "x"))
    assert (refused.returncode, "say --yes" in refused.stderr) == (2, True)
    assert list(tmp_path.iterdir()) == []
    for noun in ("node", "router", "server"):  # before anybody is asked: nothing listens at that address
        refused = llmgw(noun, "rm", "a", "--server", "http://127.0.0.1:1", LLMGW_TOKEN="t")
        assert (refused.returncode, "say --yes" in refused.stderr) == (2, True), refused.stderr


def test_init_writes_no_file_where_the_data_directory_cannot_be_made(tmp_path: Path):
    config = tmp_path / "x.toml"
    (tmp_path / "file").write_text("")
    refused = llmgw("init", "--yes", "--config", str(config), "--data-dir", str(tmp_path / "file" / "data"))
    assert (refused.returncode, "the data directory" in refused.stderr, refused.stderr.count("\n")) == (3, True, 1), refused.stderr
    assert not config.exists()


def test_init_of_a_router_listens_where_it_was_told_and_an_agent_nowhere(tmp_path: Path):
    config = tmp_path / "x.toml"
    given = ("init", "--yes", "--config", str(config), "--listen", "127.0.0.1:9090", "--role")
    refused = llmgw(*given, "agent")
    assert (refused.returncode, config.exists()) == (2, False)
    assert llmgw(*given, "router").returncode == 0
    assert tomllib.loads(config.read_text())["router"]["listen"] == "127.0.0.1:9090"


def test_an_agent_and_a_router_on_other_machines_join_by_one_command_and_leave_by_one(site: Site):
    folder = site.folder
    with program(["server", "--config", str(site.config)], folder, "server") as server:
        site.serves(server)
        token = site.added("node", "add", "gpu-1")
        assert site.rows("node", "list", noun="machines")["gpu-1"]["state"] == "invited"
        agent_file, router_file = folder / "agent.toml", folder / "router.toml"
        joined = llmgw("join", "--config", str(agent_file), "--data-dir", str(folder / "agent"), "--address", "127.0.0.3", stdin=token)
        assert joined.returncode == 0, joined.stderr
        assert "as agent gpu-1" in joined.stdout
        written = tomllib.loads(agent_file.read_text())["agent"]
        assert (written["name"], written["control_planes"], written["address"]) == ("gpu-1", [site.url], "127.0.0.3")
        agent_file.write_text(agent_file.read_text() + f'engine_ports = "{free_ports(5)}"\n')
        router_file.write_text(f'# mine\n[router]\nlisten = "127.0.0.1:{free_port()}"  # here\ncontrol_planes = []\n')
        as_router = llmgw(
            "join", "--config", str(router_file), "--data-dir", str(folder / "router"), stdin=site.added("router", "add", "r-1")
        )
        assert as_router.returncode == 0, as_router.stderr
        assert router_file.read_text().startswith("# mine\n[router]\n")
        assert (folder / "router.toml.before-join").read_text().endswith("control_planes = []\n")
        reused = llmgw("join", "--config", str(folder / "x.toml"), "--data-dir", str(folder / "x"), stdin=token)
        assert (reused.returncode, reused.stderr.count("\n")) == (5, 1)
        assert "has let in gpu-1 already" in reused.stderr
        assert token not in reused.stderr
        assert not (folder / "x.toml").exists()
        with (
            program(["agent", "--config", str(agent_file)], folder, "agent") as agent,
            program(["router", "--config", str(router_file)], folder, "router"),
        ):
            wait_for(lambda: site.rows("ctl", "node", "list", noun="nodes").get("gpu-1", {}).get("state") == "ready", "the node is ready")
            wait_for(lambda: "router session opened" in server.output, "the router follows")
            gone = site.ctl("node", "rm", "gpu-1", "--yes")
            assert gone.returncode == 0, gone.stderr
            assert gone.stdout == "node gpu-1: removed (1 certificate revoked)\n"
            agent.wait_output("was revoked")
            wait_for(lambda: not site.rows("ctl", "node", "list", noun="nodes"), "the node is forgotten")
            assert site.rows("node", "list", noun="machines")["gpu-1"]["state"] == "revoked"
            refused = [line for line in server.output.splitlines() if "a peer was refused" in line]
            assert len(refused) <= 1, refused
            assert site.ctl("router", "rm", "r-1", "--yes").returncode == 0
            assert site.rows("router", "list", noun="machines")["r-1"]["state"] == "revoked"
            # B191: the same machine comes back under its name by another token.
            agent.end()
            (folder / "agent" / "identity").rename(folder / "agent" / "identity.old")
            back = llmgw("join", "--config", str(agent_file), "--data-dir", str(folder / "agent"), stdin=site.added("node", "add", "gpu-1"))
            assert back.returncode == 0, back.stderr
            with program(["agent", "--config", str(agent_file)], folder, "agent-2"):
                wait_for(lambda: site.rows("ctl", "node", "list", noun="nodes").get("gpu-1", {}).get("state") == "ready", "it is back")
        # One that was only invited is taken back by the same command, and its token with it.
        invited = site.added("node", "add", "gpu-2")
        gone = site.ctl("node", "rm", "gpu-2", "--yes")
        assert gone.stdout == "node gpu-2: removed (1 join token revoked)\n", gone.stderr
        late = llmgw("join", "--config", str(folder / "y.toml"), "--data-dir", str(folder / "y"), stdin=invited)
        assert (late.returncode, "was revoked" in late.stderr) == (5, True)
        assert site.ctl("node", "rm", "gpu-2", "--yes").returncode == 4
        for secret in (token, site.token, "PRIVATE"):
            assert secret not in server.output + agent.output


def test_a_join_that_cannot_write_its_files_shows_its_token_to_nobody_and_one_that_broke_off_is_resumed(
    site: Site, monkeypatch: pytest.MonkeyPatch
):
    def fail(*given: object) -> list[str]:
        raise Unavailable("the disk is full")

    folder = site.folder
    with program(["server", "--config", str(site.config)], folder, "server") as server:
        site.serves(server)
        token = site.added("node", "add", "gpu-1")
        (folder / "file").write_text("")
        for config, data_dir in ((folder / "file" / "x.toml", folder / "agent"), (folder / "x.toml", folder / "file" / "agent")):
            refused = llmgw("join", "--config", str(config), "--data-dir", str(data_dir), stdin=token)
            assert (refused.returncode, "cannot be used" in refused.stderr, refused.stderr.count("\n")) == (3, True, 1), refused.stderr
        assert site.rows("node", "list", noun="machines")["gpu-1"]["state"] == "invited"
        config, data_dir = folder / "agent.toml", folder / "agent"
        config.write_text("# mine\n")
        with monkeypatch.context() as patch:
            patch.setattr(join_command, "amend", fail)  # what is written last fails, after the token was used
            with pytest.raises(Unavailable):
                join_command.join_by(parse_token(token), config, "", "", data_dir, "")
        assert site.rows("node", "list", noun="machines")["gpu-1"]["state"] == "valid"
        assert config.read_text() == "# mine\n"
        again = llmgw("join", "--config", str(config), "--data-dir", str(data_dir), stdin=token)
        assert again.returncode == 0, again.stderr
        assert tomllib.loads(config.read_text())["agent"]["name"] == "gpu-1"
        assert not list((data_dir / "identity").glob("joining-*"))
        assert (folder / "agent.toml.before-join").read_text() == "# mine\n"
        twice = llmgw("join", "--config", str(config), "--data-dir", str(data_dir), stdin=token)
        assert (twice.returncode, "has joined already" in twice.stderr) == (4, True)


def test_a_control_planes_join_that_broke_off_between_two_of_its_files_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, authority: Authority
) -> None:
    planes = ("https://ctl-1.example:8081",)
    token = JoinToken("ab", MachineRole.SERVER, "ctl-2", authority.pin, planes)
    keys: list[str] = []

    def let_in(token: JoinToken, name: str, addresses: list[str], others: str, key: str, ca_pem: str = "") -> Joined:
        keys.append(key)
        identity = MachineIdentity(ClusterId(authority.cluster), MachineRole.SERVER, name)
        issued = ca.issue(authority, ca.public_key_of(key), identity, tuple(addresses), time.time(), "0b" * 8)
        return Joined(name, MachineRole.SERVER, authority.cluster, key, issued.pem, authority.pem, planes, authority.key_pem, {})

    def fail(*given: object) -> None:
        raise Unavailable("the disk is full")

    monkeypatch.setattr(join_command, "join", let_in)
    config, data_dir = tmp_path / "x.toml", tmp_path / "data"
    with monkeypatch.context() as patch:
        patch.setattr(pending_join, "save_held", fail)  # the CA's key is there by then
        with pytest.raises(Unavailable):
            join_command.join_by(token, config, "", "127.0.0.3", data_dir, "")
    assert (data_dir / "ca" / "ca.key").exists()
    with pytest.raises(Conflict, match="holds a CA already"):
        join_command.join_by(attrs.evolve(token, secret="cd"), config, "", "127.0.0.3", data_dir, "")
    lines = join_command.join_by(token, config, "", "127.0.0.3", data_dir, "")
    assert "as server ctl-2" in lines[0]
    assert keys[0] == keys[1], "the same key asks again"
    assert not list((data_dir / "identity").glob("joining*"))


def test_a_second_join_keeps_the_copy_of_how_the_file_was_before_the_first(tmp_path: Path) -> None:
    config = tmp_path / "x.toml"
    config.write_text("# one\n")
    for text in ("# two\n", "# three\n", "# four\n"):
        setup_files.amend(config, config.read_text(), text)
    kept = [config.with_name("x.toml.before-join" + end).read_text() for end in ("", ".2", ".3")]
    assert kept == ["# one\n", "# two\n", "# three\n"]


def test_a_control_plane_of_another_machine_needs_a_replicated_store_and_that_is_said(site: Site):
    with program(["server", "--config", str(site.config)], site.folder, "server") as server:
        site.serves(server)
        refused = site.ctl("server", "add", "ctl-2")
        assert refused.returncode == 4
        assert "needs a replicated store" in refused.stderr
        strange = llmgw("ctl", "status", "--server", site.url, LLMGW_TOKEN=site.token, HOME=str(site.folder))
        assert (strange.returncode, "LLMGW_CA" in strange.stderr, strange.stderr.count("\n")) == (6, True, 1), strange.stderr
        rows = site.rows("server", "list", noun="machines")
        assert (rows["ctl-1"]["state"], HOST in rows["ctl-1"]["addresses"]) == ("valid", True)


def test_a_control_plane_on_loopback_says_why_nobody_can_join(tmp_path: Path):
    config = tmp_path / "ctl.toml"
    made = llmgw("init", "--yes", "--config", str(config), "--data-dir", str(tmp_path / "ctl"), "--store", "none")
    assert made.returncode == 0, made.stderr
    port = free_port()
    config.write_text(config.read_text().replace("8081", str(port)).replace("8080", str(free_port())))
    with program(["server", "--config", str(config)], tmp_path, "server") as server:
        server.wait_output("serving")
        token = (tmp_path / "ctl" / "admin-token").read_text().strip()
        refused = llmgw("node", "add", "gpu-1", "--server", f"http://127.0.0.1:{port}", LLMGW_TOKEN=token)
        assert refused.returncode == 4
        assert "[server] advertise" in refused.stderr


def test_a_new_admin_token_is_taken_by_the_control_plane_that_runs(site: Site):
    with program(["server", "--config", str(site.config)], site.folder, "server") as server:
        site.serves(server)
        old = site.token
        made = llmgw("init", "--new-admin-token", "--config", str(site.config))
        assert made.returncode == 0, made.stderr
        assert site.token != old
        assert site.token not in made.stdout
        wait_for(lambda: site.ctl("ctl", "status").returncode == 0, "the new token is valid")
        kept = llmgw(
            "ctl", "status", "--server", site.url, LLMGW_TOKEN=old, LLMGW_CA=str(site.data_dir / "ca" / "ca.pem"), HOME=str(site.folder)
        )
        assert kept.returncode == 0, kept.stderr
        assert server.end(signal.SIGTERM) == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "no join token was given"), ("hello", "this is no join token"), ("llmgw-join-1.abc.00000000", "not whole")],
)
def test_what_is_no_join_token_is_refused_in_one_line_before_anything_is_written(tmp_path: Path, text: str, words: str):
    done = llmgw("join", "--config", str(tmp_path / "x.toml"), "--data-dir", str(tmp_path / "x"), stdin=text)
    assert (done.returncode, done.stderr.count("\n")) == (3, 1)
    assert words in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_router_that_other_machines_reach_is_not_plain_by_accident(tmp_path: Path):
    config = tmp_path / "r.toml"
    port = free_port()
    text = f'[router]\nlisten = "0.0.0.0:{port}"\n[[endpoint]]\nid = "a"\nurl = "http://127.0.0.1:9"\nmodels = ["m"]\n'
    config.write_text(text)
    refused = llmgw("router", "--config", str(config))
    assert refused.returncode == 3
    assert "there is no certificate for it" in refused.stderr
    config.write_text(text + '[tls]\nplain = "anywhere"\n')
    with program(["router", "--config", str(config)], tmp_path, "router") as router:
        router.wait_output("listening")


KEYS = st.dictionaries(st.sampled_from(["a", "b", "c"]), st.text(max_size=8) | st.lists(st.text(max_size=4), max_size=3), min_size=1)
FILES = st.sampled_from(
    [
        "",
        "# nothing\n",
        "[x]\n",
        '[x]\na = "1"  # one\nb = [ "q",\n  "r" ]\n[y]\na = "2"\n',
        '[y]\na = 1\n[ x ] # here\nc = "3"\n\n[x.z]\na = 1\n',
        'x.a = "dotted"\n',
        'x = { a = "inline" }\n',
        '[[m]]\na = 1\n[x]\n"a" = "quoted"\n',
    ]
)


@given(FILES, KEYS)
def test_keys_are_put_into_a_file_and_everything_else_stays_or_nothing_is_done(text: str, keys: dict):
    before = tomllib.loads(text)
    try:
        after = with_keys(text, "x", keys)
    except Conflict:
        return  # with the lines that a person writes
    assert tomllib.loads(after) == {**before, "x": {**before.get("x", {}), **keys}}
    kept = [line for line in text.splitlines() if "#" in line and not line.lstrip().startswith(tuple(keys))]
    assert all(line in after for line in kept)


def test_dev_that_other_machines_reach_speaks_tls_and_ctl_and_its_agent_know_by_themselves(tmp_path: Path):
    config = tmp_path / "dev.toml"
    admin, public = free_port(), free_port()
    config.write_text(f'[server]\nadmin_listen = "0.0.0.0:{admin}"\n[router]\nlisten = "0.0.0.0:{public}"\n')
    home = {"HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state"), "XDG_RUNTIME_DIR": str(tmp_path / "run")}
    with program(["dev", "--no-engine", "--config", str(config), "--data-dir", str(tmp_path / "dev")], tmp_path, "dev", home) as dev:
        dev.wait_output(f"llmgw serves at https://0.0.0.0:{public}/v1")
        wait_for(lambda: "ready" in llmgw("ctl", "node", "list", **home).stdout, "its node is ready")
        assert dev.end(signal.SIGINT) in (0, 130)


def test_init_on_a_bucket_writes_what_its_store_needs_and_says_what_it_still_lacks(tmp_path: Path) -> None:
    file = tmp_path / "llmgw.toml"
    bucket = setting_up.Wanted(store="s3://bucket/p", s3_endpoint="http://127.0.0.1:9000", s3_region="r", data_dir=tmp_path / "data")
    said = setting_up.set_up(file, bucket)
    store = load_file(file).settings.store
    assert store is not None
    assert (store.replica, store.s3_endpoint) == ("s3://bucket/p", "http://127.0.0.1:9000")
    assert (store.s3_region, store.s3_credentials) == ("r", "env")
    assert "AWS_ACCESS_KEY_ID" in said[-1]
    assert (tmp_path / "data" / "ca" / "ca.key").exists()


@pytest.mark.parametrize("said", ["", 's3_credentials = "file:KEYS"\n'])
def test_a_control_plane_that_joins_is_told_of_credentials_only_where_its_file_names_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str
):
    write_credentials(tmp_path / "keys", ACCESS_KEY_ID, SECRET_ACCESS_KEY)
    config = tmp_path / "x.toml"
    given = f'replica = "s3://bucket/p"\ns3_endpoint = "http://127.0.0.1:9000"\n{said.replace("KEYS", str(tmp_path / "keys"))}'
    config.write_text(f"[store]\n{given}")
    planes = ("https://ctl-1.example:8081",)
    joined = Joined("ctl-2", MachineRole.SERVER, "c-1", "key", "certificate", "ca", planes, "ca-key", {"replica": "s3://bucket/p"})
    monkeypatch.setattr(join_command, "join", lambda *given: joined)
    token = JoinToken("ab", MachineRole.SERVER, "ctl-2", "sha256:" + "0" * 64, planes)
    lines = join_command.join_by(token, config, "", "127.0.0.3", tmp_path / "data", "")
    assert any("credentials" in line for line in lines) == (not said)


def test_a_control_plane_of_another_machine_joins_by_one_command_and_leads_when_the_first_is_gone(tmp_path: Path):
    """Two machines and a bucket, as docs/two-machines.md sets them up."""
    bucket = tmp_path / "s3"
    bucket.mkdir()
    with seaweed(bucket) as s3:
        keys = tmp_path / "keys"
        write_credentials(keys, ACCESS_KEY_ID, SECRET_ACCESS_KEY)
        store = ("--store", f"s3://{BUCKET}/cluster", "--s3-endpoint", s3.endpoint, "--s3-credentials", f"file:{keys}")
        site = Site(tmp_path, *store, lease="[lease]\nttl_s = 3\nrenew_s = 1\npoll_s = 0.3\n")
        other, url = tmp_path / "other.toml", f"https://127.0.0.3:{free_port()}"
        with program(["server", "--config", str(site.config)], tmp_path, "first") as first:
            site.serves(first)
            token = site.added("server", "add", "ctl-2")
            nowhere = llmgw("join", "--config", str(other), "--data-dir", str(tmp_path / "other"), stdin=token)
            assert (nowhere.returncode, "say --address HOST" in nowhere.stderr, other.exists()) == (3, True, False)
            # The port that stands in the file is kept.
            other.write_text(f'[server]\nadmin_listen = "127.0.0.1:{url.rpartition(":")[2]}"\n')
            joined = llmgw(
                "join", "--config", str(other), "--data-dir", str(tmp_path / "other"), "--address", "127.0.0.3", stdin=token
            )  # fmt: skip
            assert joined.returncode == 0, joined.stderr
            assert "credentials" in joined.stdout
            text = other.read_text()
            said = tomllib.loads(text)["server"]
            assert (said["admin_listen"], said["advertise"]) == (url.removeprefix("https://"), url)
            rest = f'[router]\nlisten = "127.0.0.3:{free_port()}"\n[tls]\nplain = "never"\n'
            other.write_text(with_keys(text, "store", {"s3_credentials": f"file:{keys}"}) + rest)
            with program(["server", "--config", str(other)], tmp_path, "second") as second:
                site.serves(second)
                first.wait_output("a control plane stands by")
                held = site.ctl("ctl", "hold", "add", "rack-1", "--reason", "x", url=url)
                assert held.stdout == "facility rack-1: held (durability: replicated)\n", held.stderr
                kept = llmgw("backup", str(tmp_path / "kept.tar"), "--config", str(other))
                assert kept.returncode == 0, kept.stderr
                first.kill()
                second.wait_output("event=leading")
                assert "rack-1" in site.ctl("ctl", "hold", "list", url=url).stdout
                assert "first-" in site.ctl("ctl", "hold", "list", url=url).stdout, "by whom"
