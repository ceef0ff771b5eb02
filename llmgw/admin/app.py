"""The admin API as one application: the routes' table bound to the web framework, and around every call the same steps.

Who calls, what may they, was it answered before; then the handler; then one shape for whatever went wrong. Decides nothing.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import ipaddress
import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, cast

import structlog
import trio
from quart import request
from quart.typing import ResponseReturnValue
from quart_trio import QuartTrio
from quart_trio.asgi import TrioASGIHTTPConnection
from quart_trio.wrappers import TrioResponse as Response
from werkzeug.exceptions import HTTPException
from werkzeug.routing import PathConverter

from llmgw.admin import errors
from llmgw.admin.api import (
    console,
    events,
    explain,
    holds,
    identities,
    joining,
    keys,
    leader,
    models,
    nodes,
    openapi,
    pause,
    replicas,
    sessions,
    settings,
    status,
    store,
    usage,
)
from llmgw.admin.auth import HOP, AdminAuth, FailureLimit, Principal, is_token, marked_by, told_presented
from llmgw.admin.calls import Call, Reply, Route, given_again, kept_answer, request_text
from llmgw.admin.door import Door, presented_in
from llmgw.admin.edge import CONTROL_PLANE, CONTROL_PLANE_VALUE, AdminApp
from llmgw.admin.limits import Limits
from llmgw.admin.metrics import Metrics
from llmgw.admin.peer_client import PeerClient
from llmgw.admin.relay import PREFIX, Relay, RouterAddress
from llmgw.admin.sign_in import SignIn
from llmgw.control.controller import Controller
from llmgw.domain.errors import Invalid, LlmgwError, Unauthenticated, Unavailable
from llmgw.domain.identity import MachineRole, Presented
from llmgw.domain.ids import OwnerId, holder_name
from llmgw.protocol.websocket import ROUTER_SESSION_PATH, SESSION_PATH
from llmgw.store import idempotency
from llmgw.store.admin_tokens import Role

REQUEST_ID_BYTES: Final = 16
LEADER_S: Final = 1.0  # how long an order waits for somebody to lead: a hand-over takes a tenth of it
QUESTION_S: Final = 2.0  # how long a standby waits for the leader's answer to a question; then it tells what it knows itself
OWN_ORDER_S: Final = 2.0  # how long a reader waits until its own order has come here (product.md, "The admin API")
LOOK_AGAIN_S: Final = 0.1  # between looks meanwhile
SLOW_ANSWER_S: Final = 60.0  # for sending an answer that is no stream; a silent client is let go much earlier
# A fleet's lists are megabytes of words that repeat; over a slow link they would come later than the console calls them fresh.
GZIP_BYTES_MIN: Final = 16_384
GZIP_LEVEL: Final = 1  # an eighth of the size or less; more effort makes little of it and takes several times as long
_SANE_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}\Z")
GUESSED: Final = frozenset({"join_token_unknown"})  # of a secret in a body: counts as a wrong token of its sender
_NOBODY: Final = Principal("", Role.VIEWER)
_JOINING: Final = Principal("a machine", Role.VIEWER)  # it brings a join token or a certificate, and no admin's token
log = structlog.get_logger("llmgw.admin")


def make_app(
    controller: Controller,
    auth: AdminAuth,
    *,
    agent_token: Callable[[], str],
    metrics_token: str = "",
    limits: Limits = Limits(),  # noqa: B008 - a frozen value
    sign_in: SignIn | None = None,
    router: Callable[[], RouterAddress | None] = lambda: None,
    peers: PeerClient | None = None,
    plain: str = "anywhere",
) -> AdminApp:
    """The whole admin port, for `serve_admin`.

    `agent_token` is what agents and routers present that have no certificate; it counts where `plain`, as [tls] has it, says so.
    `metrics_token` is what /metrics asks for where it is not asked over loopback (empty: an admin token there). Every admin token's
    hash is known to `auth`. `sign_in` is given by whoever makes one-time links for the console; `router` tells where the console's
    playground finds the router. `peers` carries orders to the leader; None where there can be no other control plane.
    """
    sign_in = sign_in or SignIn(controller.machine, auth, controller.leadership.cluster_id)
    draining = trio.Event()
    metrics = Metrics(controller)
    failures = FailureLimit(controller.machine.now_s, limits)
    door = Door(controller.identities, agent_token, failures, plain)
    table: list[Route] = [
        *models.routes(controller),
        *replicas.routes(controller),
        *nodes.routes(controller),
        *holds.routes(controller),
        *keys.routes(controller),
        *identities.routes(controller),
        *events.routes(controller, draining, limits),
        *explain.routes(controller),
        *leader.routes(controller),
        *settings.routes(controller),
        *pause.routes(controller),
        *usage.routes(controller),
        *status.routes(controller, metrics, draining.is_set),
        *store.routes(controller),
    ]
    table += openapi.routes(table)
    table += joining.routes(controller)  # for machines that join, which have no token of this API
    table += console.routes(sign_in, failures)  # pages for people: no part of the API
    desk = _Desk(controller, auth, sign_in, failures, metrics, metrics_token, peers, door)
    quart = _make_quart(desk, table, limits)
    agents = sessions.make_sessions_app(controller.sessions.run, door, MachineRole.AGENT, draining)
    routers = sessions.make_sessions_app(controller.routers.run, door, MachineRole.ROUTER, draining)
    of_paths = {SESSION_PATH: agents, ROUTER_SESSION_PATH: routers}
    return AdminApp(quart.asgi_app, of_paths, Relay(sign_in, router, limits), PREFIX, draining, limits)


class _Name(PathConverter):
    """Any name at all, also one that begins with or holds slashes; model names may."""

    regex = ".+?"
    part_isolating = False


class _Connection(TrioASGIHTTPConnection):
    """The end of an answer looks like a hang-up to Quart, which then cancels the task that is still tidying up the connection:
    neither `Connection: close` nor the idle timer would work. A hang-up counts only before the last piece was handed over."""

    async def __call__(self, receive: Any, send: Any) -> None:
        self._answered = False

        async def watched(message: Any) -> None:
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                self._answered = True
            await send(message)

        await super().__call__(receive, watched)

    async def handle_messages(self, nursery: trio.Nursery, request: Any, receive: Any) -> None:  # type: ignore[override]
        await super(TrioASGIHTTPConnection, self).handle_messages(request, receive)
        if not self._answered:
            nursery.cancel_scope.cancel()


def _make_quart(desk: _Desk, table: Sequence[Route], limits: Limits) -> QuartTrio:
    quart = QuartTrio("llmgw.admin", static_folder=None, template_folder=None)
    quart.asgi_http_class = _Connection
    quart.url_map.merge_slashes = False  # //x is not /x: what is matched is what was asked for
    quart.url_map.converters["name"] = _Name
    quart.config["MAX_CONTENT_LENGTH"] = limits.body_bytes
    quart.config["BODY_TIMEOUT"] = limits.body_s
    quart.config["RESPONSE_TIMEOUT"] = SLOW_ANSWER_S
    quart.config["PROPAGATE_EXCEPTIONS"] = False
    for index, route in enumerate(table):
        quart.add_url_rule(
            route.rule, f"{index}", functools.partial(desk.answer, route), methods=[route.method], provide_automatic_options=False
        )
    quart.before_request(desk.before)
    quart.after_request(desk.after)
    quart.register_error_handler(HTTPException, desk.refused_by_framework)
    quart.register_error_handler(Exception, desk.crashed)
    return quart


class _Desk:
    """The steps around every call."""

    def __init__(
        self,
        controller: Controller,
        auth: AdminAuth,
        sign_in: SignIn,
        failures: FailureLimit,
        metrics: Metrics,
        metrics_token: str,
        peers: PeerClient | None,
        door: Door,
    ) -> None:
        self._controller = controller
        self._auth = auth
        self._sign_in = sign_in
        self._failures = failures
        self._metrics = metrics
        self._metrics_token = metrics_token
        self._peers = peers
        self._door = door
        self._under_way: dict[str, trio.Event] = {}  # idempotency keys whose first request has not been answered yet
        # By token: the settings version (0: another order) that its last order through this standby led to, until it is read here.
        self._owed: dict[str, int] = {}

    async def before(self) -> ResponseReturnValue | None:
        """A path that names no route tells a stranger nothing under /api: the token comes first."""
        if request.url_rule is None and request.path.lstrip("/").startswith("api"):
            try:
                self._authenticate()
            except LlmgwError as err:
                return self._error(err)
        return None

    async def after(self, response: Response) -> Response:
        response.headers["X-Request-ID"] = request_id(self._controller.machine.fresh_hex)
        response.headers[CONTROL_PLANE] = CONTROL_PLANE_VALUE
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers.setdefault("Cache-Control", "no-store")
        response.headers.setdefault("Content-Security-Policy", "default-src 'none'; frame-ancestors 'none'")
        response.headers["Referrer-Policy"] = "no-referrer"
        if response.mimetype == "application/json":
            await self._compress(response)
        rule = request.url_rule.rule if request.url_rule is not None else "none"
        self._metrics.count(request.method if rule != "none" else "other", rule, response.status_code)
        log.debug("admin request", method=request.method, path=request.path, status=response.status_code)
        return response

    async def _compress(self, response: Response) -> None:
        """A large answer for a client that takes it so. One with a revision stays as it is: its ETag names these bytes."""
        if request.method != "GET" or "ETag" in response.headers or (response.content_length or 0) < GZIP_BYTES_MIN:
            return
        response.headers["Vary"] = "Accept-Encoding"
        if request.accept_encodings.quality("gzip") > 0:
            data = await response.get_data(as_text=False)
            response.set_data(await self._controller.machine.run_sync(lambda: gzip.compress(data, GZIP_LEVEL, mtime=0)))
            response.headers["Content-Encoding"] = "gzip"

    async def answer(self, route: Route, **names: str) -> ResponseReturnValue:
        """One call of one route, whatever comes of it."""
        try:
            if route.role is None:
                principal = _JOINING if route.is_order else _NOBODY
                self._check_metrics(route)
            else:
                principal = self._authenticate()
                principal.require(route.role)
                _check_query(route, request.args)
            call = Call(
                principal,
                request.method,
                request.path,
                {name: request.args.getlist(name)[-1] for name in request.args},
                {name.lower(): value for name, value in request.headers.items()},
                bytes(cast(bytes, await request.get_data())) if route.is_order else b"",
                _peer(),
                self._controller.machine.wall_s(),
                request_id(self._controller.machine.fresh_hex),
                self._shown() if route.role is None and route.is_order else None,
            )
            reply = await self._reply(route, call, names)
        except LlmgwError as err:
            if err.code in GUESSED and not self._vouched():
                try:
                    self._failures.failed(_peer())
                except LlmgwError as too_many:
                    err = too_many
            if err.status >= 500 and not isinstance(err, Unavailable):
                log.error("an admin request failed", path=request.path, exc_info=err)
            return self._error(err)
        return _response(reply)

    async def _reply(self, route: Route, call: Call, names: dict[str, str]) -> Reply:
        leadership = self._controller.leadership
        if route.is_leaders and not leadership.is_leader:
            if route.is_order:
                return await self._carry(call)
            # A question that nobody answers is answered by what is known here.
            with contextlib.suppress(Unavailable), trio.move_on_after(QUESTION_S):
                told = await self._carry(call)
                return told if route.beside is None or told.status != 200 else route.beside(told)
        if not route.is_order:
            if route.role is not None and not route.late:
                await self._catch_up(call.principal.name)
            return await route.handler(call, **names)
        if route.is_leaders and not leadership.confirmed(self._controller.machine.now_s()):
            raise Unavailable(
                "the lease's store does not answer, so nothing can be changed now; the cluster is kept as it was asked for",
                code="unconfirmed",
                retry_after_s=1.0,
            )
        return await self._order(route, call, names)

    async def _carry(self, call: Call) -> Reply:
        """An order that reached a standby goes to the leader, once. Raises Unavailable: nothing was done here."""
        if HOP in call.headers:
            raise Unavailable("this control plane does not lead; its sender was wrong about that", code="not_leader", retry_after_s=1.0)
        address = self._controller.peers.leader_address() or await self._controller.peers.wait_leader(LEADER_S)
        if not address or self._peers is None:
            raise Unavailable("no control plane is known to lead: nothing was changed", code="no_leader", retry_after_s=1.0)
        reply = await self._peers.carry(address, call)
        if call.method != "GET" and reply.status < 300:
            self._owed[call.principal.name] = max(self._owed.get(call.principal.name, 0), _settings_version(call, reply))
            with contextlib.suppress(Unavailable):  # it was carried out all the same
                await self._catch_up(call.principal.name)  # whoever asked sees here what was changed there
        return reply

    async def _catch_up(self, name: str) -> None:
        """Whoever has changed something through this standby reads here at least that. Raises Unavailable after OWN_ORDER_S."""
        if name not in self._owed:
            return
        with trio.move_on_after(OWN_ORDER_S):
            while name in self._owed:
                owed = self._owed[name]
                if await self._has_read(owed):
                    if self._owed.get(name) == owed:
                        del self._owed[name]
                    return
                machine = self._controller.machine
                await machine.sleep_until(machine.now_s() + LOOK_AGAIN_S)
            return
        raise Unavailable(
            "this standby cannot read yet what was just changed through it: ask again, or ask the leader", code="behind", retry_after_s=1.0
        )

    async def _has_read(self, version: int) -> bool:
        """Has everything been read here once more, and with it this version of the settings?"""
        if self._controller.leadership.is_leader:
            return True
        try:
            await self._controller.reread()
        except Unavailable:
            return False
        poller = self._controller.settings_poller
        looked = poller.looked
        poller.nudge()
        await looked.wait()
        return poller.newest >= version

    async def _order(self, route: Route, call: Call, names: dict[str, str]) -> Reply:
        """An order is carried out once per idempotency key; its repeats get the first answer."""
        with self._controller.ordering():
            return await self._order_once(route, call, names)

    async def _order_once(self, route: Route, call: Call, names: dict[str, str]) -> Reply:
        if not route.remembered or call.key is None:
            return await route.handler(call, **names)
        key = f"http:{call.key}"
        while (first := self._under_way.get(key)) is not None:
            await first.wait()
        self._under_way[key] = done = trio.Event()
        try:
            store, asked = self._controller.store, request_text(call)
            kept = await idempotency.find(store, key, asked)
            if kept is not None:
                return given_again(kept)
            reply = await route.handler(call, **names)
            if reply.kept:
                await idempotency.keep(store, self._controller.leadership.epoch, key, asked, kept_answer(reply), call.at_wall_s)
            return reply
        finally:
            del self._under_way[key]
            done.set()

    def _authenticate(self) -> Principal:
        """A token, or else the console's session. Raises Unauthenticated; Overloaded for an address that failed too often."""
        headers = _raw_headers()
        if not any(name.lower() == b"authorization" for name, _ in headers) and self._sign_in.has_cookie(headers):
            return self._sign_in.check(headers, request.method).principal
        scope = cast(dict[str, Any], request.scope)
        if (owner := marked_by(headers)) is not None:
            self._door.check_peer(scope, holder_name(OwnerId(owner)))  # whoever is refused as that guesses no token
        try:
            found = self._auth.check(headers, vouched=self._vouched(), local=self._local())
        except Unauthenticated as err:
            if err.code == "token_invalid":  # none at all is no guess
                self._failures.failed(_peer())
            raise
        if found.peer:
            self._door.let_in_peer(scope)
        return found

    def _vouched(self) -> bool:
        return request.scope is not None and self._door.vouches(cast(dict[str, Any], request.scope))

    def _local(self) -> bool:
        return self._door.counts_tokens_of(cast(dict[str, Any], request.scope))

    def _shown(self) -> Presented | None:
        """Whose certificate the request came with: the connection's own, or the one that another control plane tells of."""
        scope = cast(dict[str, Any], request.scope)
        headers = _raw_headers()
        if self._auth.is_peer(headers, vouched=self._vouched(), local=self._local()):
            return told_presented(headers)
        return presented_in(scope)

    def _check_metrics(self, route: Route) -> None:
        if route.rule != "/metrics" or _over_loopback():
            return
        if self._metrics_token and is_token(_raw_headers(), self._metrics_token):
            return
        self._authenticate()

    async def refused_by_framework(self, err: HTTPException) -> ResponseReturnValue:
        code, body, headers = errors.of_http(err, request.path, request.method)
        response = _json(body, code, headers)
        if code in (408, 413):
            response.headers["Connection"] = "close"  # what is left of the body is not waited for
        return response

    async def crashed(self, err: Exception) -> ResponseReturnValue:
        log.error("an admin request crashed", path=request.path, exc_info=err)
        return _json(errors.error_body("broken", "broken", "something went wrong on this control plane; its log says what"), 500)

    def _error(self, err: LlmgwError) -> Response:
        return _json(errors.body_of(err), err.status, errors.headers_of(err))


def _settings_version(call: Call, reply: Reply) -> int:
    """The version that an order has led to, where it was one to the settings."""
    etag = reply.headers.get("etag", "").strip('"')
    return int(etag) if call.path.startswith("/api/v1/settings") and etag.isdecimal() else 0


def request_id(fresh_hex: Callable[[int], str]) -> str:
    """The client's own where it sent a sane one, else a fresh one; the same for the whole request."""
    found = cast(dict[str, Any], request.scope).get("llmgw.request_id")
    if found is None:
        given = request.headers.get("x-request-id", "")
        found = given if _SANE_ID.match(given) else fresh_hex(REQUEST_ID_BYTES)
        cast(dict[str, Any], request.scope)["llmgw.request_id"] = found
    return str(found)


def _raw_headers() -> Sequence[tuple[bytes, bytes]]:
    assert request.scope is not None
    return list(request.scope["headers"])


def _peer() -> str:
    client = request.scope.get("client") if request.scope is not None else None
    return str(client[0]) if client else "local"


def _over_loopback() -> bool:
    """Was the request sent to an address of this machine only (or to a unix socket)?"""
    server = request.scope.get("server") if request.scope is not None else None
    if not server or server[1] is None:
        return True
    try:
        return ipaddress.ip_address(str(server[0]).partition("%")[0]).is_loopback
    except ValueError:
        return False


def _response(reply: Reply) -> Response:
    if reply.stream is not None:
        if request.method == "HEAD":  # a generator would be run to an end that never comes
            return Response("", reply.status, dict(reply.headers), content_type=reply.content_type)
        streamed = Response(reply.stream(), reply.status, dict(reply.headers), content_type=reply.content_type)
        streamed.timeout = None  # the framework's 60 s would cut it in the middle without a word
        return streamed
    if reply.text is not None:
        return Response(reply.text, reply.status, dict(reply.headers), content_type=reply.content_type)
    return _json(reply.data, reply.status, dict(reply.headers))


def _json(data: Any, code: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json.dumps(data) + "\n", code, headers or {}, content_type="application/json")


def _check_query(route: Route, names: Iterable[str]) -> None:
    """With a parameter that nobody knows nothing is done: `dryrun` for `dry_run` would write, `form` for `from` tell of another time.

    Raises Invalid.
    """
    for name in names:
        if name not in route.query:
            known = f"known: {', '.join(route.query)}" if route.query else "this route knows none"
            raise Invalid(f"unknown parameter {name[:100]!r}; {known}", param=name[:100])
