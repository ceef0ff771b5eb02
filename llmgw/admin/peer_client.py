"""How a control plane calls another's admin port: one request with the control planes' own token, one whole answer.

Carries orders that reached a standby to the leader, and the words that control planes have for each other. A request that
was carried once is marked, and nobody carries it again.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import Callable, Mapping
from typing import Any, Final
from urllib.parse import quote, urlencode, urlsplit

import attrs
import h11
import trio

from llmgw import __version__
from llmgw.admin.auth import CALLER, HOP, SHOWN, Principal, caller, tell_presented
from llmgw.admin.calls import Call, Reply
from llmgw.admin.edge import CONTROL_PLANE
from llmgw.admin.store_news import BYTES_MAX, decode_news
from llmgw.control.peers import Presence
from llmgw.domain.errors import Unavailable
from llmgw.domain.usage import UsageBatch
from llmgw.identity.admission import NOT_JOINED
from llmgw.identity.trust import Trust, refusal, refused, wrong_server
from llmgw.protocol.codec import unstructure
from llmgw.store.admin_tokens import Role
from llmgw.store.copies import News, Position

WRONG_TOKEN: Final = (
    "the leader at {} refuses this control plane's own token: the two have read different control-token files; on one store file "
    "restart both, with a bucket give both the same one, or let this one join (`llmgw server add`)"
)
NO_CONTROL_PLANE: Final = (
    "what answers at {} is no control plane's admin port (it said {}): [server] advertise of the control plane that leads, or "
    "what stands before its admin port, names the wrong address"
)
OF_THE_CALLER: Final = "certificate_missing"  # of a machine that would renew its own through us
CONNECT_S: Final = 2.0
ORDER_S: Final = 10.0  # an order's answer takes milliseconds; a store that waits for its lock takes 5 s
ANSWER_BYTES_MAX: Final = 16 * 1024 * 1024
READ_BYTES: Final = 65_536
PRESENT_PATH: Final = "/api/v1/leader/standbys"
RELEASED_PATH: Final = "/api/v1/leader/released"
CHANGED_PATH: Final = "/api/v1/leader/changed"
USAGE_PATH: Final = "/api/v1/leader/usage"
NEWS_PATH: Final = "/api/v1/leader/store"
NEWS_S: Final = 30.0  # a whole store over a slow link; news alone come within a second
_CARRIED: Final = ("content-type", "idempotency-key", "if-match", "if-none-match", "x-request-id")
_NOT_BACK: Final = frozenset(
    {CONTROL_PLANE, "connection", "content-length", "content-type", "date", "server", "transfer-encoding", "keep-alive"}
)


class PeerClient:
    """`token` is what control planes of one store file have for each other, "" where there is none; `me` names this one in the hop
    mark; `trust` is asked at each connection: whom to believe, and what to show."""

    def __init__(self, token: Callable[[], str], me: Callable[[], str], trust: Callable[[], Trust]) -> None:
        self._token = token
        self._me = me
        self._trust = trust

    async def carry(self, address: str, call: Call) -> Reply:
        """The leader's answer to this call. Raises Unavailable where none came; the order may then have been carried out.

        With code `not_a_control_plane` something else answered, and nothing was carried out.
        """
        headers = {name: value for name, value in call.headers.items() if name in _CARRIED}
        headers["x-request-id"] = call.request_id
        headers[CALLER] = caller(call.principal)
        if call.shown is not None:
            headers[SHOWN] = tell_presented(call.shown)
        target = quote(call.path, safe="/:")
        if call.query:
            target += "?" + urlencode(call.query)
        status, answered, body = await self._ask(address, call.method, target, headers, call.body, ORDER_S)
        if status == 401 and _error_of(body)[0] != OF_THE_CALLER:
            raise _refused_us(address, body)
        kept = {name: value for name, value in answered.items() if name not in _NOT_BACK}
        return Reply(status=status, headers=kept, text=body.decode("utf-8", "replace"), content_type=answered.get("content-type", ""))

    async def present(self, address: str, presence: Presence) -> None:
        await self._tell(address, PRESENT_PATH, attrs.asdict(presence))

    async def say_released(self, address: str) -> bool:
        answer = await self._tell(address, RELEASED_PATH, {})
        return bool(answer.get("is_me"))

    async def say_changed(self, address: str) -> None:
        await self._tell(address, CHANGED_PATH, {})

    async def give_usage(self, address: str, batch: UsageBatch) -> None:
        await self._tell(address, USAGE_PATH, unstructure(batch))

    async def news(self, address: str, position: Position) -> News:
        path = f"{NEWS_PATH}?epoch={position.epoch}&number={position.number}"
        headers = {CALLER: caller(Principal(self._me(), Role.ADMIN))}
        status, _, body = await self._ask(address, "GET", path, headers, b"", NEWS_S, BYTES_MAX)
        _check(address, status, body)
        return await trio.to_thread.run_sync(decode_news, body)

    async def _tell(self, address: str, path: str, value: dict[str, Any]) -> dict[str, Any]:
        headers = {"content-type": "application/json", CALLER: caller(Principal(self._me(), Role.ADMIN))}
        status, _, body = await self._ask(address, "POST", path, headers, json.dumps(value).encode(), CONNECT_S)
        _check(address, status, body)
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError):
            answer = None
        return answer if isinstance(answer, dict) else {}

    async def _ask(
        self,
        address: str,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: bytes,
        deadline_s: float,
        answer_bytes_max: int = ANSWER_BYTES_MAX,
    ) -> tuple[int, dict[str, str], bytes]:
        where = urlsplit(address)
        sent = [("host", where.netloc), ("connection", "close"), ("user-agent", f"llmgw/{__version__}"), *headers.items()]
        sent += [(HOP, self._me()), ("content-length", str(len(body)))]
        if token := self._token():
            sent.append(("authorization", f"Bearer {token}"))
        try:
            with trio.fail_after(deadline_s):
                stream = await self._connect(where.hostname or "", where.port, where.scheme == "https")
                async with stream:
                    asked = h11.Request(method=method, target=target, headers=sent)
                    status, answered, data = await _exchange(stream, asked, body, answer_bytes_max)
        except (OSError, trio.TooSlowError, trio.BrokenResourceError, h11.ProtocolError, ssl.SSLError) as err:
            if (fault := refusal(err)) is not None:
                raise Unavailable(f"the certificate of the control plane at {address} {fault[1]}", code=fault[0]) from err
            if (fault := refused(err)) is not None:
                raise Unavailable(f"the control plane at {address} refuses this one: {fault[1]}", code=fault[0]) from err
            raise Unavailable(f"the control plane at {address} did not answer", code="leader_unreachable", retry_after_s=1.0) from err
        if CONTROL_PLANE not in answered:  # a router's 404, say, must not pass for the leader's
            raise Unavailable(NO_CONTROL_PLANE.format(address, status), code="not_a_control_plane")
        return status, answered, data

    async def _connect(self, host: str, port: int | None, secure: bool) -> trio.SocketStream | trio.SSLStream[trio.SocketStream]:
        plain = await trio.open_tcp_stream(host, port or (443 if secure else 80))
        if not secure:
            return plain
        secured = trio.SSLStream(plain, self._trust().client(), server_hostname=host, https_compatible=True)
        await secured.do_handshake()
        if why := wrong_server(secured.getpeercert()):
            await trio.aclose_forcefully(secured)
            raise Unavailable(f"{host} {why}", code="certificate_role")
        return secured


def _refused_us(address: str, body: bytes) -> Unavailable:
    """It is our certificate or token that it refuses, not that of whoever gave the order."""
    code, message = _error_of(body)
    if code.startswith("certificate_") or code == NOT_JOINED:
        return Unavailable(f"the leader at {address} refuses this control plane: {message}", code=code)
    return Unavailable(WRONG_TOKEN.format(address), code="control_token")


def _error_of(body: bytes) -> tuple[str, str]:
    """(code, words) of an error's body, each "" where there is none."""
    try:
        error = json.loads(body)["error"]
        return str(error["code"]), str(error["message"])
    except (ValueError, RecursionError, KeyError, TypeError):
        return "", ""


def _check(address: str, status: int, body: bytes) -> None:
    """Raises Unavailable for an answer that is none."""
    if status == 401:
        raise _refused_us(address, body)
    if status >= 300:
        raise Unavailable(f"{address} answered {status}: {body[:200].decode('utf-8', 'replace')}", code="peer")


async def _exchange(
    stream: trio.SocketStream | trio.SSLStream[trio.SocketStream], asked: h11.Request, body: bytes, answer_bytes_max: int
) -> tuple[int, dict[str, str], bytes]:
    connection = h11.Connection(h11.CLIENT)
    out = (connection.send(asked) or b"") + (connection.send(h11.Data(data=body)) or b"") + (connection.send(h11.EndOfMessage()) or b"")
    await stream.send_all(out)
    status, headers, answer = 0, {}, bytearray()
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(bytes(await stream.receive_some(READ_BYTES)))
        elif isinstance(event, h11.Response):
            status = event.status_code
            headers = {name.decode("latin1"): value.decode("latin1") for name, value in event.headers}
        elif isinstance(event, h11.Data):
            answer += event.data
            if len(answer) > answer_bytes_max:
                raise h11.RemoteProtocolError("the answer is too large")
        elif isinstance(event, h11.EndOfMessage):
            return status, headers, bytes(answer)
        elif isinstance(event, h11.ConnectionClosed):
            raise h11.RemoteProtocolError("the peer closed the connection")
