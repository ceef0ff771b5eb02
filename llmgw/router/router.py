"""The router as others see it: takes endpoints, catalog and policy, tells what it uses, and answers what needs no engine.

Each value is immutable and swapped by one reference; a request takes its references once. Opens no sockets (`listener` does).
"""

from __future__ import annotations

import difflib
import json
import sys
import traceback
from collections.abc import Awaitable, Callable, Container, Mapping
from types import MappingProxyType
from typing import Final
from urllib.parse import unquote_to_bytes

import attrs
import structlog
import trio

from llmgw.domain.endpoint import Endpoint, EndpointList, EndpointUse, ListStamp
from llmgw.domain.errors import Conflict, NotFound, StaleEpoch, Unauthenticated
from llmgw.domain.ids import EndpointId
from llmgw.domain.lease import Fence, FencingToken, fence
from llmgw.domain.model import Catalog
from llmgw.domain.policy import ApiKey, Policy
from llmgw.domain.ports import Machine, Wake
from llmgw.router import access_log
from llmgw.router.answer_headers import ENDPOINT, LIMIT_HEADERS, SERVER_TIMING, limit_lines, operator_lines
from llmgw.router.cells import Cell
from llmgw.router.choose import Choice, Shortage, choose
from llmgw.router.engine_load import POLLS_PER_S_MAX
from llmgw.router.exchange import Exchange, Known
from llmgw.router.families import NOT_OFFERED, ROUTES, Problem, cut, not_offered, problem_of
from llmgw.router.gate import Gate
from llmgw.router.http1 import AnswerHead, Head, Heads
from llmgw.router.keys import Keyring
from llmgw.router.limits import Parallel
from llmgw.router.metrics import METRICS_HEADERS, EndpointFigures, Following, Metrics, accounted, counted, followed
from llmgw.router.metrics_sum import plain, text_of
from llmgw.router.proxy import Connection
from llmgw.router.queue import retry_after_s
from llmgw.router.rates import Charge, Rates
from llmgw.router.reactor import Reactor
from llmgw.router.retry import RetryBudget
from llmgw.router.sweeper import Kick
from llmgw.router.table import EMPTY, RoutingTable, Target, build_table
from llmgw.router.turns import Turns
from llmgw.router.upstreams import EndpointState
from llmgw.router.usage import TELLS, Tokens
from llmgw.router.usage_book import UsageBook
from llmgw.router.worker_messages import Family

_JSON: Final = (b"content-type", b"application/json")
_CORS_HEADERS: Final = b"authorization, content-type, x-api-key, x-request-id"
_CORS_AGE_S: Final = b"600"
_EXPOSED: Final = b", ".join(
    (b"x-request-id, retry-after, x-should-retry, www-authenticate", *(name.encode() for name in LIMIT_HEADERS), ENDPOINT, SERVER_TIMING)
)
_HEADER_LIST_MAX: Final = 1024  # bytes of Access-Control-Request-Headers that are echoed
NEAR_ROUTE: Final = 0.75  # difflib's ratio: /v1/modles finds /v1/models, /v1/nope nothing
NEAR_PATH_MAX: Final = 100  # characters; the longest route has 25
_ADMIN_PATHS: Final = ("/api/v1/", "/console/")
READY_REASONS_MAX: Final = 20  # models named in /ready; a catalog of thousands would make it a page
IN_USE_S: Final = 300.0  # chosen: who asks once every few minutes still finds the figures of others' requests
IN_USE_LOOK_S: Final = 1.0
LEAST_LOAD: Final = "least_load"  # the one policy of [route] that looks at load
IDLE_SWEEP_S: Final = 2.0  # between looks for pooled connections that have idled too long; with 5,000 endpoints each look costs
WAITING_RETRY_S: Final = 2.0  # chosen: a control plane that starts is there within seconds
HARD_END_S: Final = 0.5  # between the last word to a client and the end of its connection, when the router stops

FULL_AGAIN_S: Final = 60.0  # between lines of the log about clients that wait for others to leave
log = structlog.get_logger("llmgw.router")

Local = tuple[int, list[tuple[bytes, bytes]], bytes]


def _none_dropped() -> int:
    """A log that takes every line."""
    return 0


class Router:
    """One worker's data plane. `listener.serve` opens its port; the ports of `domain.ports` feed it."""

    def __init__(
        self,
        machine: Machine,
        policy: Policy,
        access_log: Callable[[bytes], None],
        *,
        report: Callable[[str], None] | None = None,
        metrics_token: str = "",
        reactor: Reactor | None = None,
        log_dropped: Callable[[], int] = _none_dropped,
        clients_max: int = sys.maxsize,
    ) -> None:
        """`report` takes a text for the operator when a request fails by our own fault. `log_dropped`: lines that `access_log` took
        and could not write. `clients_max`: connections of clients that are taken at once; the next wait in the kernel's queue.

        `metrics_token` is what /metrics asks for; without one it is open on loopback only. `waiting` may be set before any list
        is there: until one comes every call of /v1 is told so, because keys and models that nobody has named yet are not wrong.
        """
        self.machine = machine
        self.policy = policy
        self.gate = Gate(policy)
        self.table: RoutingTable = EMPTY
        self.reactor = reactor or Reactor(machine.now_s)
        self.heads: Heads[Head] = Heads()
        self.answer_heads: Heads[AnswerHead] = Heads()
        self.metrics = Metrics()
        self.parallel = Parallel()
        self.rates = Rates()
        self.budget = RetryBudget()
        self.turns = Turns(self._look, self.state)
        self.connections: set[Connection] = set()
        self._clients_max = clients_max
        self._room = trio.lowlevel.ParkingLot()
        self._told_full_s = -FULL_AGAIN_S
        self.draining = False
        self.drain_deadline_s = 0.0
        self.loopback = True
        self.emptied = trio.Event()
        self.stop_listening: Callable[[], None] = _nothing  # set by the listener
        self._keyring = Keyring.of(policy)
        self._states: dict[EndpointId, EndpointState] = {}
        self._retired: list[EndpointState] = []
        self._polled: tuple[EndpointState, ...] | None = None  # worked out when asked for after a change
        self._polled_in_use: tuple[frozenset[str], tuple[EndpointState, ...]] | None = None
        self._in_use: dict[str, tuple[int, float]] = {}  # by model: requests up to a look, and when there was a new one
        self._in_use_look_s = 0.0
        self._models_seen: frozenset[str] = frozenset()
        self._endpoints = EndpointList()
        self._catalog: Catalog | None = None
        self._highest: FencingToken | None = None
        self._generation = 0
        self._taken = False
        self.waiting = False
        self.following: Callable[[], Following] | None = None  # set where control planes are followed
        self.wake: Wake = _nobody_wakes
        self.book: UsageBook | None = None  # set where there is a control plane to account to
        # Set where this is one worker of several: where it counts requests, and who adds up what all have counted, for /metrics.
        self.cell_of: Callable[[Endpoint], Cell | None] = _counts_alone
        self.all_figures: Callable[[], Awaitable[bytes]] | None = None
        self._swept_s = 0.0
        self._write_log = access_log
        self._report = report
        self._log_dropped = log_dropped
        self._metrics_token = metrics_token
        self._id_begin = b"req-%b-" % machine.fresh_hex(6).encode()
        self._count = 0
        self._started_wall_s = int(machine.wall_s())

    # --- what is pushed

    def set_endpoints(self, endpoints: EndpointList, stamp: ListStamp) -> None:
        """From the return on nothing new goes to an endpoint that is gone or has moved; what runs there ends undisturbed.

        Raises StaleEpoch for a lower epoch or another owner of the same one, Conflict for another cluster's list.
        """
        verdict = fence(self._highest, stamp.token)
        highest = self._highest
        if verdict is Fence.FOREIGN:
            assert highest is not None
            raise Conflict(
                f"the list is of cluster {stamp.token.cluster_id}, this router belongs to {highest.cluster_id}", code="foreign_cluster"
            )
        if verdict is Fence.STALE:
            assert highest is not None
            raise StaleEpoch(
                f"the list of epoch {stamp.token.epoch} comes after one of epoch {highest.epoch}", epoch=highest.epoch, owner=highest.owner
            )
        if highest is not None and stamp.token == highest and stamp.generation < self._generation:
            return  # a late one of the same publisher: what it said is said better by now
        self._highest = stamp.token
        self._generation = stamp.generation
        if self._taken and endpoints == self._endpoints:
            return  # new numbers beside an unchanged list touch no connection
        self._act_on(endpoints)

    def seed(self, endpoints: EndpointList) -> None:
        """A list that nobody has pushed, to serve by until somebody does: it comes under no token and acknowledges nothing."""
        self._act_on(endpoints)

    def _act_on(self, endpoints: EndpointList) -> None:
        self._taken = True
        self.waiting = False
        self._endpoints = endpoints
        now_s = self.machine.now_s()
        wanted = {endpoint.id: endpoint for endpoint in endpoints.endpoints}
        for known, state in list(self._states.items()):
            endpoint = wanted.get(known)
            if endpoint is not None and (endpoint.url, endpoint.key) == (state.endpoint.url, state.endpoint.key):
                state.endpoint = endpoint
                continue
            del self._states[known]
            state.retire()
            self._retired.append(state)
        for known, endpoint in wanted.items():
            if known not in self._states:
                self._states[known] = EndpointState(endpoint, self.reactor, now_s, self.cell_of(endpoint), self.answer_heads)
        self._forget_retired()
        self._set_table()

    def set_catalog(self, catalog: Catalog) -> None:
        """Models of the catalog are known, also without an endpoint."""
        self._catalog = catalog
        self._set_table()

    def _set_table(self) -> None:
        self.table = build_table(self._endpoints, self._catalog)
        self.turns.times.keep({target.model for target in self.table.targets.values()})
        self._polled = None
        self.turns.give()

    def set_policy(self, policy: Policy) -> None:
        """In force for the next request; those that run finish under theirs."""
        self._keyring = Keyring.of(policy)
        self.rates.keep((key.name for key in policy.keys), self.machine.now_s())
        self.gate.replace(policy)
        self.policy = policy
        self._polled = None
        self.turns.give()

    # --- what goes back

    def use(self) -> Mapping[EndpointId, EndpointUse]:
        """Endpoints of the list that were used, and withdrawn ones where requests still run."""
        self._forget_retired()
        now_s = self.machine.now_s()
        found = {known: state.use(now_s) for known, state in self._states.items() if state.used}
        for state in self._retired:
            use = state.use(now_s)
            newer = found.get(state.endpoint.id)
            if newer is not None:  # it moved: what runs at the old address counts beside what runs at the new
                use = attrs.evolve(
                    newer,
                    in_flight=newer.in_flight + use.in_flight,
                    last_used_s=min(newer.last_used_s, use.last_used_s),
                    silent_s=max(newer.silent_s, use.silent_s),
                )
            found[state.endpoint.id] = use
        return MappingProxyType(found)

    def acknowledged(self) -> int:
        """The generation that is acted on; 0 before the first."""
        return self._generation

    def settled(self) -> bool:
        """A list that was given is acted on from the return on."""
        return True

    def _forget_retired(self) -> None:
        self._retired = [state for state in self._retired if state.running]

    # --- what connections ask

    def state(self, endpoint: EndpointId) -> EndpointState:
        """An endpoint of the current list."""
        return self._states[endpoint]

    def states(self) -> list[EndpointState]:
        return list(self._states.values())

    @property
    def listed(self) -> int:
        """Endpoints of the current list."""
        return len(self._states)

    def polled(self) -> tuple[EndpointState, ...]:
        """Those whose engines are asked for their load: where a model has more than one, and load decides. One tuple until that changes.

        Where they are too many to ask each once a second, only those of models that somebody has asked for of late: a fleet at rest
        costs nothing, and of what is in use the figures are newer.
        """
        if self._polled is None:
            self._polled = self._between_which_load_decides(None)
            self._polled_in_use = None
        if len(self._polled) <= POLLS_PER_S_MAX:
            return self._polled
        in_use = self._models_in_use()
        if self._polled_in_use is None or self._polled_in_use[0] != in_use:
            self._polled_in_use = in_use, self._between_which_load_decides(in_use)
        return self._polled_in_use[1]

    def _between_which_load_decides(self, models: frozenset[str] | None) -> tuple[EndpointState, ...]:
        """Of these models; None: of all."""
        found: dict[EndpointId, None] = {}
        if self.policy.route.policy == LEAST_LOAD:
            for target in self.table.targets.values():
                if target.count > 1 and (models is None or target.model in models):
                    found.update((candidate.endpoint.id, None) for tier in target.tiers for candidate in tier)
        return tuple(self._states[known] for known in found)

    def _models_in_use(self) -> frozenset[str]:
        """Those of which a request has gone to an engine within IN_USE_S, as seen by looks IN_USE_LOOK_S apart."""
        now_s = self.machine.now_s()
        if now_s >= self._in_use_look_s:
            self._in_use_look_s = now_s + IN_USE_LOOK_S
            for model, histogram in self.metrics.overhead_seconds.items():
                count = sum(histogram.counts)
                seen = self._in_use.get(model)
                if seen is None or seen[0] != count:
                    self._in_use[model] = count, now_s
            self._in_use = {model: seen for model, seen in self._in_use.items() if model in self.table.targets}
            self._models_seen = frozenset(model for model, seen in self._in_use.items() if now_s - seen[1] < IN_USE_S)
        return self._models_seen

    # --- who waits for a place

    def _look(self, model: str) -> Choice | Shortage | None:
        """What a model's endpoints offer now; None when it has none."""
        target = self.table.find(model)
        if target is None or target.absence is not None:
            return None
        return self.choose(target)

    def choose(self, target: Target, tried: Container[EndpointId] = ()) -> Choice | Shortage:
        """By the policy in force now, whichever the request came under: places are shared, and all must count them alike."""
        route = self.policy.route
        return choose(
            target.tiers,
            self.state,
            self.reactor.now_s,
            self.machine.rng,
            policy=route.policy,
            max_inflight=route.max_inflight_per_endpoint,
            tried=tried,
        )

    def place_left(self, state: EndpointState, model: str, answered_s: float | None) -> None:
        """A request has left its endpoint; `answered_s`: it was answered, and had its place for so long."""
        if state.breaker.open_until_s is not None or state.out_since_s is not None:
            self._tell_turn(state)
        if answered_s is not None:
            self.turns.times.add(model, answered_s)
        if self.turns.queue.size:
            self.turns.give(state.endpoint.models)

    def _tell_turn(self, state: EndpointState) -> None:
        """A line of the log when an endpoint goes out of use and one when it is back, and none for what happens between."""
        is_out, now_s = state.breaker.open_until_s is not None, self.reactor.now_s
        if is_out and state.out_since_s is None:
            state.out_since_s = now_s
            cooldown_s = self.policy.route.breaker_cooldown_s
            log.warning("an endpoint is out of use", endpoint=state.endpoint.id, why=state.breaker.why_out(), tried_again_in_s=cooldown_s)
        elif not is_out and state.out_since_s is not None:
            log.info("an endpoint is in use again", endpoint=state.endpoint.id, after_s=round(now_s - state.out_since_s, 1))
            state.out_since_s = None

    def wait_estimate_s(self, model: str) -> float:
        """Seconds until somebody who comes now may get a place, as far as can be said."""
        target = self.table.find(model)
        limit = self.policy.route.max_inflight_per_endpoint
        places = sum(c.endpoint.max_inflight or limit for tier in target.tiers for c in tier) if target is not None else 0
        return retry_after_s(self.turns.queue.waiting(model), places, self.turns.times.mean_s(model))

    # --- small questions

    def next_id(self) -> bytes:
        self._count += 1
        return b"%b%x" % (self._id_begin, self._count)

    def authenticate(self, head: Head) -> ApiKey:
        """Raises Unauthenticated."""
        return self._keyring.authenticate(head.headers, self.machine.wall_s())

    def know(self, head: Head) -> Known | None:
        """What was learned of a head that may still be gone by; None where it has to be looked at."""
        known: Known | None = head.known
        if known is None or known.policy is not self.policy or self.waiting:
            return None
        expires = known.key.expires_wall_s
        return known if expires is None or self.machine.wall_s() < expires else None

    def learn(self, head: Head) -> Known:
        """Looks at the head of an admitted request of a route that is relayed. Raises Unauthenticated."""
        known = head.known = Known(head, self.policy, ROUTES[head.path], self.authenticate(head))
        return known

    def told(self, key: ApiKey, exchange: Exchange) -> bytes:
        """The header lines that tell this key of its limits and, where it may see them, of endpoint and times."""
        now_s = self.reactor.now_s
        lines = limit_lines(key, self.rates.use(key.name), now_s)
        if key.operator:
            lines += operator_lines(exchange.endpoint, exchange.started_s, exchange.asked_s, now_s)
        return lines

    def cors(self, origin: bytes | None) -> tuple[tuple[bytes, bytes], ...]:
        """The headers that let a browser's page of that origin read an answer; none for origins that are not configured."""
        allowed = self.policy.cors_origins
        vary = (b"vary", b"Origin")
        if origin is None:
            return (vary,) if allowed and "*" not in allowed else ()
        expose = (b"access-control-expose-headers", _EXPOSED)
        if "*" in allowed:
            return ((b"access-control-allow-origin", b"*"), expose)
        if origin.decode("latin-1") in allowed:
            return ((b"access-control-allow-origin", origin), expose, vary)
        return (vary,)

    def admit(self, head: Head) -> Problem | None:
        """May this request go on, judged by its head alone? None when it may."""
        path = head.path
        method = head.method
        if method == "OPTIONS":
            return None
        if method == "CONNECT":
            return _wrong_method(method, path, b"GET, HEAD, POST, OPTIONS")
        if path in ("/health", "/ready", "/metrics"):
            if method not in ("GET", "HEAD"):
                return _wrong_method(method, path, b"GET, HEAD, OPTIONS")
            return self._admit_metrics(head) if path == "/metrics" else None
        if self.waiting and (path in ROUTES or path.startswith("/v1/models")):
            return Problem(503, "no_list", "this router has not heard from a control plane yet", retry_after_s=WAITING_RETRY_S)
        if head.expect is not None and head.expect != b"100-continue":
            return Problem(417, "expectation_failed", "the only expectation met here is 100-continue")
        if path in ROUTES:
            if method != "POST":
                return _wrong_method(method, path, b"POST, OPTIONS")
        elif path == "/v1/models" or path.startswith("/v1/models/"):
            if method not in ("GET", "HEAD"):
                return _wrong_method(method, path, b"GET, HEAD, OPTIONS")
        else:
            return _unknown_route(path)
        try:
            self.authenticate(head)
        except Unauthenticated as err:
            return problem_of(err)
        return None

    def _admit_metrics(self, head: Head) -> Problem | None:
        if self.loopback and not self._metrics_token:
            return None
        if not self._metrics_token:
            return Problem(403, "denied", "/metrics is open on loopback only, until a token is set ([metrics] token)")
        import hmac

        told = head.get(b"authorization") or b""
        scheme, _, rest = told.partition(b" ")
        if scheme.lower() == b"bearer" and hmac.compare_digest(rest.strip(b" \t"), self._metrics_token.encode()):
            return None
        return Problem(401, "unauthenticated", "/metrics asks for its token as `Authorization: Bearer TOKEN`")

    def local_answer(self, head: Head, exchange: Exchange) -> Local | None:
        """The answer to a request that needs no engine; None when it is to be relayed. Raises LlmgwError."""
        path = head.path
        if head.method == "OPTIONS":
            return self._preflight(head, path)
        if path in ROUTES:
            return None
        if path == "/health":
            return 200, [_JSON], b'{"status":"ok"}'
        if path == "/ready":
            return self._ready()
        if path == "/metrics":
            return 200, METRICS_HEADERS, self._render_metrics()
        key = self.authenticate(head)
        exchange.caller = key if key.told else None
        exchange.key = key.name
        if path in ("/v1/models", "/v1/models/"):
            rows = [self._model(self.table.targets[name]) for name in self.table.listed if self.table.targets[name].allowed(key)]
            return 200, [_JSON], json.dumps({"object": "list", "data": rows}).encode()
        name = unquote_to_bytes(path.removeprefix("/v1/models/")).decode("utf-8", "replace")
        target = self.table.find(name)
        if target is None or not target.allowed(key):
            raise self.no_model(name, key)
        return 200, [_JSON], json.dumps(self._model(target)).encode()

    def no_model(self, name: str, key: ApiKey) -> NotFound:
        """The 404 of a name that nobody knows, or not to this key; it names the nearest that the key may use."""
        near = self.table.near(name, key)
        hint = f"; did you mean {near!r}?" if near else ""
        return NotFound(f"the model {cut(name, 100)!r} does not exist{hint}", code="model_not_found")

    def _model(self, target: Target) -> dict[str, object]:
        row: dict[str, object] = {"id": target.name, "object": "model", "created": self._started_wall_s, "owned_by": "llmgw"}
        if target.absence is not None:
            row["state"] = "not_ready"
            row["reason"] = target.absence.reason.value
        lengths = [
            length
            for tier in target.tiers
            for candidate in tier
            if (length := self._states[candidate.endpoint.id].lengths.get(candidate.engine_name)) is not None
        ]
        if lengths:
            row["max_model_len"] = min(lengths)  # whoever gets the request takes as much
        return row

    def _preflight(self, head: Head, path: str) -> Local:
        origin = head.get(b"origin")
        asked = head.get(b"access-control-request-method")
        known = path == "*" or path in ROUTES or path in ("/health", "/ready", "/metrics") or path.startswith("/v1/models")
        allow = b"POST, OPTIONS" if path in ROUTES else b"GET, HEAD, OPTIONS"
        if not known:
            raise NotFound(f"no such route: {path[:200]}", code="unknown_route")
        if origin is None or asked is None:
            return 204, [(b"allow", allow)], b""
        if not any(name == b"access-control-allow-origin" for name, _ in self.cors(origin)):
            return 204, [(b"allow", allow)], b""
        named = (head.get(b"access-control-request-headers") or _CORS_HEADERS)[:_HEADER_LIST_MAX]
        return (
            204,
            [
                (b"allow", allow),
                (b"access-control-allow-methods", allow),
                (b"access-control-allow-headers", named),
                (b"access-control-max-age", _CORS_AGE_S),
            ],
            b"",
        )

    def _ready(self) -> Local:
        reasons = []
        now_s = self.machine.now_s()
        if self.draining:
            reasons.append("the router is stopping")
        if self.waiting:
            reasons.append("no control plane has been heard yet")
        elif not self._states:
            reasons.append("no endpoint is known")
            absences = self._endpoints.absences[:READY_REASONS_MAX]
            reasons += [f"{absence.names[0]}: {absence.reason.value}" for absence in absences]
        elif not any(state.breaker.admits(now_s) or state.breaker.slow for state in self._states.values()):
            reasons.append("no endpoint can be reached")
        body = json.dumps({"status": "not_ready" if reasons else "ready", "reasons": reasons, "endpoints": len(self._states)}).encode()
        return (503 if reasons else 200), [_JSON], body

    def _render_metrics(self) -> bytes:
        families = self.figures()
        if self.following is not None:
            families += plain(followed(self.following()))
        if self.book is not None:
            families += plain(accounted(self.book.lost))
        return text_of(families)

    def figures(self) -> list[Family]:
        """What this process has counted, for /metrics. Costs about 10 us for each endpoint."""
        self._forget_retired()
        self.metrics.log_dropped = self._log_dropped()
        now_s = self.machine.now_s()
        rows: dict[EndpointId, EndpointFigures] = {}
        for state in [*self._retired, *self._states.values()]:
            known = state.endpoint.id
            before = rows.get(known)
            rows[known] = EndpointFigures(
                state.running + (before.in_flight if before else 0),
                state.breaker.health(now_s).value,
                state.requests + (before.requests if before else 0),
                state.failures + (before.failures if before else 0),
                state.resting_until_s > now_s,
                state.polled,
                state.engine_load if state.engine_load is not None and now_s < state.engine_load.until_s else None,
            )
        waiting = {target.model: self.turns.queue.waiting(target.model) for target in self.table.targets.values() if target.tiers}
        return plain(counted(self.metrics, rows, len(self.connections), self._generation, waiting))

    def log(self, exchange: Exchange, sent_bytes: int) -> None:
        """One line, and the counts, for a request that is over."""
        total_s = self.reactor.now_s - exchange.started_s
        self.metrics.finished(exchange.model_label, exchange.status, total_s, exchange.first_s)
        tokens = exchange.meter.tokens() if exchange.meter is not None else None
        if exchange.charge is not None:
            _settle(exchange.charge, exchange, tokens, self.reactor.now_s)
        if exchange.meter is not None and exchange.first_s is not None:  # the client got content, whatever came of it then
            self._account(exchange, tokens)
        self._write_log(
            access_log.line(
                self.machine.wall_s(),
                exchange.status,
                exchange.head.method if exchange.head is not None else "",
                exchange.path,
                exchange.model,
                exchange.endpoint,
                exchange.key,
                exchange.stream,
                sent_bytes,
                exchange.first_s,
                total_s,
                exchange.id,
                _with_flags(exchange) if exchange.flags else exchange.reason or "ok",
            )
        )

    def _account(self, exchange: Exchange, tokens: Tokens | None) -> None:
        unknown = tokens is None and exchange.path in TELLS
        self.metrics.used(exchange.model_label, tokens, unknown=unknown)
        if self.book is not None:
            self.book.add(self.machine.wall_s(), exchange.key, exchange.model_label, tokens, unknown=unknown)

    def report_bug(self, request_id: bytes, error: Exception) -> None:
        if self._report is not None:
            frames = "".join(traceback.format_tb(error.__traceback__))  # frames only: an error's text may hold a client's data
            self._report(f"request {request_id.decode()} failed by our own fault: {type(error).__name__}\n{frames}")

    def report_poll_bug(self, state: EndpointState, error: Exception) -> None:
        if self._report is not None:
            frames = "".join(traceback.format_tb(error.__traceback__))
            self._report(f"asking {state.endpoint.id} for its load failed by our own fault: {type(error).__name__}\n{frames}")

    def report_length_bug(self, error: Exception) -> None:
        if self._report is not None:
            frames = "".join(traceback.format_tb(error.__traceback__))
            self._report(f"asking an engine for its models failed by our own fault: {type(error).__name__}\n{frames}")

    # --- the end

    async def drain(self, deadline_s: float) -> None:
        """Takes no new connection, lets running answers finish, and returns when all are over.

        At `deadline_s` (on the machine's clock) what still streams gets an error event and ends. The listener's sweeper
        watches over it, so `serve` must be running.
        """
        self.draining = True
        self.drain_deadline_s = deadline_s
        self.stop_listening()
        for connection in list(self.connections):
            connection.close_idle()
        for state in self._states.values():
            state.close_idle()
        self.turns.stop()
        if not self.connections:
            self.emptied.set()
        await self.emptied.wait()

    def sweep(self, now_s: float) -> None:
        """Called with the connections' sweeps, before them."""
        self.reactor.tick(now_s)
        if now_s >= self._swept_s + IDLE_SWEEP_S:
            self._swept_s = now_s
            for state in self._states.values():
                state.sweep(now_s)
        if self.turns.queue.size:  # cool-downs and rests end by time alone
            self.turns.give()
        if not self.draining:
            return
        if now_s >= self.drain_deadline_s + HARD_END_S:
            self.emptied.set()
        elif now_s >= self.drain_deadline_s:
            for connection in list(self.connections):
                connection.kick(Kick.STOPPING)

    @property
    def is_full(self) -> bool:
        """Has it as many clients as it may have?"""
        return len(self.connections) >= self._clients_max

    async def wait_room(self) -> None:
        """Until another client may be taken. That some wait is told, but not over and over."""
        now_s = self.machine.now_s()
        if now_s >= self._told_full_s + FULL_AGAIN_S:
            self._told_full_s = now_s
            log.warning("the limit of open files allows no more clients; new ones wait until others leave", clients=len(self.connections))
        while self.is_full:
            await self._room.park()

    def left(self, connection: Connection) -> None:
        self.connections.discard(connection)
        if self._room:
            self._room.unpark_all()
        if self.draining and not self.connections:
            self.emptied.set()


def _nothing() -> None:
    """No port is open."""


def _counts_alone(endpoint: Endpoint) -> None:
    """One process sees all of its requests anyway."""


def _nobody_wakes(model: str) -> None:
    """A router on a static list has nobody to tell, and in a control plane's own process the planner sees for itself."""


def _settle(charge: Charge, exchange: Exchange, tokens: Tokens | None, now_s: float) -> None:
    """What the engine says counts; for content without a word of it the estimate; without content nothing was used."""
    if tokens is not None:
        charge.settle(tokens.prompt + tokens.completion, now_s)
    elif exchange.first_s is None:
        charge.settle(0, now_s)


def _with_flags(exchange: Exchange) -> str:
    return ",".join((exchange.reason or "ok", *(f"flag:{name}" for name in exchange.flags)))


def _wrong_method(method: str, path: str, allow: bytes) -> Problem:
    text = f"{method} is not possible on {path[:200]}; possible: {allow.decode()}"
    return Problem(405, "method_not_allowed", text, headers=((b"allow", allow),))


def _unknown_route(path: str) -> Problem:
    name = not_offered(path)
    if name is not None:
        return Problem(404, "not_offered", f"llmgw does not offer {name} (nor any of {', '.join(NOT_OFFERED)}), on purpose")
    if path.startswith(_ADMIN_PATHS):
        text = "this is a router's port, which has /v1; the admin API and the console are at [server] admin_listen, by default port 8081"
        return Problem(404, "router_port", text)
    near = _near_route(path)
    hint = f"; did you mean {near}?" if near else ""
    return Problem(404, "unknown_route", f"llmgw has no route {cut(path, 200)!r}{hint}")


def _near_route(path: str) -> str | None:
    """The route that looks like this one: with /v1 where that was left out, else the most alike."""
    known = (*ROUTES, "/v1/models", "/health", "/ready", "/metrics")
    if f"/v1{path}" in known:
        return f"/v1{path}"
    close = difflib.get_close_matches(path[:NEAR_PATH_MAX], known, n=1, cutoff=NEAR_ROUTE)
    return close[0] if close else None
