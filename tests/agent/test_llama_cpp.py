"""What engine `llama.cpp` says to llama-server, and what it lets a profile say. Pure."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from llmgw.agent.engines.description import Place
from llmgw.agent.engines.environment import engine_environment, scrubbed
from llmgw.agent.engines.llama_cpp import PROGRAM, LlamaCppEngine, own_words
from llmgw.domain.errors import Invalid
from llmgw.domain.model import ModelKind
from tests.agent.harness import changed, order


def place(*, args: tuple[str, ...] = (), model: str = "m1", checkpoint: str = "/models/m 1.gguf", **changes: Any) -> Place:
    made = order(port=20001, engine="llama.cpp", command=(), **changes)
    made = changed(made, model=model, profile=attrs.evolve(made.profile, args=args))
    return Place(made, "10.0.0.7", 20001, checkpoint, "s3cr3t", "/state/api-key", "/usr/bin/python3")


def words(made: Place) -> tuple[str, ...]:
    return LlamaCppEngine().launch(made).argv


def test_it_is_told_its_model_address_and_name_and_the_profiles_words_come_last() -> None:
    made = place(args=("--ctx-size", "8192", "-fa", "on"), devices=("GPU-a", "GPU-b"))
    assert words(made) == (
        "llama-server", "--model", "/models/m 1.gguf", "--host", "10.0.0.7", "--port", "20001", "--alias", "m1", "--metrics", "--no-webui",
        "--ctx-size", "8192", "-fa", "on",
    )  # fmt: skip


def test_its_secret_is_in_its_own_variable_and_its_gpus_in_cudas() -> None:
    made = place(devices=("GPU-a", "GPU-b"), env={"LLAMA_API_KEY": "mine", "HF_TOKEN": "given"})
    launch = LlamaCppEngine().launch(made)
    environment = engine_environment({"PATH": "/bin", "LLAMA_API_KEY": "the agent's"}, made, launch, "t")
    assert environment["LLAMA_API_KEY"] == environment["LLMGW_API_KEY"] == "s3cr3t"
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-a,GPU-b"
    assert "s3cr3t" not in " ".join(launch.argv)


def test_options_in_the_agents_own_environment_are_no_options_of_its_engines() -> None:
    assert scrubbed({"LLAMA_ARG_API_PREFIX": "/x", "LLAMA_ARG_THREADS": "1", "AIP_MODE": "PREDICTION", "GGML_CUDA_P2P": "1"}) == {
        "GGML_CUDA_P2P": "1"
    }
    made = place(env={"LLAMA_ARG_THREADS": "4"})
    assert engine_environment({}, made, LlamaCppEngine().launch(made), "t")["LLAMA_ARG_THREADS"] == "4"


def test_on_the_cpu_it_takes_no_gpu_of_any_maker() -> None:
    on_cpu = words(place())
    assert on_cpu[on_cpu.index("--device") + 1] == "none"
    assert "--device" not in words(place(devices=("GPU-a",)))
    for word in ("-dev", "--device"):
        with pytest.raises(Invalid, match=f"{word}: a profile asks for GPUs"):
            words(place(args=(word, "Vulkan0")))
    assert "CUDA1" in words(place(args=("-dev", "CUDA1"), devices=("GPU-a", "GPU-b")))


@pytest.mark.parametrize(
    ("kind", "word"), [(ModelKind.EMBEDDING, "--embedding"), (ModelKind.RERANK, "--reranking"), (ModelKind.CHAT, ""), (ModelKind.AUDIO, "")]
)
def test_a_kind_that_it_serves_only_when_told_so_is_told(kind: ModelKind, word: str) -> None:
    assert [found for found in words(place(kind=kind)) if found in ("--embedding", "--reranking")] == ([word] if word else [])


def test_the_clusters_word_on_where_it_is_comes_first() -> None:
    made = place()
    made = attrs.evolve(made, order=changed(made.order, engine_command=("nice", "/opt/llama/bin/llama-server")))
    assert words(made)[:3] == ("nice", "/opt/llama/bin/llama-server", "--model")


def test_a_value_behind_an_equals_sign_becomes_a_word_as_llama_server_takes_it() -> None:
    assert own_words(("--ctx-size=2048", "--override-kv", "a=int:1", "--chat-template-kwargs={}", "-ngl", "-1"), on_cpu=False) == (
        "--ctx-size", "2048", "--override-kv", "a=int:1", "--chat-template-kwargs", "{}", "-ngl", "-1",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("word", "named"),
    [
        ("--port", "--port"),
        ("--port=8080", "--port"),
        ("--api_key", "--api-key"),
        ("--api-key-file=/x", "--api-key-file"),
        ("-m", "-m"),
        ("-a", "-a"),
        ("--host", "--host"),
        ("-hf", "-hf"),
        ("--ssl-cert-file", "--ssl-cert-file"),
        ("--api-prefix", "--api-prefix"),
        ("--version", "--version"),
        ("--models-dir", "--models-dir"),
        ("--gpt-oss-20b-default", "--gpt-oss-20b-default"),
        ("--gpt_oss_120b_default", "--gpt-oss-120b-default"),
        ("--embd-gemma-default", "--embd-gemma-default"),
        ("--fim-qwen-1.5b-default", "--fim-qwen-1.5b-default"),
        ("--fim-qwen-7b-spec", "--fim-qwen-7b-spec"),
        ("--vision-gemma-4b-default", "--vision-gemma-4b-default"),
        ("--tts-oute-default", "--tts-oute-default"),
        ("--one-of-next-year-default", "--one-of-next-year-default"),
    ],
)
def test_an_option_that_would_take_the_replica_out_of_our_hands_is_refused_by_name(word: str, named: str) -> None:
    with pytest.raises(Invalid, match=f"is not given {named}: ") as caught:
        words(place(args=("--threads", "2", word)))
    assert (caught.value.code, caught.value.param) == ("bad_args", "args")


def test_a_preset_that_sets_neither_model_nor_port_is_the_profiles_to_give() -> None:
    assert words(place(args=("--spec-default", "--defrag-thold", "0.1")))[-3:] == ("--spec-default", "--defrag-thold", "0.1")


@pytest.mark.parametrize("variable", ["LLAMA_ARG_ALIAS", "LLAMA_ARG_API_KEY_FILE", "LLAMA_ARG_API_PREFIX", "LLAMA_ARG_HF_REPO"])
def test_nor_may_the_profiles_environment_say_it(variable: str) -> None:
    with pytest.raises(Invalid, match=variable) as caught:
        words(place(env={variable: "x"}))
    assert caught.value.param == "env"


def test_without_a_checkpoint_it_would_be_a_router_that_serves_nothing_and_is_refused() -> None:
    with pytest.raises(Invalid, match="needs a checkpoint"):
        words(place(checkpoint=""))


@pytest.mark.parametrize("model", ["a,b", " m", "m "])
def test_a_name_that_its_list_of_aliases_would_change_is_refused(model: str) -> None:
    with pytest.raises(Invalid, match="give the model another name"):
        words(place(model=model))


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("version: 6945 (cc98f8d34)\nbuilt with cc for x86_64\n", "6945 (cc98f8d34)"),
        (
            "ggml_cuda_init: found 1 CUDA devices\nversion: 0.6.0-dev (build 11434, commit 9)\nbuilt with x\n",
            "0.6.0-dev (build 11434, commit 9)",
        ),
    ],
)
def test_its_version_is_found_in_what_builds_of_old_and_of_now_print(text: str, version: str) -> None:
    match = PROGRAM.version.search(text)
    assert match is not None
    assert match[1] == version
