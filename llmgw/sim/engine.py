"""A simulated engine that really answers: OpenAI's chat, completions and embeddings over HTTP, made up, at a given speed.

Small on purpose: one request a connection at a time, bodies with a length, no TLS. It knows its replica's key. As in a real one,
the work on a request ends when its client hangs up.
"""

from __future__ import annotations

import json
import random
import socket
from collections.abc import AsyncIterator
from typing import Any, Final

import h11
import trio

from llmgw.domain.ports import Machine
from llmgw.domain.replica import ReplicaReport

WORDS: Final = ("one", "two", "three", "red", "green", "blue", "north", "south", "sun", "moon", "river", "stone", "yes", "no", "maybe")
BODY_BYTES_MAX: Final = 8 * 1024 * 1024
READ_BYTES: Final = 65_536
TOKENS_DEFAULT: Final = 32
TOKENS_MAX: Final = 100_000
DIMENSIONS: Final = 16  # of a made-up embedding
CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
EMBEDDINGS: Final = "/v1/embeddings"


class SimEngine:
    """One replica's server. `tokens_per_s` is the speed of one stream, `hang_share` the share of requests that are never answered.

    Words, embeddings and which requests hang follow from `seed`.
    """

    def __init__(self, machine: Machine, report: ReplicaReport, tokens_per_s: float, hang_share: float = 0.0, seed: str = "") -> None:
        self._machine = machine
        self._report = report
        self.tokens_per_s = tokens_per_s
        self._hang_share = hang_share
        self._seed = seed
        self._hangs = random.Random(f"{seed}/hangs")
        self.running = 0
        self.tokens = 0

    async def serve(self, *, task_status: trio.TaskStatus[object] = trio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled; says started() when it listens. Raises OSError when the port is taken."""
        host, _, port = self._report.url.removeprefix("http://").rpartition(":")
        await trio.serve_tcp(self._converse, int(port), host=host, task_status=task_status)

    async def _converse(self, stream: trio.SocketStream) -> None:
        try:
            while await self._exchange(stream, h11.Connection(h11.SERVER)):
                pass
        except (trio.BrokenResourceError, trio.ClosedResourceError, h11.RemoteProtocolError):
            return  # the peer hung up or spoke something else

    async def _exchange(self, stream: trio.SocketStream, http: h11.Connection) -> bool:
        """One request and its answer; False at the end of the connection."""
        request: h11.Request | None = None
        body = b""
        while True:
            event = http.next_event()
            if event is h11.NEED_DATA:
                http.receive_data(await stream.receive_some(READ_BYTES))
            elif isinstance(event, h11.Request):
                request = event
            elif isinstance(event, h11.Data):
                body += event.data
                if len(body) > BODY_BYTES_MAX:
                    return False
            elif isinstance(event, h11.EndOfMessage):
                break
            else:
                return False
        assert request is not None
        await self._answer(stream, http, request, body)
        return http.our_state is h11.DONE and http.their_state is h11.DONE

    async def _answer(self, stream: trio.SocketStream, http: h11.Connection, request: h11.Request, body: bytes) -> None:
        path = request.target.decode("ascii", "replace").partition("?")[0]
        if path == "/health":
            await self._whole(stream, http, 200, {"status": "ok"})
        elif path == "/metrics":
            text = f"vllm:num_requests_running {self.running}\nvllm:num_requests_waiting 0\nvllm:generation_tokens_total {self.tokens}\n"
            await self._whole(stream, http, 200, text.encode(), b"text/plain")
        elif self._report.key and dict(request.headers).get(b"authorization") != b"Bearer " + self._report.key.encode():
            await self._whole(stream, http, 401, {"error": {"message": "wrong key", "type": "auth", "param": None, "code": "wrong_key"}})
        else:
            try:
                asked = json.loads(body)
                count = min(int(asked.get("max_tokens") or TOKENS_DEFAULT), TOKENS_MAX)
            except (ValueError, AttributeError, TypeError):
                await self._whole(stream, http, 400, {"error": {"message": "not a request", "type": "bad", "param": None, "code": "bad"}})
                return
            await self._work(stream, http, path, asked, count)

    async def _work(self, stream: trio.SocketStream, http: h11.Connection, path: str, asked: dict[str, Any], count: int) -> None:
        """One request that counts as running, for as long as its client is there."""
        if path not in (CHAT, COMPLETIONS, EMBEDDINGS):
            message = f"a simulated engine does not serve {path[:100]}"
            await self._whole(stream, http, 404, {"error": {"message": message, "type": "bad", "param": None, "code": "not_simulated"}})
            return
        self.running += 1
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_until_hung_up, stream, nursery.cancel_scope)
                if self._hangs.random() < self._hang_share:
                    await self._machine.sleep_until(float("inf"))
                if path == EMBEDDINGS:
                    await self._whole(stream, http, 200, self._embeddings(asked))
                elif asked.get("stream"):
                    await self._stream(stream, http, path, asked, count)
                else:
                    text = "".join([word async for word in self._words(count)])
                    await self._whole(stream, http, 200, _answer(path, str(asked.get("model")), text, count))
                nursery.cancel_scope.cancel()
        except* (trio.BrokenResourceError, trio.ClosedResourceError):
            http.send_failed()  # the peer hung up, which is no fault of ours
        finally:
            self.running -= 1

    def _embeddings(self, asked: dict[str, Any]) -> dict[str, Any]:
        """A vector for each text, the same for the same text."""
        given = asked.get("input")
        texts = given if isinstance(given, list) and not all(isinstance(token, int) for token in given) else [given]
        data = []
        for index, text in enumerate(texts):
            rng = random.Random(f"{self._seed}/{text}")
            data.append({"object": "embedding", "index": index, "embedding": [rng.uniform(-1.0, 1.0) for _ in range(DIMENSIONS)]})
        usage = {"prompt_tokens": len(texts), "total_tokens": len(texts)}
        return {"object": "list", "data": data, "model": str(asked.get("model")), "usage": usage}

    async def _words(self, count: int) -> AsyncIterator[str]:
        """At the engine's speed: the same words each time."""
        rng = random.Random(f"{self._seed}/words")
        for _ in range(count):
            await self._machine.sleep_until(self._machine.now_s() + 1.0 / self.tokens_per_s)
            self.tokens += 1
            yield rng.choice(WORDS) + " "

    async def _stream(self, stream: trio.SocketStream, http: h11.Connection, path: str, asked: dict[str, Any], count: int) -> None:
        headers = [(b"content-type", b"text/event-stream"), (b"transfer-encoding", b"chunked")]
        await stream.send_all(http.send(h11.Response(status_code=200, headers=headers)) or b"")
        model = str(asked.get("model"))
        async for word in self._words(count):
            await self._event(stream, http, json.dumps(_chunk(path, model, word, None)))
        await self._event(stream, http, json.dumps(_chunk(path, model, "", "stop")))
        if (asked.get("stream_options") or {}).get("include_usage"):
            usage = {"prompt_tokens": 1, "completion_tokens": count, "total_tokens": count + 1}
            await self._event(stream, http, json.dumps({**_chunk(path, model, "", None), "choices": [], "usage": usage}))
        await self._event(stream, http, "[DONE]")
        await stream.send_all(http.send(h11.EndOfMessage()) or b"")

    async def _event(self, stream: trio.SocketStream, http: h11.Connection, text: str) -> None:
        await stream.send_all(http.send(h11.Data(data=f"data: {text}\n\n".encode())) or b"")

    async def _whole(
        self, stream: trio.SocketStream, http: h11.Connection, status: int, body: dict[str, Any] | bytes, kind: bytes = b"application/json"
    ) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = h11.Response(status_code=status, headers=[(b"content-type", kind), (b"content-length", str(len(data)).encode())])
        parts = (http.send(head), http.send(h11.Data(data=data)), http.send(h11.EndOfMessage()))
        await stream.send_all(b"".join(part or b"" for part in parts))


async def _until_hung_up(stream: trio.SocketStream, work: trio.CancelScope) -> None:
    """Ends `work` when the peer hangs up. What it sends meanwhile is only looked at: it belongs to the next request."""
    try:
        if await stream.socket.recv(1, socket.MSG_PEEK):
            return
    except OSError:
        pass  # reset: gone too
    work.cancel()


def _answer(path: str, model: str, text: str, count: int) -> dict[str, Any]:
    usage = {"prompt_tokens": 1, "completion_tokens": count, "total_tokens": count + 1}
    choice: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
    if path == CHAT:
        choice["message"] = {"role": "assistant", "content": text}
        return {"id": "sim", "object": "chat.completion", "created": 0, "model": model, "choices": [choice], "usage": usage}
    choice["text"] = text
    return {"id": "sim", "object": "text_completion", "created": 0, "model": model, "choices": [choice], "usage": usage}


def _chunk(path: str, model: str, text: str, finish: str | None) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
    if path == CHAT:
        choice["delta"] = {"content": text} if text else {}
        return {"id": "sim", "object": "chat.completion.chunk", "created": 0, "model": model, "choices": [choice]}
    choice["text"] = text
    return {"id": "sim", "object": "text_completion", "created": 0, "model": model, "choices": [choice]}
