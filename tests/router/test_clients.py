"""The official client against a real router: what an application developer sees."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import openai
import pytest
import trio

from tests.router.fakes import DONE, END, FIN, GOOD_S, SH, E, Stage, answer


@pytest.fixture
def client(stage: Stage) -> Iterator[openai.OpenAI]:
    host, port = stage.router.address
    with openai.OpenAI(base_url=f"http://{host}:{port}/v1", api_key="K", max_retries=0, timeout=20) as found:
        yield found


MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]


def test_chat_streams_models_and_completions_work(stage: Stage, client: openai.OpenAI) -> None:
    assert client.chat.completions.create(model="m1", messages=MESSAGES).choices[0].message.content == "ok"
    stage.u1.script = GOOD_S
    chunks = list(client.chat.completions.create(model="fast", messages=MESSAGES, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "abc"
    assert {chunk.model for chunk in chunks} == {"fast"}
    assert {model.id for model in client.models.list()} >= {"m1", "m2", "fast"}
    assert client.models.retrieve("org/Model-7B:Q4_K_M").id == "org/Model-7B:Q4_K_M"
    body = '{"id":"c","object":"text_completion","created":1,"model":"m1","choices":[{"index":0,"text":"t","finish_reason":"stop"}]}'
    stage.u1.script = [answer(200, body)]
    assert client.completions.create(model="m1", prompt="x").choices[0].text == "t"


def test_each_failure_is_the_clients_own_exception(stage: Stage, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="nope", messages=MESSAGES)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").chat.completions.create(model="m1", messages=MESSAGES)
    with pytest.raises(openai.PermissionDeniedError):
        client.with_options(api_key="NARROW").chat.completions.create(model="m1", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="m1", messages="x")  # type: ignore[call-overload]
    stage.u1.script = [answer(429, '{"error":{"message":"slow down"}}', "Retry-After: 0")]
    with pytest.raises(openai.RateLimitError, match="slow down"):
        client.chat.completions.create(model="m1", messages=MESSAGES)
    with pytest.raises(openai.InternalServerError):
        client.chat.completions.create(model="dead", messages=MESSAGES)


def test_a_stream_that_breaks_raises_and_never_looks_complete(stage: Stage, client: openai.OpenAI) -> None:
    stage.u1.script = [SH, E("a"), E("b"), ["close"]]
    got = []
    with pytest.raises(openai.APIError, match="closed the connection"):
        for chunk in client.chat.completions.create(model="m1", messages=MESSAGES, stream=True):
            got.append(chunk.choices[0].delta.content)
    assert got == ["a", "b"]


def test_a_client_that_leaves_a_stream_early_may_go_on_with_the_same_connection_pool(stage: Stage, client: openai.OpenAI) -> None:
    stage.u1.script = [SH, E("a"), ["w", 2000], FIN, DONE, END]
    stream = client.chat.completions.create(model="m1", messages=MESSAGES, stream=True)
    assert next(iter(stream)).choices[0].delta.content == "a"
    stream.close()
    stage.u1.script = GOOD_S
    assert len(list(client.chat.completions.create(model="m1", messages=MESSAGES, stream=True))) == 4
    stage.router.at_rest()


TOOL: openai.types.chat.ChatCompletionToolParam = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


def test_tools_are_asked_for_and_called_in_an_answer_and_in_a_stream(stage: Stage, client: openai.OpenAI) -> None:
    call = {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"R\u00f6m"}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    body = {
        "id": "c",
        "object": "chat.completion",
        "created": 1,
        "model": "m1",
        "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}],
    }
    stage.u1.script = [answer(200, json.dumps(body))]
    got = client.chat.completions.create(model="m1", messages=MESSAGES, tools=[TOOL], tool_choice="auto")
    assert got.choices[0].finish_reason == "tool_calls"
    assert got.choices[0].message.tool_calls is not None
    assert json.loads(got.choices[0].message.tool_calls[0].function.arguments) == {"city": "R\u00f6m"}  # type: ignore[union-attr]
    assert json.loads(stage.u1.requests[-1]["body"])["tools"] == [TOOL]

    def piece(delta: object, finish: str | None = None) -> list[str]:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return [
            "c",
            f"data: {json.dumps({'id': 'c', 'object': 'chat.completion.chunk', 'created': 1, 'model': 'm1', 'choices': [choice]})}\n\n",
        ]

    parts = [{"tool_calls": [{"index": 0, "id": "t1", "type": "function", "function": {"name": "weather", "arguments": ""}}]}]
    parts += [{"tool_calls": [{"index": 0, "function": {"arguments": text}}]} for text in ('{"ci', 'ty":"R', '"}')]
    stage.u1.script = [SH, *(piece(part) for part in parts), piece({}, "tool_calls"), DONE, END]
    arguments = ""
    for chunk in client.chat.completions.create(model="m1", messages=MESSAGES, tools=[TOOL], stream=True):
        for one in chunk.choices[0].delta.tool_calls or ():
            arguments += (one.function.arguments or "") if one.function else ""
    assert json.loads(arguments) == {"city": "R"}


def test_embeddings_come_back_as_numbers(stage: Stage, client: openai.OpenAI) -> None:
    rows = [{"object": "embedding", "index": number, "embedding": [0.5, -1.25]} for number in range(2)]
    body = {"object": "list", "model": "m1", "data": rows, "usage": {"prompt_tokens": 2, "total_tokens": 2}}
    stage.u1.script = [answer(200, json.dumps(body))]
    got = client.embeddings.create(model="m1", input=["a", "b"], encoding_format="float")
    assert [row.embedding for row in got.data] == [[0.5, -1.25]] * 2
    assert got.usage.prompt_tokens == 2


def test_a_client_that_gives_up_waiting_raises_its_own_time_out_and_leaves_nothing(stage: Stage, client: openai.OpenAI) -> None:
    stage.u1.script = [["w", 20_000]]
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.2).chat.completions.create(model="m1", messages=MESSAGES)
    stage.router.at_rest()


def test_the_client_tries_again_what_may_be_tried_again_and_nothing_else(stage: Stage, client: openai.OpenAI) -> None:
    patient = client.with_options(max_retries=2)
    stage.u1.once = [[answer(429, '{"error":{"message":"slow down"}}', "Retry-After: 0")]]
    began = len(stage.u1.requests)
    assert patient.chat.completions.create(model="m1", messages=MESSAGES).choices[0].message.content == "ok"
    assert len(stage.u1.requests) == began + 2
    with pytest.raises(openai.NotFoundError):
        patient.chat.completions.create(model="nope", messages=MESSAGES)
    stage.u1.once = [[answer(400, '{"error":{"message":"no such parameter"}}')]]
    began = len(stage.u1.requests)
    with pytest.raises(openai.BadRequestError):
        patient.chat.completions.create(model="m1", messages=MESSAGES)
    assert len(stage.u1.requests) == began + 1


async def test_the_asynchronous_client_streams_side_by_side_and_cancels(stage: Stage) -> None:
    """It stands on asyncio, so it runs in a thread of its own."""
    import asyncio

    host, port = stage.router.address

    async def work() -> tuple[list[str], bool]:
        async with openai.AsyncOpenAI(base_url=f"http://{host}:{port}/v1", api_key="K", max_retries=0, timeout=20) as client:

            async def one() -> str:
                stream = await client.chat.completions.create(model="m1", messages=MESSAGES, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            texts = list(await asyncio.gather(*(one() for _ in range(5))))
            stage.u1.script = [SH, E("a"), ["w", 20_000], FIN, DONE, END]
            task = asyncio.ensure_future(one())
            until = time.monotonic() + 20
            while stage.router.metric_of("llmgw_inflight", 'endpoint="u1"') != 1 and time.monotonic() < until:
                await asyncio.sleep(0.01)
            task.cancel()
            try:
                await task
            except asyncio.CancelledError:
                return texts, True
            return texts, False

    stage.u1.script = GOOD_S
    texts, cancelled = await trio.to_thread.run_sync(lambda: asyncio.run(work()))
    assert texts == ["abc"] * 5
    assert cancelled
    await trio.to_thread.run_sync(stage.router.at_rest)
