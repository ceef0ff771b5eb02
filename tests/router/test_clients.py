"""The official client against a real router: what an application developer sees."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

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
