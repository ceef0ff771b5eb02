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
from llmgw.agent.engines.description import KEY_VARIABLE, Counters, Launch, Place
from llmgw.agent.engines.metrics import samples
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
    metrics_path: str | None = "/metrics"
    distribution: str | None = "xllamacpp"

    def ready_path(self, order: ReplicaOrder) -> str:
        return "/health"  # 503 until the weights are loaded

    def launch(self, place: Place) -> Launch:
        order = place.order
        options(order.profile.args)
        env = {
            KEY_VARIABLE: place.key,
            HOST_VARIABLE: place.host,
            PORT_VARIABLE: str(place.port),
            CHECKPOINT_VARIABLE: place.checkpoint,
            # Of several names llama.cpp reports whichever sorts first. Routers ask it by the model's own name and put the client's back.
            NAMES_VARIABLE: json.dumps([order.model]),
        }
        if order.kind is ModelKind.EMBEDDING:
            env[EMBEDDING_VARIABLE] = "1"
        if order.kind in (ModelKind.RERANK, ModelKind.SCORE):
            env[RERANK_VARIABLE] = "1"
        start = order.engine_command or own_modules.command_line(ENTRY_MODULE, place.python)
        return Launch((*start, *order.profile.args), env)

    def counters(self, text: str) -> Counters | None:
        found = samples(text)
        if "llamacpp:requests_processing" not in found:
            return None
        running = found["llamacpp:requests_processing"] + found.get("llamacpp:requests_deferred", 0.0)
        # Decode calls rise within one answer, where the token totals wait for its end.
        progress = sum(
            found.get(f"llamacpp:{name}", 0.0)
            for name in ("prompt_tokens_total", "prompt_tokens_cached_total", "tokens_predicted_total", "n_decode_total")
        )
        return Counters(int(running), progress)
