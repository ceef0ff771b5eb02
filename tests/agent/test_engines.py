"""Descriptions of engines: words, environment, counters, probes. Pure."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from llmgw.agent.engines import xllamacpp_server
from llmgw.agent.engines.command import CommandEngine
from llmgw.agent.engines.description import Counters, Place
from llmgw.agent.engines.environment import engine_environment, scrubbed
from llmgw.agent.engines.metrics import samples
from llmgw.agent.engines.probes import probe
from llmgw.agent.engines.registry import ENGINES
from llmgw.agent.engines.xllamacpp import XllamacppEngine, options
from llmgw.agent.own_modules import command_line
from llmgw.domain.errors import Invalid
from llmgw.domain.model import ModelKind
from tests.agent.harness import changed, order


def place(**changes: Any) -> Place:
    args = changes.pop("args", ())
    made = order(port=20001, **changes)
    made = changed(made, profile=attrs.evolve(made.profile, args=args))
    return Place(made, "127.0.0.1", 20001, "/models/m 1", "s3cr3t", "/state/api-key", sys.executable)


def test_place_holders_are_filled_and_other_braces_stay() -> None:
    words = ("/opt/x", "--port={port}", "{host}", "{checkpoint}", "{model}", "{names}", "{api_key_file}", '{"a": {"b": 1}}', "{unknown}")
    launch = CommandEngine().launch(place(command=words, args=("--json", '{"port": "{port}"}')))
    assert launch.argv == (
        "/opt/x", "--port=20001", "127.0.0.1", "/models/m 1", "m1", "m1,fast", "/state/api-key", '{"a": {"b": 1}}', "{unknown}",
        "--json", '{"port": "20001"}',
    )  # fmt: skip
    assert launch.env["LLMGW_API_KEY"] == "s3cr3t"
    assert "s3cr3t" not in " ".join(launch.argv)


def test_a_value_that_looks_like_a_place_holder_is_not_filled_again() -> None:
    made = place(command=("/x", "{model}"))
    made = attrs.evolve(made, order=changed(made.order, model="{port}"))
    assert CommandEngine().launch(made).argv == ("/x", "{port}")


def test_gpus_are_named_by_uuid_and_the_cpu_is_none() -> None:
    made = place(command=("/x", "{gpus}"), devices=("GPU-a", "MIG-b"))
    launch = CommandEngine().launch(made)
    assert launch.argv[1] == "GPU-a,MIG-b"
    assert engine_environment({}, made, launch, "t")["CUDA_VISIBLE_DEVICES"] == "GPU-a,MIG-b"
    on_cpu = place(command=("/x", "{gpus}"))
    assert CommandEngine().launch(on_cpu).argv[1] == ""


def test_the_environment_of_an_engine_holds_no_secret_of_ours_and_no_proxy() -> None:
    names = (
        "http_proxy HTTPS_PROXY No_Proxy LLMGW_TOKEN LLMGW_START AWS_ACCESS_KEY_ID AWS_SESSION_TOKEN U1_KEY HF_TOKEN DB_PASSWORD "
        "CREDENTIALS_DIRECTORY NOTIFY_SOCKET CUDA_VISIBLE_DEVICES"
    )
    ours = dict.fromkeys(names.split(), "secret")
    kept = {"PATH": "/bin", "HOME": "/root", "LANG": "C", "LD_LIBRARY_PATH": "/cuda", "NCCL_DEBUG": "INFO", "KEYBOARD": "de"}
    assert scrubbed({**ours, **kept}) == kept


def test_a_profile_may_set_what_it_likes_but_not_the_secret_or_the_start_token() -> None:
    made = place(env={"LLMGW_START": "x", "LLMGW_API_KEY": "x", "HTTP_PROXY": "http://on-purpose"})
    environment = engine_environment({"PATH": "/bin"}, made, CommandEngine().launch(made), "m1.1.token")
    assert environment["LLMGW_START"] == "m1.1.token"
    assert environment["LLMGW_API_KEY"] == "s3cr3t"
    assert environment["HTTP_PROXY"] == "http://on-purpose"


def test_xllamacpp_gets_everything_from_the_environment() -> None:
    launch = XllamacppEngine().launch(place(engine="xllamacpp", command=(), args=("--ctx-size", "2048")))
    assert launch.argv == (*command_line("llmgw.agent.engines.xllamacpp_server"), "--ctx-size", "2048")
    assert json.loads(launch.env["LLMGW_ENGINE_NAMES"]) == ["m1"]
    assert launch.env["LLMGW_API_KEY"] == "s3cr3t"


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ((), {}),
        (("--ctx-size", "2048", "--parallel=4"), {"n_ctx": 2048, "n_parallel": 4}),
        (
            ("--embedding", "--chat-template", "gemma", "--n-gpu-layers", "-1"),
            {"embedding": True, "chat_template": "gemma", "n_gpu_layers": -1},
        ),
    ],
)
def test_options_of_llama_cpp_are_read(args: tuple[str, ...], expected: dict[str, object]) -> None:
    assert options(args) == expected


@pytest.mark.parametrize(
    ("args", "text"), [(("--warp",), "'--warp'"), (("--ctx-size",), "value"), (("--ctx-size", "many"), "whole number"), (("x",), "'x'")]
)
def test_a_wrong_option_is_named(args: tuple[str, ...], text: str) -> None:
    with pytest.raises(Invalid, match=text):
        options(args)


def test_the_entry_module_turns_its_environment_into_parameters() -> None:
    pooling = SimpleNamespace(LLAMA_POOLING_TYPE_RANK=4)
    library = SimpleNamespace(
        CommonParams=lambda: SimpleNamespace(model=SimpleNamespace(), cpuparams=SimpleNamespace(), cpuparams_batch=SimpleNamespace()),
        llama_pooling_type=pooling,
        llama_load_mode=SimpleNamespace(LLAMA_LOAD_MODE_NONE=0),
    )
    launch = XllamacppEngine().launch(place(engine="xllamacpp", command=(), kind=ModelKind.RERANK))
    params = xllamacpp_server.parameters(library, dict(launch.env), ["--threads", "3", "--chat-template", "gemma"])
    assert (params.model.path, params.hostnames, params.port, params.api_keys) == ("/models/m 1", ["127.0.0.1"], 20001, ["s3cr3t"])
    assert params.model_alias == {"m1"}
    assert (params.embedding, params.pooling_type, params.cpuparams.n_threads, params.use_jinja) == (True, 4, 3, False)


def test_llama_cpps_counters_are_read() -> None:
    text = (
        "# HELP llamacpp:prompt_tokens_total x\n# TYPE llamacpp:prompt_tokens_total counter\nllamacpp:prompt_tokens_total 25\n"
        "llamacpp:tokens_predicted_total 8\nllamacpp:n_decode_total 10\nllamacpp:requests_processing 1\nllamacpp:requests_deferred 2\n"
    )
    assert XllamacppEngine().counters(text) == Counters(running=3, progress=43.0)
    assert XllamacppEngine().counters("something else") is None
    assert CommandEngine().counters(text) is None


def test_samples_are_summed_over_labels_and_nonsense_is_skipped() -> None:
    text = 'a{x="1} 2"} 3 1700000000\na{x="2"} 4\nb NaN\nc +Inf\nd x\n\ne\nf 1e3\n{ 1\n'
    found = samples(text)
    assert found["f"] == 1000.0
    assert "b" not in found
    assert "c" not in found
    assert "d" not in found


@pytest.mark.parametrize("kind", list(ModelKind))
def test_every_kind_has_its_probe_and_other_has_none(kind: ModelKind) -> None:
    request = probe(kind, "m/1")
    assert (request is None) == (kind is ModelKind.OTHER)
    if request is not None:
        assert request.path.startswith("/v1/")
        assert b"m/1" in request.body
        if request.content_type == "application/json":
            json.loads(request.body)


def test_every_engine_is_registered_under_its_own_name() -> None:
    assert all(engine.name == name for name, engine in ENGINES.items())
    assert {"command", "xllamacpp"} <= set(ENGINES)
