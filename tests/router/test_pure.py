"""The rules of the data plane as values: choosing, breaker, retries, keys, limits, the table, bodies, lines of the log."""

from __future__ import annotations

import hashlib
import random
from collections import Counter

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.domain.endpoint import Absence, AbsenceReason, Endpoint, EndpointList
from llmgw.domain.errors import Invalid, Overloaded, TooLarge, Unauthenticated
from llmgw.domain.ids import EndpointId
from llmgw.domain.model import Catalog, ModelSpec, Profile
from llmgw.domain.policy import ApiKey, Policy
from llmgw.router import access_log, body, breaker, families
from llmgw.router.breaker import Breaker, Health, Outcome
from llmgw.router.choose import Choice, Shortage, Why, choose
from llmgw.router.engine_load import EngineLoad
from llmgw.router.keys import ANONYMOUS, Keyring
from llmgw.router.limits import Parallel
from llmgw.router.retry import RetryBudget, retry_after_s
from llmgw.router.table import RoutingTable, build_table


@attrs.define
class View:
    in_flight: int = 0
    breaker: Breaker = breaker.CLOSED
    resting_until_s: float = 0.0
    promised: int = 0
    engine_load: EngineLoad | None = None


def _endpoint(name: str, **more: object) -> Endpoint:
    return Endpoint(EndpointId(name), f"http://{name}:1", ("m",), **more)  # type: ignore[arg-type]


def _choose(endpoints: list[Endpoint], views: dict[str, View], seed: int = 1, **more: object) -> Choice | Shortage:
    target = build_table(EndpointList(tuple(endpoints))).targets["m"]
    settings: dict[str, object] = {"policy": "least_load", "max_inflight": 0} | more
    return choose(target.tiers, lambda known: views.setdefault(known, View()), 100.0, random.Random(seed), **settings)  # type: ignore[arg-type]


def _picks(endpoints: list[Endpoint], views: dict[str, View], **more: object) -> Counter[str]:
    found: Counter[str] = Counter()
    for seed in range(300):
        choice = _choose(endpoints, views, seed, **more)
        assert isinstance(choice, Choice)
        found[choice.candidate.endpoint.id] += 1
    return found


OPEN = Breaker(3, 200.0)
SLOW = Breaker(3, 200.0, slow=True)


def test_idle_endpoints_share_by_weight() -> None:
    assert 100 < _picks([_endpoint("a"), _endpoint("b")], {})["a"] < 200
    heavy = _picks([_endpoint("a", weight=3.0), _endpoint("b")], {})
    assert 195 < heavy["a"] < 255
    assert set(_picks([_endpoint("a", weight=0.0), _endpoint("b")], {})) == {"b"}
    assert set(_picks([_endpoint("a", weight=0.0)], {})) == {"a"}


def test_the_less_loaded_of_two_is_taken() -> None:
    assert set(_picks([_endpoint("a"), _endpoint("b")], {"a": View(5), "b": View(4)})) == {"b"}
    assert set(_picks([_endpoint("a", weight=2.0), _endpoint("b")], {"a": View(5), "b": View(4)})) == {"a"}
    assert len(_picks([_endpoint("a"), _endpoint("b")], {"a": View(5), "b": View(4)}, policy="weighted_random")) == 2


def test_a_lower_priority_serves_only_when_the_higher_cannot() -> None:
    pair = [_endpoint("a", priority=0, max_inflight=2), _endpoint("b", priority=1)]
    assert set(_picks(pair, {"a": View(1)})) == {"a"}
    assert set(_picks(pair, {"a": View(2)})) == {"b"}
    assert set(_picks(pair, {"a": View(0, OPEN)})) == {"b"}
    assert set(_picks(pair, {"a": View(0, breaker.CLOSED, 150.0)})) == {"b"}


def test_broken_endpoints_get_nothing_and_slow_ones_only_what_is_left() -> None:
    pair = [_endpoint("a"), _endpoint("b")]
    assert set(_picks(pair, {"a": View(0, OPEN)})) == {"b"}
    assert set(_picks(pair, {"a": View(0, SLOW)})) == {"b"}
    assert set(_picks(pair, {"a": View(0, SLOW), "b": View(0, OPEN)})) == {"a"}
    assert set(_picks([_endpoint("a")], {"a": View(0, SLOW, 150.0)})) == {"a"}


def test_a_shortage_says_when_to_ask_again() -> None:
    pair = [_endpoint("a"), _endpoint("b")]
    broken = _choose(pair, {"a": View(0, OPEN), "b": View(0, Breaker(1, 103.0))})
    assert broken == Shortage(Why.BROKEN, 3.0, "broken")
    resting = _choose(pair, {"a": View(0, breaker.CLOSED, 107.0), "b": View(0, breaker.CLOSED, 109.0)})
    assert resting == Shortage(Why.RESTING, 7.0, "resting")
    full = _choose(pair, {"a": View(1), "b": View(1)}, max_inflight=1)
    assert isinstance(full, Shortage)
    assert full.why is Why.SATURATED
    tried = _choose(pair, {}, tried={"a", "b"})
    assert isinstance(tried, Shortage)
    assert tried.why is Why.TRIED


def test_among_very_many_the_broken_are_still_never_taken() -> None:
    many = [_endpoint(f"e{i:03}") for i in range(200)]
    views = {e.id: View(0, OPEN) for e in many if e.id != "e117"}
    assert set(_picks(many, dict(views))) == {"e117"}
    assert len(_picks(many, {})) > 100


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.booleans(), st.booleans()), min_size=1, max_size=8), st.integers())
def test_a_choice_is_always_one_that_may_be_taken(rows: list[tuple[int, int, bool, bool]], seed: int) -> None:
    endpoints = [_endpoint(f"e{i}", priority=row[1], max_inflight=2) for i, row in enumerate(rows)]
    views = {f"e{i}": View(row[0], OPEN if row[2] else breaker.CLOSED, 150.0 if row[3] else 0.0) for i, row in enumerate(rows)}
    usable = {
        f"e{i}": row[1] for i, row in enumerate(rows) if row[0] < 2 and not row[2] and (not row[3] or len(rows) == 1)
    }  # fmt: skip
    choice = _choose(endpoints, views, seed)
    if usable:
        assert isinstance(choice, Choice)
        assert usable[choice.candidate.endpoint.id] == min(usable.values())
    else:
        assert isinstance(choice, Shortage)
        assert choice.retry_after_s > 0


def _after(*outcomes: Outcome, now_s: float = 0.0, start: Breaker = breaker.CLOSED) -> Breaker:
    for outcome in outcomes:
        start = start.ended(outcome, now_s, failures_max=3, cooldown_s=10.0)
    return start


def test_the_breaker_opens_on_failures_in_a_row_and_at_once_when_refused() -> None:
    assert _after(Outcome.FAILED, Outcome.FAILED).health(0.0) is Health.CLOSED
    assert _after(Outcome.FAILED, Outcome.FAILED, Outcome.ANSWERED, Outcome.FAILED).health(0.0) is Health.CLOSED
    assert _after(Outcome.FAILED, Outcome.FAILED, Outcome.LEFT, Outcome.FAILED).health(0.0) is Health.OPEN
    assert _after(Outcome.REFUSED).health(0.0) is Health.OPEN
    assert not _after(Outcome.REFUSED).slow
    assert _after(Outcome.SILENT, Outcome.SILENT, Outcome.SILENT).slow


def test_after_the_cool_down_one_trial_decides() -> None:
    opened = _after(Outcome.REFUSED)
    assert not opened.admits(9.9)
    assert opened.health(10.0) is Health.TRIAL
    assert opened.admits(10.0)
    trying = opened.began(10.0)
    assert not trying.admits(10.0)
    assert _after(Outcome.ANSWERED, start=trying) == breaker.CLOSED
    again = trying.ended(Outcome.FAILED, 11.0, failures_max=3, cooldown_s=10.0)
    assert not again.admits(20.9)
    assert again.admits(21.0)
    assert trying.ended(Outcome.LEFT, 11.0, failures_max=3, cooldown_s=10.0).admits(11.0)


def test_retries_are_a_share_of_requests_with_a_floor() -> None:
    budget = RetryBudget()
    assert [budget.take(5.0, 0.2) for _ in range(12)] == [True] * 10 + [False] * 2
    for _ in range(100):
        budget.request(6.0)
    assert sum(budget.take(6.5, 0.2) for _ in range(50)) == 10
    assert budget.take(200.0, 0.0)


@pytest.mark.parametrize(
    ("value", "seconds"), [(b"7", 7.0), (b"0", 0.0), (None, 1.0), (b"x", 1.0), (b"-3", 1.0), (b"9e9", 3600.0), (b"nan", 1.0)]
)
def test_retry_after_is_read_with_care(value: bytes | None, seconds: float) -> None:
    assert retry_after_s(value, 1.0) == seconds


def _key(text: str, **more: object) -> ApiKey:
    return ApiKey("k-" + text, hashlib.sha256(text.encode()).hexdigest(), **more)  # type: ignore[arg-type]


def test_a_key_counts_until_it_expires() -> None:
    ring = Keyring.of(Policy(keys=(_key("a", expires_wall_s=100.0),)))
    shown = [(b"authorization", b"Bearer a")]
    assert ring.authenticate(shown, 99.0).name == "k-a"
    with pytest.raises(Unauthenticated):
        ring.authenticate(shown, 100.0)


def test_without_required_keys_anybody_may_call_and_a_known_key_still_counts() -> None:
    ring = Keyring.of(Policy(auth_required=False, keys=(_key("a"),)))
    assert ring.authenticate([], 0.0) is ANONYMOUS
    assert ring.authenticate([(b"authorization", b"Basic x")], 0.0) is ANONYMOUS
    assert ring.authenticate([(b"x-api-key", b"other")], 0.0) is ANONYMOUS
    assert ring.authenticate([(b"x-api-key", b"a")], 0.0).name == "k-a"


@given(st.binary(max_size=40))
def test_no_bytes_in_a_key_are_anything_but_401(text: bytes) -> None:
    ring = Keyring.of(Policy(keys=(_key("a"),)))
    with pytest.raises(Unauthenticated):
        ring.authenticate([(b"authorization", b"Bearer a" + text + b"!")], 0.0)


def test_a_key_has_so_many_places_and_no_more() -> None:
    parallel = Parallel()
    key = ApiKey("k", "", max_parallel=1)
    place = parallel.take(key)
    with pytest.raises(Overloaded):
        parallel.take(key)
    assert parallel.running("k") == 1
    parallel.give_back(place)
    assert parallel.running("k") == 0
    parallel.take(key)
    assert parallel.running("k") == 1


def _table(*endpoints: Endpoint, absences: tuple[Absence, ...] = (), catalog: Catalog | None = None) -> RoutingTable:
    return build_table(EndpointList(endpoints, absences), catalog)


def test_an_alias_leads_to_every_endpoint_of_its_model() -> None:
    one = Endpoint(EndpointId("a"), "http://a", ("m1",), aliases={"fast": "m1"}, names={"m1": "/x"}, unlisted=("m1",))
    table = _table(one, Endpoint(EndpointId("b"), "http://b", ("m1",)))
    target = table.find("fast")
    assert target is not None
    assert (target.model, [(c.endpoint.id, c.engine_name) for c in target.tiers[0]]) == ("m1", [("a", "/x"), ("b", "m1")])
    assert table.listed == ("fast",)
    assert target.allowed(ApiKey("k", "", models=("m1",)))
    assert target.allowed(ApiKey("k", "", models=("fast",)))
    assert not target.allowed(ApiKey("k", "", models=("m2",)))


def test_what_is_known_but_not_ready_is_known_with_its_reason() -> None:
    spec = ModelSpec("cold", (Profile("p", "command", command=("x",)),), aliases=("chilly",))
    table = _table(absences=(Absence(("m9", "nine"), AbsenceReason.HELD, "hall 2 is held"),), catalog=Catalog((spec,)))
    nine = table.find("nine")
    assert nine is not None
    assert nine.absence is not None
    assert (nine.model, nine.absence.reason) == ("m9", AbsenceReason.HELD)
    chilly = table.find("chilly")
    assert chilly is not None
    assert (chilly.model, chilly.absence is not None) == ("cold", True)
    assert table.find("nope") is None
    assert table.listed == ("chilly", "cold", "m9", "nine")


def test_an_ollama_tag_may_be_left_out() -> None:
    table = _table(Endpoint(EndpointId("a"), "http://a", ("llama:latest",), engine="ollama"), Endpoint(EndpointId("b"), "http://b", ("x",)))
    found = table.find("llama")
    assert found is not None
    assert found.tiers[0][0].engine_name == "llama:latest"
    assert table.find("x:latest") is None


def test_inflating_is_bounded() -> None:
    import gzip

    assert body.inflate(gzip.compress(b"x" * 10), 10) == b"x" * 10
    with pytest.raises(TooLarge):
        body.inflate(gzip.compress(b"x" * 11), 10)
    for broken in (b"", b"x", gzip.compress(b"x")[:-1], gzip.compress(b"x") + b"y"):
        with pytest.raises(Invalid):
            body.inflate(broken, 10)


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        (b'{"id":1,"model":"x","a":{"model":"y"}}', b'{"id":1,"model":"N","a":{"model":"y"}}'),
        (b'{"a":{"model":"y"},"model" : "x"}', b'{"a":{"model":"y"},"model" : "N"}'),
        (b'{"a":["model"],"model":"x"}', b'{"a":["model"],"model":"N"}'),
        (b'{"a":{"model":"y"}}', b'{"a":{"model":"y"}}'),
        (b'{"model":null}', b'{"model":null}'),
        (b'["model","x"]', b'["model","x"]'),
        (b'{"type":"message_start","message":{"id":1,"model":"x"}}', b'{"type":"message_start","message":{"id":1,"model":"N"}}'),
        (b'{"response":{"object":"response","model":"x"},"n":1}', b'{"response":{"object":"response","model":"N"},"n":1}'),
        (b'{"model":"x"', b'{"model":"N"'),
        (b"not json with \"model\"", b"not json with \"model\""),
    ],
)  # fmt: skip
def test_only_the_answers_own_model_is_renamed(text: bytes, changed: bytes) -> None:
    assert body.renamed(text, "N") == changed


def test_a_line_of_the_log_is_one_line_whatever_stands_in_it() -> None:
    line = access_log.line(0.0, 200, "GET", '/a b"\n', "m=1", "", "k", True, 5, 0.25, 1.5, b"r\\1", "ok")
    assert line.count(b"\n") == 1
    assert line.decode() == (
        'time=1970-01-01T00:00:00.000Z status=200 method=GET path="/a b\\"\\x0a" model="m=1" endpoint=- key=k stream=true bytes=5 '
        'ttft_s=0.2500 total_s=1.5000 request_id="r\\\\1" reason=ok\n'
    )


@pytest.mark.parametrize(
    ("error", "status"),
    [({"code": 503}, 503), ({"code": "429"}, 429), ({"code": 200}, 502), ({"code": True}, 502), ("text", 502), ({"code": "9" * 5000}, 502)],
)  # fmt: skip
def test_an_engines_error_keeps_its_code_where_it_is_one(error: object, status: int) -> None:
    problem = families.engine_problem(error)
    assert problem.status == status
    assert problem.message
