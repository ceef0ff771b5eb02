"""What a router's parent and one of its workers say to each other, and the bytes of it. Pure.

Both ends are one build of one program, so nothing here has to be understood by a neighbour. Values of the domain travel as the
plain data that `protocol.codec` makes of them. Every `Take...` has a number that only rises; `Acting` says up to which one a worker
acts now.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from llmgw.domain.endpoint import EndpointUse
from llmgw.domain.errors import Broken
from llmgw.domain.usage import UsageRow

Sample = tuple[str, tuple[tuple[str, str], ...], float]  # name, labels, value


class Family(msgspec.Struct, array_like=True, frozen=True):
    """One metric as it is shown: its samples in order."""

    name: str
    text: str
    kind: str
    samples: list[Sample]


# --- parent -> worker


class Begin(msgspec.Struct, tag=True, frozen=True):
    """The first word to a worker: who it is among `workers`, which descriptors are what, and this machine's own settings."""

    worker: int
    workers: int
    cells: int
    listeners: tuple[int, ...]
    tls_certificate: str
    tls_key: str
    metrics_token: str
    log_level: str
    log_format: str


class TakePolicy(msgspec.Struct, tag=True, frozen=True):
    """`slots`: where the requests of a key are counted, by the key's name; none for keys that may have any number at a time."""

    number: int
    policy: Any
    slots: dict[str, int]


class TakeCatalog(msgspec.Struct, tag=True, frozen=True):
    number: int
    catalog: Any


class TakeEndpoints(msgspec.Struct, tag=True, frozen=True):
    """`endpoints` None: nobody has said anything yet, and clients are told so. `stamp` None: a seed, under no token.

    `slots` says for each endpoint, in order, where its requests are counted.
    """

    number: int
    endpoints: Any
    stamp: Any
    slots: list[int]


class Serve(msgspec.Struct, tag=True, frozen=True):
    """From here on the worker counts: it may take connections, and no list is acted on before it says so."""


class Stop(msgspec.Struct, tag=True, frozen=True):
    """Take no new connection, let answers finish for so long, then end."""

    within_s: float


class TellFigures(msgspec.Struct, tag=True, frozen=True):
    ask: int


class AllFigures(msgspec.Struct, tag=True, frozen=True):
    """The answer to `AskAllFigures`: the text of /metrics over all workers."""

    ask: int
    text: bytes


# --- worker -> parent


class Acting(msgspec.Struct, tag=True, frozen=True):
    """Whatever came with this number or a lower one is in force."""

    number: int


class Report(msgspec.Struct, tag=True, frozen=True):
    """Sent every second, and before the end: the worker lives, what it has seen of endpoints, and at times what it has counted.

    `usage` is what clients were given since the last one.
    """

    use: dict[str, EndpointUse]
    families: list[Family] | None = None
    usage: tuple[UsageRow, ...] = ()


class Figures(msgspec.Struct, tag=True, frozen=True):
    """The answer to `TellFigures`."""

    ask: int
    families: list[Family]


class AskAllFigures(msgspec.Struct, tag=True, frozen=True):
    ask: int


class Wake(msgspec.Struct, tag=True, frozen=True):
    """Somebody waits for a model that has no replica."""

    model: str


Value = TakePolicy | TakeCatalog | TakeEndpoints
ToWorker = Begin | Value | Serve | Stop | TellFigures | AllFigures
FromWorker = Acting | Report | Figures | AskAllFigures | Wake

_ENCODER: Final = msgspec.msgpack.Encoder()
_TO_WORKER: Final = msgspec.msgpack.Decoder(ToWorker)
_FROM_WORKER: Final = msgspec.msgpack.Decoder(FromWorker)


def encode(message: ToWorker | FromWorker) -> bytes:
    return _ENCODER.encode(message)


def to_worker(data: bytes) -> ToWorker:
    """Raises Broken: the other end is ours, and only a bug makes it say what cannot be read."""
    try:
        return _TO_WORKER.decode(data)
    except msgspec.MsgspecError as err:
        raise Broken(f"a router's parent said what its worker cannot read: {err}") from err


def from_worker(data: bytes) -> FromWorker:
    """Raises Broken."""
    try:
        return _FROM_WORKER.decode(data)
    except msgspec.MsgspecError as err:
        raise Broken(f"a worker said what its parent cannot read: {err}") from err
