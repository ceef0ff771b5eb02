"""What a description of an engine is made of. Values only; nothing here starts, asks or reads anything."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from typing import Final, Protocol

import attrs

from llmgw.domain.replica import ReplicaOrder

KEY_VARIABLE: Final = "LLMGW_API_KEY"  # every engine is given its secret under this name, and under the engine's own where it has one


@attrs.frozen
class Place:
    """Where one attempt runs and what it is given.

    `checkpoint` is an absolute path, empty where the order names none. `key` is the replica's own secret, `key_file` a file
    of mode 0600 that holds it. `python` is the interpreter that runs our own entry modules.
    """

    order: ReplicaOrder
    host: str
    port: int
    checkpoint: str
    key: str = attrs.field(repr=False)
    key_file: str
    python: str

    @property
    def gpus(self) -> str:
        """The devices in the form that CUDA_VISIBLE_DEVICES takes; empty on the CPU."""
        return ",".join(device for device in self.order.devices if device != "cpu")


@attrs.frozen
class Launch:
    """What to run. `env` is laid over the scrubbed environment of the agent, and the profile's own over that."""

    argv: tuple[str, ...]
    env: Mapping[str, str]


@attrs.frozen
class Counters:
    """What an engine counts itself. `progress` rises while it works; its size means nothing."""

    running: int
    progress: float


@attrs.frozen
class Program:
    """The program of an engine that is installed by itself: its name in PATH, and where its version stands in what `--version` prints."""

    name: str
    version: re.Pattern[str]  # the first group is the version


class Engine(Protocol):
    """One engine. Descriptions are stateless and pure."""

    @property
    def name(self) -> str: ...

    @property
    def stop_signal(self) -> signal.Signals:
        """What asks it to end in order."""
        ...

    @property
    def metrics_path(self) -> str | None:
        """Where it tells its counters; None: it has none, and the routers' view of it stands in."""
        ...

    @property
    def distribution(self) -> str | None:
        """The Python distribution that must be installed for it; None: none is needed."""
        ...

    @property
    def program(self) -> Program | None:
        """The program that must be on the node for it, unless the order's `engine_command` says what to run; None: none is needed."""
        ...

    def ready_path(self, order: ReplicaOrder) -> str: ...

    def launch(self, place: Place) -> Launch:
        """Raises `Invalid` when the order's profile asks for what this engine cannot take."""
        ...

    def counters(self, text: str) -> Counters | None:
        """Reads what `metrics_path` answered; None when the counters are not in it."""
        ...
