"""How many tokens a model takes, as its engines tell: shown in /v1/models, and never waited for."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.domain.endpoint import EndpointList
from llmgw.router.lengths import AGAIN_S, PER_S_MAX, again_s, lengths_of
from tests.router.fakes import CHAT, CHAT2, OK, Engine, answer, get, post
from tests.router.test_router import Here, endpoint, running, stamp, until


@given(st.integers(0, 100_000))
def test_each_is_asked_once_a_minute_at_most_and_all_together_within_a_bound(endpoints: int) -> None:
    assert again_s(endpoints) >= AGAIN_S
    assert endpoints / again_s(endpoints) <= PER_S_MAX + 1e-6


def told(*rows: object) -> list[object]:
    return answer(200, json.dumps({"object": "list", "data": rows}))


@given(st.binary(max_size=200))
def test_nothing_that_an_engine_says_raises(data: bytes) -> None:
    assert lengths_of(data) == {} or isinstance(json.loads(data), dict)
    assert lengths_of(b'{"data":[{"id":"m","max_model_len":' + data + b"}]}") is not None


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"id": "m", "max_model_len": 4096}, {"m": 4096}),
        ({"id": "m"}, {}),
        ({"id": "m", "max_model_len": None}, {}),
        ({"id": "m", "max_model_len": "4096"}, {}),
        ({"id": "m", "max_model_len": 4096.5}, {}),
        ({"id": "m", "max_model_len": -1}, {}),
        ({"id": "m", "max_model_len": True}, {}),
        ({"id": 5, "max_model_len": 4096}, {}),
    ],
)
def test_only_a_length_is_a_length(row: object, found: dict[str, int]) -> None:
    assert lengths_of(json.dumps({"data": [row]}).encode()) == found


@pytest.fixture
def engines() -> Iterator[tuple[Engine, Engine]]:
    found = Engine(), Engine()
    yield found
    for engine in found:
        engine.close()


async def rows(here: Here) -> dict[str, object]:
    return {row["id"]: row.get("max_model_len") for row in (await here.ask(get("/v1/models", key=""))).json()["data"]}


async def test_the_least_of_a_models_engines_is_shown_by_each_of_its_names(engines: tuple[Engine, Engine]) -> None:
    one, two = engines
    one.models = [told({"id": "/weights", "max_model_len": 8192}, {"id": "other", "max_model_len": 1})]
    two.models = [told({"id": "m1", "max_model_len": 4096})]
    async with running() as here:
        first = endpoint(one, names={"m1": "/weights"}, aliases={"fast": "m1"})
        here.router.set_endpoints(EndpointList((first,)), stamp(1))
        await until(lambda: here.router.states()[0].lengths, "it is told")
        assert await rows(here) == {"m1": 8192, "fast": 8192}
        here.router.set_endpoints(EndpointList((first, endpoint(two, "u2"))), stamp(2))
        await until(lambda: all(state.lengths for state in here.router.states()), "both are told")
        assert await rows(here) == {"m1": 4096, "fast": 4096}
        assert json.loads((await here.ask(get("/v1/models/fast", key=""))).body)["max_model_len"] == 4096


@pytest.mark.parametrize("script", [[["w", 20_000]], [["close"]], answer(200, "nonsense"), answer(500, "{}")], ids=str)
async def test_an_engine_that_does_not_tell_serves_all_the_same(engines: tuple[Engine, Engine], script: list[object]) -> None:
    one, _ = engines
    one.models = script if isinstance(script[0], list) else [script]
    async with running() as here:
        here.router.set_endpoints(EndpointList((endpoint(one),)), stamp(1))
        one.script = [OK]
        assert (await here.ask(post(CHAT, key=""))).status == 200
        assert await rows(here) == {"m1": None}
        assert (await here.ask(post(CHAT2, key=""))).status == 404
        assert here.bugs == []
