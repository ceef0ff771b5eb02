"""What every engine that is llama.cpp's server inside has in common: its paths, its counters, what it serves, its one name.

Builds no command line; each engine of the family does that itself.
"""

from __future__ import annotations

from typing import Final

from llmgw.agent.engines.description import Counters
from llmgw.agent.engines.metrics import samples
from llmgw.domain.errors import Invalid
from llmgw.domain.model import ModelKind
from llmgw.domain.replica import ReplicaOrder

READY_PATH: Final = "/health"  # open to all; 503 until the weights are loaded
METRICS_PATH: Final = "/metrics"  # asks for the key

# Paths that its server does not have. A model of such a kind would load for minutes, fail its probe and be loaded again.
_NOT_SERVED: Final = {ModelKind.SCORE: "/v1/score", ModelKind.IMAGE: "/v1/images/generations"}

# Decode calls rise within one answer, where the token totals wait for its end.
_PROGRESS: Final = ("prompt_tokens_total", "prompt_tokens_cached_total", "tokens_predicted_total", "n_decode_total")


def check_kind(engine: str, kind: ModelKind) -> None:
    """Raises `Invalid` for a kind of model that llama.cpp has no endpoint for."""
    path = _NOT_SERVED.get(kind)
    if path is not None:
        raise Invalid(f"engine {engine} cannot serve kind {kind.value!r}: llama.cpp has no {path}", code="bad_kind", param="kind")


def name_told(order: ReplicaOrder) -> str:
    """The one name that it is given. Of several it reports whichever sorts first, so routers ask it by the model's own name and
    put the client's back."""
    return order.model


def counters(text: str) -> Counters | None:
    """Reads what `METRICS_PATH` answered; None when llama.cpp's counters are not in it."""
    found = samples(text)
    if "llamacpp:requests_processing" not in found:
        return None
    running = found["llamacpp:requests_processing"] + found.get("llamacpp:requests_deferred", 0.0)
    return Counters(int(running), sum(found.get(f"llamacpp:{name}", 0.0) for name in _PROGRESS))
