"""Engine `xllamacpp`: llama.cpp's server from the wheel of that name, run by our own entry module in a process of its own.

Everything it needs travels in the environment; the words of the profile's `args` follow the entry module and are checked
here, so that a wrong one is a refused start and not a crash loop.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

import attrs

from llmgw.agent import own_modules
from llmgw.agent.engines import llama_family
from llmgw.agent.engines.description import KEY_VARIABLE, Counters, Launch, Place, Program
from llmgw.domain.errors import Invalid
from llmgw.domain.model import ModelKind
from llmgw.domain.replica import ReplicaOrder

ENTRY_MODULE: Final = "llmgw.agent.engines.xllamacpp_server"
HOST_VARIABLE: Final = "LLMGW_ENGINE_HOST"
PORT_VARIABLE: Final = "LLMGW_ENGINE_PORT"
CHECKPOINT_VARIABLE: Final = "LLMGW_ENGINE_CHECKPOINT"
NAMES_VARIABLE: Final = "LLMGW_ENGINE_NAMES"  # a JSON list: names may hold commas
EMBEDDING_VARIABLE: Final = "LLMGW_ENGINE_EMBEDDING"  # "1" for kinds that llama.cpp serves only in its embedding mode
RERANK_VARIABLE: Final = "LLMGW_ENGINE_RERANK"

# llama.cpp's own names of options, and the parameter that each sets.
INTEGER_OPTIONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "--ctx-size": "n_ctx",
        "--parallel": "n_parallel",
        "--threads": "n_threads",
        "--n-gpu-layers": "n_gpu_layers",
        "--batch-size": "n_batch",
        "--ubatch-size": "n_ubatch",
        "--cache-ram": "cache_ram_mib",
        "--verbosity": "verbosity",
    }
)
TEXT_OPTIONS: Final[Mapping[str, str]] = MappingProxyType({"--chat-template": "chat_template", "--mmproj": "mmproj"})
FLAGS: Final[Mapping[str, str]] = MappingProxyType({"--embedding": "embedding", "--no-mmap": "no_mmap"})


def options(args: Sequence[str]) -> dict[str, int | str | bool]:
    """Parameter name to value. Takes `--name value` and `--name=value`. Raises `Invalid` naming the first wrong word."""
    found: dict[str, int | str | bool] = {}
    words = list(args)
    while words:
        name, given, value = words.pop(0).partition("=")
        if name in FLAGS and not given:
            found[FLAGS[name]] = True
            continue
        if name not in INTEGER_OPTIONS and name not in TEXT_OPTIONS:
            known = ", ".join(sorted((*INTEGER_OPTIONS, *TEXT_OPTIONS, *FLAGS)))
            raise Invalid(f"engine xllamacpp does not take {name!r}; it takes {known}", code="bad_args", param="args")
        if not given:
            if not words:
                raise Invalid(f"{name} needs a value", code="bad_args", param="args")
            value = words.pop(0)
        if name in TEXT_OPTIONS:
            found[TEXT_OPTIONS[name]] = value
            continue
        try:
            found[INTEGER_OPTIONS[name]] = int(value)
        except ValueError as err:
            raise Invalid(f"{name} needs a whole number, not {value!r}", code="bad_args", param="args") from err
    return found


@attrs.frozen
class XllamacppEngine:
    name: str = "xllamacpp"
    stop_signal: signal.Signals = signal.SIGTERM
    metrics_path: str | None = llama_family.METRICS_PATH
    distribution: str | None = "xllamacpp"
    program: Program | None = None

    def ready_path(self, order: ReplicaOrder) -> str:
        return llama_family.READY_PATH

    def launch(self, place: Place) -> Launch:
        """Raises `Invalid` for a kind that llama.cpp does not serve and for an option that it does not take."""
        order = place.order
        llama_family.check_kind(self.name, order.kind)
        options(order.profile.args)
        env = {
            KEY_VARIABLE: place.key,
            HOST_VARIABLE: place.host,
            PORT_VARIABLE: str(place.port),
            CHECKPOINT_VARIABLE: place.checkpoint,
            NAMES_VARIABLE: json.dumps([llama_family.name_told(order)]),
        }
        if order.kind is ModelKind.EMBEDDING:
            env[EMBEDDING_VARIABLE] = "1"
        if order.kind is ModelKind.RERANK:
            env[RERANK_VARIABLE] = "1"
        start = order.engine_command or own_modules.command_line(ENTRY_MODULE, place.python)
        return Launch((*start, *order.profile.args), env)

    def counters(self, text: str) -> Counters | None:
        return llama_family.counters(text)
