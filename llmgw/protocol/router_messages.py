"""Every message between a router that runs by itself and a control plane that it follows.

The router dials out and opens with `RouterHello`; the control plane answers `RouterWelcome` and then pushes three values,
each whole and each again when it changes: endpoints, catalog, policy. Every one of them names the fencing token it is sent
under; a router refuses what an agent would refuse, and says so with `RouterRefused`. Back go `RouterReport` and `WakeModel`, and to
the leader `UsageReport`, which it answers with `UsageTaken` once the batch is stored.
A changed list of endpoints goes as `PushDelta` to a router that can check one, over the list that it was sent before in this
session; where the two do not fit, or one is missing, it says `AskEndpoints` and is sent the whole list.
Ages are seconds on the sender's clock, never times. Readers skip fields they do not know. `Goodbye` is that of `messages`, and so is
`ControlPlanes`, which a leader tells to routers that joined.
"""

from __future__ import annotations

from typing import Final

import attrs

from llmgw.domain.endpoint import EndpointList, EndpointUse, ListStamp
from llmgw.domain.ids import ClusterId, EndpointId, OwnerId
from llmgw.domain.lease import FencingToken
from llmgw.domain.model import Catalog
from llmgw.domain.policy import Policy
from llmgw.domain.usage import UsageBatch
from llmgw.protocol.list_delta import ListDelta

ROUTER_PROTOCOL: Final = 2  # raised when a neighbour of the release before could no longer understand us
USAGE_PROTOCOL: Final = 2  # whoever speaks this one takes usage
STANDING_S: Final = 1.0  # each side says at least this often that it is there (control.md 7: at least every second)
# A router that has said nothing for so long holds up no stop (control.md 7). Routers that lost a control plane dial again
# sooner than this, so that one which has just started knows all of them before it stops anything.
ROUTER_SILENT_S: Final = 5.0
EPOCH_MAX: Final = 2**53  # no counter of ours gets there; a peer's nonsense must not push one over the edge
TTL_S_DEFAULT: Final = 15.0  # `lease.ttl_s` before a control plane has told it


# --- router -> control plane


@attrs.frozen
class Acknowledged:
    """The newest list of a leader that every worker of the router acts on: `generation` and `push` count within `token`."""

    token: FencingToken
    generation: int
    push: int = 0


@attrs.frozen
class RouterHello:
    """First message of a session. `router` is kept in its data directory, `instance` is drawn at each process start.

    `highest` is the highest token met, None before first contact; its cluster is the router's. `digest_form` is that of the digests
    it checks deltas by (`domain.endpoint.DIGEST_FORM`), 0 of a router that takes whole lists only.
    """

    router: str
    instance: str
    build: str
    highest: FencingToken | None = None
    acknowledged: Acknowledged | None = None
    workers: int = 1
    protocol: int = ROUTER_PROTOCOL
    digest_form: int = 0


@attrs.frozen
class UseOf:
    """What the router has seen of one endpoint, also of a withdrawn one while requests still run there."""

    endpoint: EndpointId
    use: EndpointUse


@attrs.frozen
class RouterReport:
    """Sent at least every second, and at once when `acknowledged` or the requests at a withdrawn endpoint change.

    `use` holds what changed since the last report of this session, and always what has requests in flight; `full`: everything,
    forget what was said before. `gone` are endpoints of which there is nothing more to say. `endpoints` counts those of the list that
    it acts on, for people; None: a build that does not tell.
    """

    highest: FencingToken | None
    acknowledged: Acknowledged | None
    use: tuple[UseOf, ...] = ()
    gone: tuple[EndpointId, ...] = ()
    full: bool = False
    endpoints: int | None = None


@attrs.frozen
class WakeModel:
    """Somebody waits for a model that has no replica."""

    model: str


@attrs.frozen
class AskEndpoints:
    """The router cannot be sure of the list that it was sent in this session (`why`, for logs), and asks for it whole.

    Said only to a control plane that sends deltas, or that tells the number of its last push.
    """

    why: str


@attrs.frozen
class RouterRefused:
    """Something pushed was not taken, because of a token. `epoch` and `owner` are the highest met (0 and "" before any)."""

    code: str
    text: str
    epoch: int = 0
    owner: OwnerId = OwnerId("")


@attrs.frozen
class UsageReport:
    """What clients have used, to the leader alone and only where its welcome names protocol 2 or higher. Told again until it is taken."""

    batch: UsageBatch


# --- control plane -> router


@attrs.frozen
class RouterWelcome:
    """First answer in a session. `leads`: what follows is a leader's, else a standby's. `ttl_s` is the lease's. `reached_at` is the
    address that the sender is told of by, "" where it has none."""

    cluster_id: ClusterId
    owner: OwnerId
    epoch: int
    leads: bool
    build: str
    ttl_s: float = TTL_S_DEFAULT
    protocol: int = ROUTER_PROTOCOL
    reached_at: str = ""


@attrs.frozen
class Standing:
    """Sent at least every second: the sender is there. `token` is a leader's, None from a standby.

    `generation` is that of the last list sent in this session; new numbers beside an unchanged list touch nothing. `push` is that
    list's too, so that a router notices one that never arrived; 0: not said.
    """

    token: FencingToken | None
    generation: int = 0
    ttl_s: float = TTL_S_DEFAULT
    push: int = 0


@attrs.frozen
class PushEndpoints:
    """Who may receive traffic, whole. A standby's is an observation: `stamp.from_standby` says so.

    `settled` False: the sender has just begun to lead and has not heard from all of its nodes. What it does not list may be
    there all the same, apart from `gone`, the replicas that it knows and does not list. `push` rises with each change of any of
    it, so that a router can acknowledge a longer `gone` beside an unchanged list.
    """

    stamp: ListStamp
    endpoints: EndpointList
    settled: bool = True
    gone: tuple[EndpointId, ...] = ()
    push: int = 0


@attrs.frozen
class PushDelta:
    """As `PushEndpoints`, by what makes its list of the one that was sent before in this session, whoever led then."""

    stamp: ListStamp
    delta: ListDelta
    settled: bool = True
    gone: tuple[EndpointId, ...] = ()
    push: int = 0


@attrs.frozen
class PushCatalog:
    """Every model, without the environment of its engines: that is no business of a router. Sent by a leader only."""

    token: FencingToken
    catalog: Catalog


@attrs.frozen
class PushPolicy:
    """Route settings, keys and limits, whole. Sent by a leader only. `[router]` keys in it are the sender's machine's own."""

    token: FencingToken
    policy: Policy


@attrs.frozen
class UsageTaken:
    """This batch is stored where it will not be lost, now or since before."""

    boot: str
    number: int


FromRouter = RouterHello | RouterReport | WakeModel | AskEndpoints | RouterRefused | UsageReport
ToRouter = RouterWelcome | Standing | PushEndpoints | PushDelta | PushCatalog | PushPolicy | UsageTaken
