"""A settings file: every fault at once, each with its path, and what the values come out as."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from llmgw.domain.errors import EXIT_INVALID, Invalid, NotFound
from llmgw.domain.model import ReplicaCounts
from llmgw.domain.policy import GuardPolicy, GuardRule
from llmgw.settings import not_yet
from llmgw.settings.decode import known_paths
from llmgw.settings.load import FILE_BYTES_MAX, Loaded, Role, expired, load_bytes, load_file, load_text
from llmgw.settings.schema import Settings


def load(text: str, role: Role | None = None, **environ: str) -> Loaded:
    return load_text(text, source="llmgw.toml", role=role, environ=environ)


def faults(text: str, role: Role | None = None, **environ: str) -> dict[str, str]:
    with pytest.raises(Invalid) as caught:
        load(text, role, **environ)
    assert caught.value.exit_code == EXIT_INVALID
    for fault in caught.value.faults:
        assert str(fault) in caught.value.message
    return {fault.path: fault.reason for fault in caught.value.faults}


@pytest.mark.parametrize(
    ("text", "nothing"),
    [("", True), ("# only a comment\n \t\n", True), ("[route]\n[router]\n", True), ("[store]\n", False), ("route.retries = 1\n", False)],
)
def test_a_file_that_sets_nothing_is_told_from_one_that_does(text: str, nothing: bool):
    assert load(text).sets_nothing is nothing
    assert load("[[model]]\nname = 'm'\n[[model.profile]]\nengine = 'ollama'\n").sets_nothing is False


def test_an_empty_file_is_every_default():
    loaded = load("")
    assert loaded.settings.route.first_byte_timeout_s == 300
    assert loaded.settings.lease.ttl_s == 15
    assert loaded.settings.auth.required is True
    assert loaded.settings.store is None
    assert loaded.settings.engine("vllm").load_limit_s == 1800
    assert (loaded.models, loaded.keys, loaded.endpoints, loaded.warnings) == ((), (), (), ())


def test_every_fault_of_a_file_is_told_at_once():
    found = faults(
        """
        [route]
        retrys = 3
        retries = "2"
        first_byte_timeout_s = inf
        [auth]
        required = 1
        [lease]
        renew_s = 10
        [[model]]
        name = "m"
        engine = "vllm"
        [[model.profile]]
        engine = "vlm"
        [[endpoint]]
        id = "u1"
        url = "http://127.0.0.1:9001/v1"
        models = []
        [[auth.key]]
        name = "k"
        """
    )
    assert found["route.retrys"] == "unknown key; did you mean route.retries?"
    assert found["route.retries"] == "expected a whole number, not a string"
    assert "finite" in found["route.first_byte_timeout_s"]
    assert found["auth.required"] == "expected true or false, not a whole number"
    assert "third of ttl_s" in found["lease.renew_s"]
    assert found["model[0].engine"] == "unknown key here; did you mean model.profile.engine?"
    assert "did you mean 'vllm'?" in found["model[0].profile[0].engine"]
    assert "leave out /v1" in found["endpoint[0].url"]
    assert found["endpoint[0].models"] == "must name at least one"
    assert found["auth.key[0]"] == "needs sha256 (or key)"
    assert len(found) == 10


def test_a_bool_is_no_number_and_an_int_is_a_float():
    assert faults("route.retries = true") == {"route.retries": "expected a whole number, not true"}
    assert faults("route.idle_timeout_s = true") == {"route.idle_timeout_s": "expected a number, not true"}
    value = load("route.idle_timeout_s = 7").settings.route.idle_timeout_s
    assert isinstance(value, float)
    assert value == 7


@pytest.mark.parametrize(
    ("text", "path", "part"),
    [
        ("route.retries = 99", "route.retries", "between 0 and 10, not 99"),
        ("route.queue_wait_s = -1", "route.queue_wait_s", "between 0 and 3600 s, not -1"),
        ("route.idle_timeout_s = nan", "route.idle_timeout_s", "finite"),
        (f"route.idle_timeout_s = 1{'0' * 400}", "route.idle_timeout_s", "finite"),
        (f"route.retries = {2**70}", "route.retries", "too large"),
        ('route.policy = "leastload"', "route.policy", "did you mean 'least_load'?"),
        ('route.affinity = "header:"', "route.affinity", "header:NAME"),
        ("route = 3", "route", "expected a table, not a whole number"),
        ("[[route]]", "route", "expected a table, not a list"),
        ('listen = ":80"', "listen", "did you mean router.listen?"),
        ('[rooter]\nlisten = "x"', "rooter", "did you mean router?"),
        ("[routers]\nworkers = 2", "routers", "did you mean router?"),
        ('[[endpoints]]\nid = "u1"', "endpoints", "did you mean endpoint?"),
        ('[[models]]\nname = "m1"', "models", "did you mean model?"),
        ('[[auth.keys]]\nname = "a"', "auth.keys", "did you mean auth.key?"),
        ('[[auth.api]]\nname = "a"', "auth.api", "known here: key, required"),
        ("[router]\nendpoint = []", "router.endpoint", "unknown key here; did you mean endpoint?"),
        ('router.listen = ":8080"', "router.listen", '"0.0.0.0:8080"'),
        ('router.listen = "127.0.0.1:70000"', "router.listen", "0 to 65535"),
        ('router.listen = "::1:80"', "router.listen", "brackets"),
        ('router.listen = "[1.2.3.4]:80"', "router.listen", "IPv6"),
        ('router.listen = "unix:relative"', "router.listen", "absolute"),
        (f'router.listen = "unix:/{"x" * 120}"', "router.listen", "107 bytes"),
        ('server.admin_listen = "unix:/x"', "server.admin_listen", "host:port"),
        ('router.listen = "127.0.0.1:8081"', "router.listen", "server.admin_listen"),
        ('router.cors_origins = ["https://app.example/"]', "router.cors_origins", "without a path"),
        ('router.control_planes = ["ctl-1:8081"]', "router.control_planes", "http://"),
        ('router.control_planes = ["http://a:1", "http://a:1/"]', "router.control_planes", "twice"),
        ('router.control_planes = ["http://u:p@a:1"]', "router.control_planes", "user and password"),
        ('router.control_planes = "http://a:1"', "router.control_planes", "expected a list of strings, not a string"),
        ("router.control_planes = [1]", "router.control_planes[0]", "expected a string, not a whole number"),
        ('router.tls_key = "/x"', "router.tls_certificate", "come together"),
        ('tls.certificate = "/x"', "tls.key", "come together"),
        ('server.data_dir = "here"', "server.data_dir", "absolute"),
        ('server.data_dir = ""', "server.data_dir", "empty"),
        ('agent.engine_ports = "9-1"', "agent.engine_ports", "rise"),
        ('agent.engine_ports = "some"', "agent.engine_ports", "20000-20999"),
        ("agent.labels = { gpu = 1 }", "agent.labels.gpu", "expected a string, not a whole number"),
        ('agent.address = "a b"', "agent.address", "host name"),
        ('metrics.token = "hunter2"', "metrics.token", "does not stand in this file"),
        ('store.replica = "bucket"', "store.replica", "s3://bucket/prefix"),
        ('store.replica = "s3://bucket/a//b"', "store.replica", "single slashes"),
        ('store.replica = "s3://bucket/a/../b"', "store.replica", "single slashes"),
        ('store.replica = "s3://bucket/a?b"', "store.replica", "letters, digits"),
        ('store.s3_region = ""', "store.s3_region", "such as"),
        ('store.s3_region = "eu/../x"', "store.s3_region", "such as"),
        ('store.s3_credentials = "file:x"', "store.s3_credentials", "file:/PATH"),
        ("lease.ttl_s = 1", "lease.ttl_s", "between 2 and 300 s"),
        ("reconcile.node_lost_after_s = 29", "reconcile.node_lost_after_s", "three times heartbeat_s (30 s)"),
        ("reconcile.restart_backoff_s = []", "reconcile.restart_backoff_s", "1 to 32"),
        ("reconcile.restart_backoff_s = [1, -1]", "reconcile.restart_backoff_s", "not -1"),
        ("reconcile.brake.share = 1.5", "reconcile.brake.share", "between 0 and 1"),
        ("reconcile.brake.shares = 1", "reconcile.brake.shares", "did you mean reconcile.brake.share?"),
        ("publish.interval_s = 0.1", "publish.interval_s", "between 0.2 and 10 s"),
        ('engines.vlm.command = ["x"]', "engines.vlm", "did you mean engines.vllm?"),
        ('engines.openai.command = ["x"]', "engines.openai", "unknown name"),
        ('engines.vllm.command = [""]', "engines.vllm.command", "must not be empty"),
        ('[[guard.rule]]\nname = "r"', "guard.rule[0]", "match or words"),
        ('[[guard.rule]]\nname = "r"\nmatch = "("', "guard.rule[0].match", "regular expression"),
        ('[[guard.rule]]\nname = "r"\nmatch = "a*"', "guard.rule[0].match", "empty text"),
        ('[[guard.rule]]\nmatch = "a"', "guard.rule[0].name", "is missing"),
        ('[[guard.rule]]\nname = "r"\nwords = ["a", " \\u200b\\t"]', "guard.rule[0].words", "empty word"),
        ('notify.url = "x"', "notify.url", "http://"),
        ('notify.level = "warn"', "notify.level", "did you mean 'warning'?"),
        ("events.keep_days = 0", "events.keep_days", "between 1 and"),
        ('log.level = "a\\u0000"', "log.level", "NUL"),
        ('"a.b" = 1', '"a.b"', "unknown key"),
        ("[model]\nname = 'm'", "model", "write [[model]]"),
        ("auth.key = 'secret'", "auth.key", "expected a list of tables, not a string"),
    ],
)
def test_a_value_that_cannot_be_right_is_a_fault_at_its_path(text, path, part):
    found = faults(text)
    assert list(found) == [path]
    assert part in found[path]


def test_an_engine_whose_name_holds_a_dot_is_found_without_its_quotes():
    found = faults('[engines.llama.cpp]\ncommand = ["x"]')
    assert found["engines.llama"].startswith('unknown name; did you mean engines."llama.cpp"?')
    assert load('[engines."llama.cpp"]\ncommand = ["x"]').settings.engine("llama.cpp").command == ("x",)


def test_a_syntax_error_names_its_line():
    with pytest.raises(Invalid, match=r"llmgw\.toml is not TOML at line 2, column 5"):
        load("[a]\nb = \n")
    with pytest.raises(Invalid, match="at its end"):
        load('a = "')
    with pytest.raises(Invalid, match=r"is not UTF-8 text \(line 2\)"):
        load_bytes(b"a = 1\n\xff", source="llmgw.toml")
    with pytest.raises(Invalid, match="nested too deeply"):
        load(f"a = {'[' * 5000}{']' * 5000}")
    with pytest.raises(Invalid, match=r"^llmgw\.toml is not TOML: a whole number has more digits than any setting takes$"):
        load("route.retries = " + "9" * 5000)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[server]\n[server]\n", "line 2, column 8: the table [server] is there already"),
        ('[engines."llama.cpp"]\n[engines."llama.cpp"]\n', 'line 2, column 21: the table [engines."llama.cpp"] is there already'),
        ("[[model]]\n[model]\n", "line 2, column 7: the table [model] is there already"),
        ('[server]\nname = "a"\nname = "b"\n', "line 3, column 11: the key name is given a second time"),
        ("server = {}\n[server]\n", "line 2, column 8: the table [server] is there already"),
        ("a = 1\n[a]\n", "line 2, column 3: this name stands for something else already"),
        (
            "server = {}\nserver.name = 1\n",
            "line 2, column 16: server was given whole before, in braces or brackets, and nothing is added to it",
        ),
        ("model = []\n[[model]]\n", "line 2, column 8: model was given whole before, in braces or brackets, and nothing is added to it"),
        ("[a]\nb.c = 1\n[a.b]\n", "line 3, column 5: the table [a.b] is there already"),
        ("[a.b.c]\n[a]\nb.c.d = 1\n", "line 3, column 10: the table [a.b.c] has a header of its own; its keys stand there"),
        ("x = { a = 1, a = 2 }\n", "line 1, column 19: the key a stands twice in the braces"),
        ("[server]\nname: 1\n", "line 2, column 5: expected = after the key"),
        ("[server]\nname = ctl-1\n", "line 2, column 8: the key name has no value that TOML knows; text stands in quotes"),
        ("[server]\nname =\n", "line 2, column 7: the key name has no value that TOML knows; text stands in quotes"),
        ("[server]\nembedded = True\n", "line 2, column 12: the key embedded has no value that TOML knows; text stands in quotes"),
        ('[server]\nname = "a" b\n', "line 2, column 12: something follows where the line should end"),
        ('[server]\nname = "a\nb"\n', "line 2, column 10: a text in quotes ends on its own line"),
        (
            'name = "C:\\dir"\n',
            "line 1, column 13: a backslash in a text in double quotes is written twice, or the text put in single quotes",
        ),
        ('name = "\\uD800"\n', r"line 1, column 15: the number after \u or \U is no character"),
        ('name = "\\uX"\n', r"line 1, column 11: after \u come 4 hexadecimal digits, after \U 8"),
        ("a = [1, 2\n", "its end: a list is not closed with ]"),
        ("a = { b = 1 \n", "line 1, column 13: a table in braces is not closed with } on its line"),
        ("[server\n", "line 1, column 8: the table's header is not closed with ]"),
        ("[[model]\n", "line 1, column 8: the table's header is not closed with ]]"),
        ("= 1\n", "line 1, column 1: neither a key nor a table's header can begin like this"),
        ("[]\n", "line 1, column 2: a name is missing, or a character of it has to stand in quotes"),
        ("a = 2030-02-30\n", "line 1, column 5: this date or time does not exist"),
        ("a = [\n1,\n", "its end: a value is missing, or a list is not closed with ]"),
        ("a = 'x\n", "its end: a quote is missing"),
        ("a = 'x", "its end: a quote is missing"),
        ("a = 1 # \x01\n", "line 1, column 9: a character that may not stand here (U+0001)"),
    ],
)
def test_a_syntax_error_is_told_in_words_of_toml_with_its_line_and_key(text, told):
    with pytest.raises(Invalid) as caught:
        load(text)
    assert caught.value.message == f"llmgw.toml is not TOML at {told}"


def test_a_file_that_is_missing_unreadable_or_far_too_large_is_one_clear_error(tmp_path: Path):
    with pytest.raises(NotFound, match="there is no file"):
        load_file(tmp_path / "none.toml")
    with pytest.raises(Invalid, match="cannot be read"):
        load_file(tmp_path)
    big = tmp_path / "big.toml"
    with big.open("wb") as stream:
        stream.truncate(FILE_BYTES_MAX + 1)
    with pytest.raises(Invalid, match="is larger than"):
        load_file(big)


def test_a_byte_order_mark_is_no_fault(tmp_path: Path):
    file = tmp_path / "llmgw.toml"
    file.write_bytes(b"\xef\xbb\xbfroute.retries = 2\n")
    loaded = load_file(file)
    assert loaded.settings.route.retries == 2
    assert loaded.path == file


def test_nothing_is_expanded_in_texts():
    loaded = load('[agent]\ncheckpoints_dir = "/x/${HOME}/%h"\n', HOME="/root")
    assert loaded.settings.agent.checkpoints_dir == "/x/${HOME}/%h"
    assert faults('route.retries = "${RETRIES}"', RETRIES="2") == {"route.retries": "expected a whole number, not a string"}


def test_a_file_tells_which_keys_it_gives_and_which_of_them_are_the_clusters():
    loaded = load("[server]\nname = 'a'\n[route]\nretries = 1\n[auth]\nrequired = false\n[lease]\n[reconcile.brake]\nshare = 0.5\n")
    assert loaded.given == {"server.name", "route.retries", "auth.required", "reconcile.brake.share"}
    assert set(loaded.cluster_keys) == {"route.retries", "auth.required", "reconcile.brake.share"}
    assert loaded.sha256 != load("").sha256


def test_a_store_table_asks_for_a_store_even_when_it_is_empty():
    assert str(load("[store]").settings.store_path) == "/var/lib/llmgw/llmgw.db"
    assert str(load('[store]\npath = "/x/y.db"').settings.store_path) == "/x/y.db"
    assert load("").settings.store_path is None


def test_what_follows_from_other_keys_is_worked_out_once():
    settings = load('[agent]\ndata_dir = "/d"\nengine_ports = "5-9"\n[server]\nadvertise = "https://a:1/"').settings
    assert str(settings.agent.checkpoints_path) == "/d/checkpoints"
    assert settings.agent.ports == (5, 9)
    assert settings.advertise == "https://a:1"
    assert load("").settings.advertise == "http://127.0.0.1:8081"


# --- roles ---


def test_an_agent_without_a_control_plane_is_a_fault_for_an_agent_only():
    assert "agent.control_planes" in faults("", Role.AGENT)
    assert load("", Role.SERVER).warnings == ()


def test_a_model_has_no_effect_for_a_router_and_the_router_says_so():
    text = '[[model]]\nname = "m"\n[[model.profile]]\nengine = "ollama"\n'
    assert any("[[model]] has no effect for a router" in warning for warning in load(text, Role.ROUTER).warnings)
    assert load(text, Role.SERVER).warnings == ()


def test_a_router_with_nothing_to_route_to_or_nobody_to_serve_says_so():
    warnings = load("", Role.ROUTER).warnings
    assert any("nothing to route to" in warning for warning in warnings)
    assert any("every call of /v1 will be refused" in warning for warning in warnings)
    assert load('router.control_planes = ["http://127.0.0.1:8081"]', Role.ROUTER).warnings == ()


def test_a_router_inside_of_a_server_follows_nobody_else_and_a_file_that_asks_for_it_is_told():
    asked = 'router.control_planes = ["http://127.0.0.1:8081"]'
    (told,) = load(asked, Role.SERVER).warnings
    assert told.startswith("router.control_planes has no effect while router.embedded is true")
    assert load(f"{asked}\nrouter.embedded = false", Role.SERVER).warnings == ()


@pytest.mark.parametrize("role", [Role.SERVER, Role.DEV])
def test_workers_of_a_router_inside_of_another_process_are_none_and_a_file_that_asks_for_them_is_told(role):
    (told,) = load("router.workers = 2", role).warnings
    assert told.startswith("router.workers has no effect while router.embedded is true")
    assert load("router.workers = 1", role).warnings == ()
    assert load("router.workers = 2\nrouter.embedded = false", Role.SERVER).warnings == ()


def test_what_this_build_does_not_do_is_told_where_a_file_asks_for_it_and_only_there():
    text = """
[route]
affinity = "prefix"
queue_max = 7
health_interval_s = 5
[guard]
max_images = 3
[[guard.rule]]
name = "words"
words = ["x"]
[[guard.rule]]
name = "regex"
match = "x"
words = ["x"]
[[guard.rule]]
name = "out"
words = ["x"]
on = "completion"
[[guard.rule]]
name = "hide"
words = ["x"]
action = "redact"
[[auth.key]]
name = "a"
sha256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
requests_per_minute = 3
[[model]]
name = "m"
idle_stop_s = 3
[[model.profile]]
engine = "ollama"
"""
    warnings = load(text, Role.SERVER).warnings
    assert "route.affinity has no effect in this build yet" in warnings
    assert [warning for warning in warnings if "guard" in warning] == [
        "guard.rule 'regex': match has no effect in this build yet",
        "guard.rule 'out': on = \"completion\", and so the whole rule, has no effect in this build yet",
        "guard.rule 'hide': action = \"redact\", and so the whole rule, has no effect in this build yet",
    ]
    assert any("idle_stop_s" in warning for warning in warnings)
    assert not any("per_minute" in warning or "per minute" in warning for warning in warnings)
    assert not any("queue_max" in warning for warning in warnings)  # it has an effect
    assert not any("health_interval_s" in warning for warning in warnings)  # it only repeats the default
    known = known_paths(Settings)
    assert all(any(path == key or path.startswith(key) for path in known) for key in not_yet.KEYS)


def test_a_guard_is_part_of_what_routers_obey():
    text = '[guard]\nmax_messages = 5\nrule = [{ name = "r", words = ["x"], models = ["m"], keys = ["k"], action = "flag" }]'
    assert load(text).policy.guard == GuardPolicy(
        max_messages=5, rule=(GuardRule("r", words=("x",), models=("m",), keys=("k",), action="flag"),)
    )
    assert load("").policy.guard == GuardPolicy()


def test_a_router_open_to_other_machines_without_keys_says_so():
    assert any("anybody" in warning for warning in load('auth.required = false\nrouter.listen = "0.0.0.0:80"', Role.SERVER).warnings)
    assert load("auth.required = false", Role.SERVER).warnings == ()


# --- models ---


def model(replicas: str) -> ReplicaCounts:
    (spec,) = load(f'[[model]]\nname = "m"\nreplicas = {replicas}\n[[model.profile]]\nengine = "ollama"').models
    return spec.replicas


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("3", (3, 3, 3)),
        ("0", (0, 0, 0)),
        ("{}", (1, 1, 1)),
        ("{ count = 2 }", (2, 2, 2)),
        ("{ min = 2 }", (2, 2, 2)),
        ("{ max = 4 }", (1, 4, 1)),
        ("{ min = 0, max = 4 }", (0, 4, 1)),
        ("{ min = 0 }", (0, 1, 1)),
        ("{ max = 0 }", (0, 0, 0)),
        ("{ min = 1, max = 2, count = 1 }", (1, 2, 1)),
        ("{ max = 4, count = 0 }", (0, 4, 0)),
        ("{ min = 1, count = 3 }", (1, 3, 3)),
    ],
)
def test_how_many_replicas_may_be_said_in_short(text, counts):
    assert model(text) == ReplicaCounts(*counts)


def test_counts_that_contradict_each_other_are_faults():
    def of(replicas: str) -> dict[str, str]:
        return faults(f'[[model]]\nname = "m"\nreplicas = {replicas}\n[[model.profile]]\nengine = "ollama"')

    assert "model[0].replicas.max" in of("{ min = 3, max = 2 }")
    assert "model[0].replicas.count" in of("{ min = 1, max = 2, count = 5 }")
    assert of("true") == {"model[0].replicas": "expected a whole number or a table, not true"}
    assert of("1.5") == {"model[0].replicas": "expected a whole number or a table, not a number with a point"}
    assert of("{ mim = 1 }") == {"model[0].replicas.mim": "unknown key; did you mean model[0].replicas.min?"}
    assert of("20000") == {"model[0].replicas": "must be between 0 and 10000, not 20000"}


def test_a_profile_takes_its_engines_name_and_its_engines_device():
    (spec,) = load(
        """
        [[model]]
        name = "m"
        [[model.profile]]
        engine = "command"
        command = ["/bin/x"]
        [[model.profile]]
        engine = "vllm"
        checkpoint = "/c"
        """
    ).models
    assert [(profile.name, profile.gpus) for profile in spec.profiles] == [("command", 0), ("vllm", 1)]
    assert spec.replicas == ReplicaCounts(1, 1, 1)


def test_a_name_is_used_by_one_model_only():
    profile = '[[model.profile]]\nengine = "ollama"\n'
    found = faults(f'[[model]]\nname = "a"\naliases = ["x"]\n{profile}[[model]]\nname = "x"\n{profile}')
    assert found == {"model[1]": "the name 'x' is already used by model[0]"}
    assert "model[0].aliases" in faults(f'[[model]]\nname = "a"\naliases = ["a"]\n{profile}')


def test_faults_of_the_domain_come_with_the_files_paths():
    found = faults('[[model]]\nname = "a"\n[[model.profile]]\nengine = "vllm"\nurl = "http://x"\n[[model]]\nname = "b"')
    assert found["model[0].profile[0].url"].startswith('only for engine "openai"')
    assert "checkpoint" in found["model[0].profile[0].checkpoint"]
    assert found["model[1].profile"] == "a model needs at least one profile"


# --- keys ---


def test_a_key_as_text_is_hashed_and_warned_about_without_being_repeated():
    loaded = load('[[auth.key]]\nname = "a"\nkey = "sk-secret"\n')
    assert loaded.keys[0].sha256 == hashlib.sha256(b"sk-secret").hexdigest()
    (warning,) = loaded.warnings
    assert "sk-secret" not in warning
    assert loaded.keys[0].sha256 in warning
    assert "sk-secret" not in repr(loaded)


def test_a_key_ends_at_a_time_with_a_zone():
    def expires(text: str) -> float | None:
        return load(f'[[auth.key]]\nname = "a"\nsha256 = "{"A" * 64}"\nexpires = {text}\n').keys[0].expires_wall_s

    assert expires('"1970-01-01T00:01:00Z"') == 60
    assert expires('"1970-01-01 01:01:00.5+01:00"') == 60.5
    assert expires("1970-01-01T00:01:00Z") == 60
    assert expires('""') is None
    for text in (
        '"2030-01-01T00:00:00"',
        "2030-01-01T00:00:00",
        '"2030-13-01T00:00:00Z"',
        '"soon"',
        "2030-01-01",
        '"0000-01-01T00:00:00Z"',
    ):
        found = faults(f'[[auth.key]]\nname = "a"\nsha256 = "{"a" * 64}"\nexpires = {text}\n')
        assert list(found) == ["auth.key[0].expires"]


def test_keys_are_told_apart():
    def key(name: str, text: str) -> str:
        return f'[[auth.key]]\nname = "{name}"\n{text}\n'

    assert faults(key("a", 'key = "x"') + key("a", 'key = "y"')) == {"auth.key[1].name": "the name 'a' is already used by auth.key[0]"}
    assert faults(key("a", 'key = "x"') + key("b", 'key = "x"')) == {"auth.key[1]": "the same key as auth.key[0]"}
    assert faults(key("a", f'key = "x"\nsha256 = "{"a" * 64}"')) == {"auth.key[0]": "needs sha256 or key, not both"}
    assert "64 hex" in faults(key("a", 'sha256 = "abc"'))["auth.key[0].sha256"]
    assert load(key("a", f'sha256 = "{"AB" * 32}"')).keys[0].sha256 == "ab" * 32


def warned(text: str, role: Role | None = None) -> list[str]:
    return [warning for warning in load(text, role).warnings if "which no" in warning]


def test_a_key_that_may_use_what_nobody_serves_is_warned_about_where_the_file_is_all_there_is():
    def key(name: str, models: str) -> str:
        return f'[[auth.key]]\nname = "{name}"\nsha256 = "{hashlib.sha256(name.encode()).hexdigest()}"\nmodels = {models}\n'

    keys = key("a", '["m1", "nope", "fats"]') + key("b", '["fast", "m2"]') + key("c", '["*", "later"]') + key("d", '["later"]')
    static = keys + ENDPOINT + 'aliases = { fast = "m1" }\n'
    told = [
        "auth.key: 'a' may use 'nope', 'fats', which no endpoint serves",
        "auth.key: 'd' may use 'later', which no endpoint serves",
    ]
    assert warned(static) == warned(static, Role.ROUTER) == told
    model = '[[model]]\nname = "later"\n[[model.profile]]\nengine = "ollama"\n'
    assert warned(static + model) == ["auth.key: 'a' may use 'nope', 'fats', which no endpoint or model serves"]
    assert warned(static + model, Role.ROUTER) == told, "a router has no use for models"
    assert warned('[router]\ncontrol_planes = ["http://c:1"]\n' + static) == []
    assert warned("[store]\n" + static) == []
    assert warned(keys) == [], "without an endpoint there is another warning"


def test_a_key_that_has_ended_is_told_with_its_end():
    text = f'[[auth.key]]\nname = "a"\nsha256 = "{"a" * 64}"\nexpires = "1970-01-01T00:01:00Z"\n'
    keys = load(text + f'[[auth.key]]\nname = "b"\nsha256 = "{"b" * 64}"\n').keys
    assert expired(keys, 59.0) == []
    assert expired(keys, 60.0) == ["auth.key: 'a' has expired (1970-01-01T00:01:00Z) and is refused"]


# --- endpoints ---

ENDPOINT = '[[endpoint]]\nid = "u1"\nurl = "http://127.0.0.1:9001/"\nmodels = ["m1", "m2"]\n'


def test_an_endpoint_takes_its_key_from_the_environment():
    loaded = load(ENDPOINT + 'api_key_env = "U1_KEY"\naliases = { fast = "m1" }\nnames = { m1 = "/models/x.gguf" }\n', U1_KEY="k")
    (endpoint,) = loaded.endpoints
    assert endpoint.url == "http://127.0.0.1:9001"
    assert endpoint.key == "k"
    assert "'k'" not in repr(endpoint)
    assert dict(endpoint.aliases) == {"fast": "m1"}


@pytest.mark.parametrize("role", [None, Role.ROUTER, Role.SERVER])
@pytest.mark.parametrize("router", ['[router]\nlisten = "127.0.0.1:9001"\n', '[router]\nlisten = "0.0.0.0:9001"\n'])
def test_a_router_that_is_its_own_endpoint_is_refused_and_the_endpoint_named(role, router):
    """It asked itself until its queue, its clients or their patience were at an end."""
    found = faults(router + ENDPOINT, role)
    assert list(found) == ["endpoint"]
    assert found["endpoint"].startswith("'u1' at http://127.0.0.1:9001 is this router itself (router.listen is ")


def test_a_role_without_a_router_at_that_address_takes_the_endpoint():
    router = '[router]\nlisten = "127.0.0.1:9001"\n'
    assert load(router + ENDPOINT, Role.DEV).endpoints  # --port may say another
    assert load(router + ENDPOINT + '[agent]\ncontrol_planes = ["http://c:1"]\n', Role.AGENT).endpoints
    assert load(router + "embedded = false\n" + ENDPOINT, Role.SERVER).endpoints
    assert list(faults('[router]\nlisten = "nonsense"\n' + ENDPOINT.replace("9001", "8080"))) == ["router.listen"]


@pytest.mark.parametrize(
    ("environ", "reason"),
    [
        ({}, "the environment variable U1_KEY is not set"),
        ({"U1_KEY": ""}, "the environment variable U1_KEY is empty"),
        ({"U1_KEY": "a\nb"}, "holds characters that no HTTP header may carry"),
    ],
)
def test_an_endpoints_key_that_is_not_there_names_the_key_and_the_variable(environ, reason):
    found = faults(ENDPOINT + 'api_key_env = "U1_KEY"\n', **environ)
    assert list(found) == ["endpoint[0].api_key_env"]
    assert reason in found["endpoint[0].api_key_env"]


@pytest.mark.parametrize(
    ("text", "path", "part"),
    [
        ('aliases = { fast = "m3" }', "endpoint[0].aliases", "not among models"),
        ('aliases = { m2 = "m1" }', "endpoint[0].aliases", "name of a model"),
        ('names = { m3 = "x" }', "endpoint[0].names", "neither among models nor among aliases"),
        ('unlisted = ["m3"]', "endpoint[0].unlisted", "neither"),
        ("weight = -1", "endpoint[0].weight", "between 0"),
        ('engine = "tgi"', "endpoint[0].engine", "one of vllm"),
        ('api_key_env = "A B"', "endpoint[0].api_key_env", "environment variable"),
        ('[[endpoint]]\nid = "u1"\nurl = "http://h"\nmodels = ["m"]', "endpoint[1].id", "already used by endpoint[0]"),
        ('[[endpoint]]\nid = "u 2"\nurl = "http://h"\nmodels = ["m"]', "endpoint[1].id", "letters"),
        ('[[endpoint]]\nid = "u2"\nurl = "http://h?x"\nmodels = ["m"]', "endpoint[1].url", "without ?"),
        ('[[endpoint]]\nid = "u2"\nurl = "ftp://h"\nmodels = ["m"]', "endpoint[1].url", "http://"),
        ('[[endpoint]]\nid = "u2"\nurl = "http://h"\nmodels = ["m", "m"]', "endpoint[1].models", "twice"),
        ('[[endpoint]]\nurl = "http://h"\nmodels = ["m"]', "endpoint[1].id", "is missing"),
    ],
)
def test_an_endpoint_that_cannot_be_right_is_a_fault(text, path, part):
    found = faults(ENDPOINT + text)
    assert list(found) == [path]
    assert part in found[path]


def test_an_alias_means_one_model_wherever_it_stands():
    other = '[[endpoint]]\nid = "u2"\nurl = "http://h"\nmodels = ["m1", "m3"]\n'
    assert len(load(ENDPOINT + 'aliases = { fast = "m1" }\n' + other + 'aliases = { fast = "m1" }\n').endpoints) == 2
    assert "stands for 'm1'" in faults(ENDPOINT + 'aliases = { fast = "m1" }\n' + other + 'aliases = { fast = "m3" }\n')["endpoint"]
    assert "a model at 'u2'" in faults(ENDPOINT + 'aliases = { m3 = "m1" }\n' + other)["endpoint"]


# --- what is checked together is told beside other faults ---

_ENDPOINTS = """
[[endpoint]]
id = "a"
url = "http://h:1"
models = ["m"]
weight = "heavy"
aliases = { fast = "m", odd = "none" }
[[endpoint]]
id = "b"
url = "http://h:2"
models = ["n"]
priority = 0.5
aliases = { fast = "n" }
"""


@pytest.mark.parametrize(
    ("text", "together", "alone"),
    [
        ('[lease]\npoll_s = "x"\nrenew_s = 10', "lease.renew_s", "lease.poll_s"),
        ('[lease]\nrenew_s = 10\npoll_s = 30\nttl_s = 20\n[log]\nlevel = "x"', "lease.poll_s", "log.level"),
        ('[tls]\ncertificate = "/x"\nca = "x"', "tls.key", "tls.ca"),
        ('[router]\nworkers = 0\ntls_key = "/x"', "router.tls_certificate", "router.workers"),
        ('[router]\nworkers = 0\nlisten = "127.0.0.1:8081"', "router.listen", "router.workers"),
        ('[server]\ndata_dir = "x"\nadmin_listen = "127.0.0.1:8080"', "router.listen", "server.data_dir"),
        ("[reconcile]\nheartbeat_s = 20\ntick_s = 0\n[reconcile.brake]\nshare = 2", "reconcile.node_lost_after_s", "reconcile.brake.share"),
        ('[[guard.rule]]\nname = "r"\naction = "x"', "guard.rule[0]", "guard.rule[0].action"),
        ('[[guard.rule]]\nname = "r"\nwords = [""]\nmatch = "a*"\non = "x"', "guard.rule[0].match", "guard.rule[0].on"),
        ('guard.rule = [{ name = "r", words = ["a"], on = 1 }, { name = "r", words = ["b"] }]', "guard.rule[1].name", "guard.rule[0].on"),
        ('[[auth.key]]\nname = "k"\nmax_parallel = -1', "auth.key[0]", "auth.key[0].max_parallel"),
        ('auth.key = [{ name = "k", key = "x", max_parallel = -1 }, { name = "l", key = "x" }]', "auth.key[1]", "auth.key[0].max_parallel"),
        ('[[auth.key]]\nname = "k"\nkey = "x"\nmodels = [1]\nexpires = "soon"', "auth.key[0].expires", "auth.key[0].models[0]"),
        (_ENDPOINTS, "endpoint[0].aliases", "endpoint[0].weight"),
        (_ENDPOINTS, "endpoint", "endpoint[1].priority"),
        ('[[model]]\nname = "m"\naliases = ["m"]\nkind = "x"', "model[0].aliases", "model[0].kind"),
        ('[[model]]\nname = "m"\nkind = "x"', "model[0].profile", "model[0].kind"),
        (
            '[[model]]\nname = "m"\nreplicas = { min = 3, max = 2, cuont = 1 }\nprofile = [{ engine = 3 }]',
            "model[0].replicas.max",
            "model[0].profile[0].engine",
        ),
        ('[[model]]\nname = "m"\nprofile = [{ engine = "command", gpus = -1 }]', "model[0].profile[0].command", "model[0].profile[0].gpus"),
        (
            '[[model]]\nname = "m"\nprofile = [{ engine = "vllm", checkpoint = "/c", url = "http://h", gpus = -1 }]',
            "model[0].profile[0].url",
            "model[0].profile[0].gpus",
        ),
        (
            '[[model]]\nname = "m"\nprofile = [{ engine = "ollama" }, { engine = "ollama", weight = -1 }]',
            "model[0].profile[1].name",
            "model[0].profile[1].weight",
        ),
    ],
)
def test_keys_that_contradict_each_other_are_told_beside_any_other_fault(text, together, alone):
    found = faults(text)
    assert together in found
    assert alone in found


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ('[lease]\nttl_s = "x"\nrenew_s = 10', "lease.ttl_s"),
        ("[tls]\ncertificate = '/x'\nkey = 3", "tls.key"),
        ('[router]\nlisten = "127.0.0.1:8081"\nembedded = "no"', "router.embedded"),
        ("router = 3\nserver.admin_listen = '127.0.0.1:8080'", "router"),
        ('[[guard.rule]]\nname = "r"\nwords = [1]', "guard.rule[0].words[0]"),
        ('[[auth.key]]\nname = "k"\nsha256 = "x"', "auth.key[0].sha256"),
        ('[[model]]\nname = "m"\nprofile = 3', "model[0].profile"),
        ('[[model]]\nname = "m"\nreplicas = { min = "x", max = 0, count = 3 }\nprofile = [{ engine = "ollama" }]', "model[0].replicas.min"),
        ('[[model]]\nname = "m"\nprofile = [{ engine = "comand", command = ["x"] }]', "model[0].profile[0].engine"),
        ('[[model]]\nname = "m"\nprofile = [{ engine = "command", command = [1] }]', "model[0].profile[0].command[0]"),
        ('[[model]]\nname = "m"\nprofile = [3, { engine = "ollama" }]', "model[0].profile[0]"),
        ('[[endpoint]]\nid = "u"\nurl = "http://h"\nmodels = [1]\naliases = { a = "m" }', "endpoint[0].models[0]"),
    ],
)  # fmt: skip
def test_nothing_is_said_of_a_key_together_with_one_that_is_itself_at_fault(text, path):
    assert list(faults(text)) == [path]


def test_an_agent_without_control_planes_hears_of_it_beside_other_faults_but_not_twice():
    assert set(faults('log.level = "x"', Role.AGENT)) == {"log.level", "agent.control_planes"}
    assert set(faults('agent.control_planes = ["x"]', Role.AGENT)) == {"agent.control_planes"}
    assert "http" in faults('agent.control_planes = ["x"]', Role.AGENT)["agent.control_planes"]


# --- place-holders ---


def _command(*words: str, engine: str = "command", more: str = "") -> tuple[str, ...]:
    listed = ", ".join(f"'{word}'" for word in words)
    key = "command" if engine == "command" else 'checkpoint = "/c"\nargs'
    return load(f'[[model]]\nname = "m"\n[[model.profile]]\nengine = "{engine}"\n{key} = [{listed}]\n{more}').warnings


def test_a_place_holder_that_nobody_fills_in_is_told_with_the_nearest_one():
    (told,) = _command("/opt/x", "--port={prot}")
    assert told == "model 'm', profile 'command': command: {prot} is no place-holder and stays as it is; did you mean {port}?"
    (told,) = _command("/opt/x", more="args = ['{PORT}']")
    assert told == "model 'm', profile 'command': args: {PORT} is no place-holder and stays as it is; did you mean {port}?"
    (told,) = _command("/opt/x", "{zzz}", "{zzz}")
    assert told.endswith("known: {host} {port} {checkpoint} {gpus} {model} {names} {api_key_file}")


def test_what_only_looks_like_a_place_holder_is_left_in_peace():
    assert _command("/opt/x", "{host}:{port}", '{"a": 1}', "{}", "${HOME}", "{{prot}}", "{a,b}", "{1}", "{ print }", "%{prot}") == ()


def test_a_place_holder_where_none_is_filled_in_is_told():
    (told,) = _command("--port={port}", engine="vllm")
    assert told.startswith("model 'm', profile 'vllm': args: {port} stays as it is: place-holders are filled in only in")
    (told,) = _command("/opt/x", more="env = { PORT = '{port}' }")
    assert told.startswith("model 'm', profile 'command': env.PORT: {port} stays as it is")
    (told,) = _command("/opt/x", more="ready_path = '/{model}/up'")
    assert told.startswith("model 'm', profile 'command': ready_path: {model} stays as it is")
    (told,) = load('engines.vllm.command = ["/opt/{model}"]').warnings
    assert told.startswith("engines.vllm.command: {model} stays as it is")
