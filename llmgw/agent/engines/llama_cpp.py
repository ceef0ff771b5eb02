"""Engine `llama.cpp`: a `llama-server` that was installed on the node by itself.

What this module says on the command line is said first and the profile's `args` after it, as they stand, for that program knows
its own options best. Only those that would take the replica out of our hands are refused here.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

import attrs

from llmgw.agent.engines import llama_family
from llmgw.agent.engines.description import KEY_VARIABLE, Counters, Launch, Place, Program
from llmgw.domain.errors import Invalid
from llmgw.domain.model import ModelKind
from llmgw.domain.replica import ReplicaOrder

# `version: 6945 (cc98f8d34)` of old, `version: 0.6.0-dev (build 11434, commit 930e2fa59)` now; on standard error.
PROGRAM: Final = Program("llama-server", re.compile(r"^version: *(\S.*?)\s*$", re.MULTILINE))
OWN_KEY_VARIABLE: Final = "LLAMA_API_KEY"  # an option of that name would show the secret to every user of the machine

# Options that a profile may not set, with the variable that sets the same, and why not.
_BY_CHECKPOINT: Final = "the profile's checkpoint says it"
_BY_PLACEMENT: Final = "the start order says it"
_PLAIN_HTTP: Final = "probes and routers speak plain HTTP to an engine"
_ENDS: Final = "the program would end at once"
_HELD: Final = (
    (("-m", "--model"), "LLAMA_ARG_MODEL", _BY_CHECKPOINT),
    (("-mu", "--model-url"), "LLAMA_ARG_MODEL_URL", _BY_CHECKPOINT),
    (("-hf", "-hfr", "--hf-repo"), "LLAMA_ARG_HF_REPO", _BY_CHECKPOINT),
    (("-hff", "--hf-file"), "LLAMA_ARG_HF_FILE", _BY_CHECKPOINT),
    (("-dr", "--docker-repo"), "LLAMA_ARG_DOCKER_REPO", _BY_CHECKPOINT),
    (("--models-dir",), "LLAMA_ARG_MODELS_DIR", _BY_CHECKPOINT),
    (("--models-preset",), "LLAMA_ARG_MODELS_PRESET", _BY_CHECKPOINT),
    (("-a", "--alias"), "LLAMA_ARG_ALIAS", "it is the model's name"),
    (("--host",), "LLAMA_ARG_HOST", _BY_PLACEMENT),
    (("--port",), "LLAMA_ARG_PORT", _BY_PLACEMENT),
    (("--reuse-port",), "LLAMA_ARG_REUSE_PORT", "another replica could answer on its port"),
    (("--api-key",), "", "every replica has a secret of its own"),
    (("--api-key-file",), "LLAMA_ARG_API_KEY_FILE", "every replica has a secret of its own"),
    (("--api-prefix",), "LLAMA_ARG_API_PREFIX", "probes and routers would not find its paths"),
    (("--ssl-key-file",), "LLAMA_ARG_SSL_KEY_FILE", _PLAIN_HTTP),
    (("--ssl-cert-file",), "LLAMA_ARG_SSL_CERT_FILE", _PLAIN_HTTP),
    (("-h", "--help", "--usage", "--version", "--list-devices", "--completion-bash", "-cl", "--cache-list"), "", _ENDS),
)
_HELD_OPTIONS: Final[Mapping[str, str]] = MappingProxyType({word: why for words, _, why in _HELD for word in words})
_HELD_VARIABLES: Final[Mapping[str, str]] = MappingProxyType({variable: why for _, variable, why in _HELD if variable})
# `--gpt-oss-20b-default`, `--embd-gemma-default`, `--fim-qwen-7b-spec`, `--vision-gemma-4b-default` and whatever joins them: each
# downloads a model of its own and listens on a port of its own. `--spec-default` is the one of that form that sets neither.
_PRESET: Final = re.compile(r"--(?!spec-default$)(?:[a-z0-9.-]+-default|fim-[a-z0-9.-]+)")
_BY_PRESET: Final = "it stands for a model, a repository and a port; the profile's checkpoint and the start order say those"
_DEVICES: Final = ("-dev", "--device")
_WITH_VALUE: Final = re.compile(r"(--[A-Za-z0-9_-]+)=(.*)", re.DOTALL)


def own_words(args: Sequence[str], *, on_cpu: bool) -> tuple[str, ...]:
    """The profile's `args` as llama-server takes them: `--name=value`, which it does not know, becomes two words.

    Raises `Invalid` naming the first option that is not the profile's to set.
    """
    found: list[str] = []
    for word in args:
        split = _WITH_VALUE.fullmatch(word)
        option = _spelled(split[1] if split else word)
        if option in _HELD_OPTIONS:
            raise Invalid(f"engine llama.cpp is not given {option}: {_HELD_OPTIONS[option]}", code="bad_args", param="args")
        if _PRESET.fullmatch(option):
            raise Invalid(f"engine llama.cpp is not given {option}: {_BY_PRESET}", code="bad_args", param="args")
        if on_cpu and option in _DEVICES:
            raise Invalid(f"engine llama.cpp is not given {option}: a profile asks for GPUs by gpus = N", code="bad_args", param="args")
        found += (split[1], split[2]) if split else (word,)
    return tuple(found)


def _spelled(word: str) -> str:
    """It reads `--ctx_size` as `--ctx-size`."""
    return word.replace("_", "-") if word.startswith("--") else word


@attrs.frozen
class LlamaCppEngine:
    name: str = "llama.cpp"
    stop_signal: signal.Signals = signal.SIGTERM  # a second one ends it at once, without its clean-up
    metrics_path: str | None = llama_family.METRICS_PATH
    distribution: str | None = None
    program: Program | None = PROGRAM

    def ready_path(self, order: ReplicaOrder) -> str:
        return llama_family.READY_PATH

    def launch(self, place: Place) -> Launch:
        """Raises `Invalid` for what llama-server cannot serve, or cannot be told."""
        order = place.order
        llama_family.check_kind(self.name, order.kind)
        if not place.checkpoint:
            # Without a model it starts as a router of models, answers on its readiness path and serves nothing.
            raise Invalid("engine llama.cpp needs a checkpoint", code="bad_checkpoint", param="checkpoint")
        for variable in order.profile.env:
            if variable in _HELD_VARIABLES:
                raise Invalid(f"engine llama.cpp is not given {variable}: {_HELD_VARIABLES[variable]}", code="bad_args", param="env")
        on_cpu = not place.gpus
        words = own_words(order.profile.args, on_cpu=on_cpu)
        argv = (
            *(order.engine_command or (PROGRAM.name,)),
            "--model", place.checkpoint,
            "--host", place.host,
            "--port", str(place.port),
            "--alias", _alias(order),
            "--metrics",
            "--no-webui",  # the name of old, which builds that call it --no-ui take as well
            *_of_kind(order.kind),
            # Builds for Vulkan and the like do not look at CUDA_VISIBLE_DEVICES: they would take a GPU that nobody counted.
            *(("--device", "none") if on_cpu else ()),
            *words,
        )  # fmt: skip
        return Launch(argv, {KEY_VARIABLE: place.key, OWN_KEY_VARIABLE: place.key})

    def counters(self, text: str) -> Counters | None:
        return llama_family.counters(text)


def _alias(order: ReplicaOrder) -> str:
    name = llama_family.name_told(order)
    if "," in name or name != name.strip():
        # It would take the parts for several names, report whichever sorts first, and no client would know the answer as its model's.
        raise Invalid(
            f"engine llama.cpp cannot be told the name {name[:60]!r}: no comma, no blank at an end; give the model another name",
            code="bad_name", param="name",
        )  # fmt: skip
    return name


def _of_kind(kind: ModelKind) -> tuple[str, ...]:
    """What makes it serve that kind of model: each of these is refused by a server that was not told so at its start."""
    match kind:
        case ModelKind.EMBEDDING:
            return ("--embedding",)
        case ModelKind.RERANK:
            return ("--reranking",)
        case _:
            return ()
