"""`/usage` against a real control plane: sums, ranges, pages, and what control planes tell each other."""

from __future__ import annotations

from typing import Any

import pytest

from llmgw.admin.peer_client import USAGE_PATH
from llmgw.admin.views import time_text
from llmgw.domain.usage import HOUR_S, UsageBatch, UsageRow, hour_of
from llmgw.protocol.codec import unstructure

from .conftest import AGENT, VIEWER

PATH = "/api/v1/usage"


async def count(admin: Any, *rows: UsageRow) -> None:
    await admin.controller.usage.take(UsageBatch(f"boot-{admin.controller.machine.fresh_hex(4)}", 1, rows))


def counts(requests: int, unknown: int, prompt: int, cached: int, completion: int) -> dict[str, int]:
    names = ("requests", "unknown", "prompt_tokens", "cached_tokens", "completion_tokens")
    return dict(zip(names, (requests, unknown, prompt, cached, completion), strict=True))


async def test_usage_is_summed_by_key_and_model_or_one_of_them_or_the_hour(admin):
    now = hour_of(admin.controller.machine.wall_s())
    await count(admin, UsageRow(now, "a", "m", 2, 1, 10, 3, 5), UsageRow(now, "", "m", 1, 0, 7, 0, 1))
    await count(admin, UsageRow(now - HOUR_S, "a", "n", 1, 0, 1, 0, 1), UsageRow(now - 40 * 24 * HOUR_S, "old", "m", 9, 0, 9, 0, 9))
    shown = (await admin.call("GET", PATH, token=VIEWER)).json
    assert shown["usage"] == [
        {"key": "", "model": "m", **counts(1, 0, 7, 0, 1)},
        {"key": "a", "model": "m", **counts(2, 1, 10, 3, 5)},
        {"key": "a", "model": "n", **counts(1, 0, 1, 0, 1)},
    ]
    assert shown["total"] == counts(4, 1, 18, 3, 7)
    assert (shown["by"], shown["next"], shown["until"]) == ("key,model", None, None)
    by_key = (await admin.call("GET", f"{PATH}?by=key")).json
    assert by_key["usage"] == [{"key": "", **counts(1, 0, 7, 0, 1)}, {"key": "a", **counts(3, 1, 11, 3, 6)}]
    by_model = (await admin.call("GET", f"{PATH}?by=model&since=2000-01-01T00:00:00Z")).json
    assert by_model["usage"] == [{"model": "m", **counts(12, 1, 26, 3, 15)}, {"model": "n", **counts(1, 0, 1, 0, 1)}]
    by_hour = (await admin.call("GET", f"{PATH}?by=hour&until={time_text(now)}")).json
    assert by_hour["usage"] == [{"hour": time_text(now - HOUR_S), **counts(1, 0, 1, 0, 1)}]
    assert by_hour["until"] == time_text(now)


async def test_a_range_takes_hours_by_where_they_begin(admin):
    noon = hour_of(1_893_499_200)
    await count(admin, *(UsageRow(noon + number * HOUR_S, "k", "m", 1) for number in range(3)))
    got = (await admin.call("GET", f"{PATH}?by=hour&since={time_text(noon + 1)}&until={time_text(noon + HOUR_S + 1)}")).json
    assert [row["hour"] for row in got["usage"]] == [time_text(noon + HOUR_S)]
    assert (got["since"], got["until"]) == (time_text(noon + HOUR_S), time_text(noon + 2 * HOUR_S))


async def test_a_long_list_comes_in_pages(admin):
    now = hour_of(admin.controller.machine.wall_s())
    keys = ["", "a", "a b", "a-b", "b", "é"]
    await count(admin, *(UsageRow(now, key, model, 1) for key in keys for model in ("m", "n")))
    seen, query = [], "limit=5"
    while query:
        page = (await admin.call("GET", f"{PATH}?{query}")).json
        seen += [(row["key"], row["model"]) for row in page["usage"]]
        assert page["total"]["requests"] == 12
        query = f"limit=5&cursor={page['next']}" if page["next"] else ""
    assert seen == [(key, model) for key in keys for model in ("m", "n")]


@pytest.mark.parametrize(
    ("query", "param", "said"),
    [
        ("by=day", "by", '"key", "model" or "hour", or "key,model" for both; not by \'day\''),
        ("since=yesterday", "since", "RFC 3339"),
        ("since=2030-01-01T00:00:00", "since", "the zone is missing"),
        ("until=2030-13-01T00:00:00Z", "until", "is no time"),
        ("since=2030-01-01T00:00:00Z&until=2029-01-01T00:00:00Z", "until", "later than since"),
        ("cursor=_w", "cursor", "cursor"),
        ("limit=0", "limit", "from 1"),
    ],
)
async def test_a_question_that_makes_no_sense_is_refused_with_its_place(admin, query, param, said):
    got = await admin.call("GET", f"{PATH}?{query}")
    assert (got.status, got.json["error"]["param"]) == (400, param)
    assert said in got.json["error"]["message"]


async def test_only_control_planes_tell_usage_here(admin):
    batch = unstructure(UsageBatch("b", 1, (UsageRow(3600, "k", "m", 1),)))
    assert (await admin.call("POST", USAGE_PATH, batch)).status == 403
    assert (await admin.call("POST", USAGE_PATH, batch, AGENT)).status == 401
    assert (await admin.call("GET", f"{PATH}?since=1970-01-01T00:00:00Z")).json["usage"] == []
