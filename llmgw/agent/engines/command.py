"""Engine `command`: any program, started with the words of the profile's `command` and `args`.

It is told where to listen and what to serve by place-holders, and its secret by LLMGW_API_KEY and `{api_key_file}`. It has
no counters that we know, so the routers' view of it stands in.
"""

from __future__ import annotations

import re
import signal
from typing import Final

import attrs

from llmgw.agent.engines.description import KEY_VARIABLE, Counters, Launch, Place, Program
from llmgw.domain.errors import Invalid
from llmgw.domain.model import PLACE_HOLDERS
from llmgw.domain.replica import ReplicaOrder

# Only these words in braces are replaced, so that JSON in an argument stays as it is.
_HOLDER: Final = re.compile(r"\{(" + "|".join(PLACE_HOLDERS) + r")\}")


@attrs.frozen
class CommandEngine:
    name: str = "command"
    stop_signal: signal.Signals = signal.SIGTERM
    metrics_path: str | None = None
    distribution: str | None = None
    program: Program | None = None

    def ready_path(self, order: ReplicaOrder) -> str:
        return order.profile.ready_path

    def launch(self, place: Place) -> Launch:
        order = place.order
        if not order.profile.command:
            raise Invalid('engine "command" needs its command line', code="bad_command", param="command")
        values = {
            "host": place.host,
            "port": str(place.port),
            "checkpoint": place.checkpoint,
            "gpus": place.gpus,
            "model": order.model,
            "names": ",".join(order.names),
            "api_key_file": place.key_file,
        }
        argv = tuple(_HOLDER.sub(lambda match: values[match[1]], word) for word in (*order.profile.command, *order.profile.args))
        return Launch(argv, {KEY_VARIABLE: place.key})

    def counters(self, text: str) -> Counters | None:
        return None
