"""What is measured, and what the page says of it: ratios round by round, targets met or not, and whoever was left out is named."""

from __future__ import annotations

import argparse
import subprocess

import pytest

from benchmarks import __main__ as command
from benchmarks.page import page, sections_of
from benchmarks.router import services
from benchmarks.router.rounds import Memory, Results, cpu_per_request_us, leave_out, once, tree_pss_mb
from benchmarks.router.scenarios import BODY_100K, GROUPS, REQUESTS_16, STREAMS_200, chosen
from benchmarks.router.section import BODY_FLOOR, figures_table, memory_rows, section, target_rows
from benchmarks.router.services import Missing, Order, Service, version
from benchmarks.router.tools import Figures, Percentiles

NONE = Percentiles(0)


def requests(cpu_us: float, *, latency_us: float = 100.0, errors: int = 0) -> Figures:
    return Figures(
        1.0, cpu_us * 1000 / 1e6, 1000, errors, 0, "", 0, 1, 0, Percentiles(1000, latency_us, 2 * latency_us, 3 * latency_us), NONE, NONE
    )


def results(**rounds: list[Figures]) -> Results:
    return Results({REQUESTS_16.name: {name.replace("_", "-"): found for name, found in rounds.items()}})


def test_a_ratio_is_the_median_of_each_rounds_own() -> None:
    found = results(llmgw=[requests(30), requests(400), requests(40)], nginx=[requests(10), requests(100), requests(20)])
    assert found.ratio(REQUESTS_16, "llmgw", "nginx", cpu_per_request_us) == pytest.approx(3.0)
    assert found.above(REQUESTS_16, "llmgw", "nginx", cpu_per_request_us) == pytest.approx(20.0)
    assert found.median(REQUESTS_16, "llmgw", cpu_per_request_us) == pytest.approx(40.0)


def test_there_is_no_ratio_to_a_peer_that_was_not_measured() -> None:
    found = results(llmgw=[requests(30)])
    assert found.ratio(REQUESTS_16, "llmgw", "nginx", cpu_per_request_us) is None
    assert found.above(REQUESTS_16, "llmgw", "direct", cpu_per_request_us) is None
    assert found.median(STREAMS_200, "llmgw", cpu_per_request_us) is None
    assert target_rows(found) == []


@pytest.mark.parametrize(("own_us", "met"), [(40.0, True), (41.0, False)])
def test_a_target_is_met_up_to_its_limit(own_us: float, met: bool) -> None:
    rows = target_rows(results(llmgw=[requests(own_us)], nginx=[requests(10)]))
    assert [(row.target, row.met) for row in rows] == [("≤ 4.0× nginx", met)]


@pytest.mark.parametrize(("own_us", "told"), [(15.0, False), (16.0, True)])
def test_why_a_body_costs_more_is_told_where_it_does(own_us: float, told: bool) -> None:
    found = Results({BODY_100K.name: {"llmgw": [requests(own_us)], "nginx": [requests(10)]}})
    assert (BODY_FLOOR in section(found)) == told


@pytest.mark.parametrize(("late", "errors", "met"), [(50.9, 0, True), (51.1, 0, False), (50.0, 1, False)])
def test_memory_is_flat_when_it_stays_and_no_request_failed(late: float, errors: int, met: bool) -> None:
    rows = memory_rows(Memory(30.0, 42.0, 50.0, late, 1_000_000, errors))
    assert [row.met for row in rows] == [True, True, met]


def test_everybodys_figures_stand_in_one_table_with_their_errors() -> None:
    found = results(direct=[requests(0)], nginx=[requests(10)], vllm_router=[requests(25, latency_us=1500, errors=3)])
    text = figures_table(found, REQUESTS_16)
    assert "| direct | — | — | 1,000 | 0.10 / 0.30 |" in text
    assert "| nginx | 10.0 | 1.00 | 1,000 | 0.10 / 0.30 |" in text
    assert "| vllm-router (3 errors) | 25.0 | 2.50 | 1,000 | 1.50 / 4.50 |" in text
    assert figures_table(found, STREAMS_200) == ""


def test_a_time_that_nobody_took_is_no_zero() -> None:
    stream = Figures(1.0, 0.1, 0, 0, 0, "", 0, 1, 1000, NONE, Percentiles(1000, 100, 200, 300), NONE)
    text = figures_table(Results({STREAMS_200.name: {"nginx": [stream]}}), STREAMS_200)
    assert "| nginx | 100.0 | 1.00 | 1,000 | 0.10 / 0.30 | — |" in text


def test_the_section_names_who_was_not_measured_and_why() -> None:
    found = results(nginx=[requests(10)])
    found.absent["smg"] = "cannot be installed: no network"
    found.versions["nginx"] = "1.22.1"
    text = section(found)
    assert "Not measured: smg, cannot be installed: no network." in text
    assert "Peers: nginx 1.22.1." in text
    assert "data plane" not in text


@pytest.mark.parametrize(
    ("which", "told"),
    [
        ("compiled", "llmgw's data plane is compiled. `llmgw interpreted` is the same from its sources.\n"),
        ("interpreted", "llmgw's data plane is interpreted.\n"),
    ],
)
def test_the_section_says_whether_the_data_plane_was_compiled(which: str, told: str) -> None:
    found = results(llmgw=[requests(10)], nginx=[requests(10)])
    found.versions.update({"llmgw": which, "nginx": "1.22.1"})
    text = section(found)
    assert told in text
    assert "Peers: nginx 1.22.1." in text


def test_all_is_measured_when_nothing_is_named() -> None:
    groups = chosen()
    assert [group.scenarios for group in groups] == [group.scenarios for group in GROUPS]
    assert "litellm" not in {variant.service for group in groups for variant in group.variants}


def test_only_what_is_named_is_measured() -> None:
    groups = chosen(("requests-16", "nginx", "llmgw"))
    assert [(group.scenarios, [variant.name for variant in group.variants]) for group in groups] == [((REQUESTS_16,), ["llmgw", "nginx"])]


def test_the_slow_peer_is_measured_when_it_is_asked_for_where_it_can_follow() -> None:
    slow = [variant for group in chosen(slow=True) for variant in group.variants if variant.service == "litellm"]
    assert [variant.only for variant in slow] == [("requests-16", "streams-200")]


def test_a_name_that_is_none_is_refused_with_those_that_are() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"'nginx2' is none of one, requests-16, .*nginx"):
        command._names("llmgw,nginx2")


@pytest.mark.parametrize("text", ["0", "-1", "x"])
def test_a_number_of_rounds_is_at_least_one(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        command._positive(text)


def test_a_peer_that_is_not_installed_is_missing_with_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(services, "MORE_PROGRAMS", ())
    with pytest.raises(Missing, match="apt install nginx"):
        services.nginx(Order(tmp_path, 1, ("http://127.0.0.1:2",)))


def test_a_service_that_ends_while_it_is_measured_is_left_out_with_the_reason() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    with pytest.raises(RuntimeError, match="it ended"):
        once(Service("llmgw", 1, ended), REQUESTS_16, quick=True)
    with pytest.raises(RuntimeError, match="it ended"):
        tree_pss_mb(Service("llmgw", 1, ended))
    found = Results()
    leave_out(found, "llmgw", "it ended\nand this is its log")
    assert found.absent == {"llmgw": "it ended"}


def test_a_peer_from_the_registry_has_the_version_that_is_pinned() -> None:
    assert version("smg")
    assert version("litellm")
    assert version("direct") == ""
    assert version("llmgw") in ("compiled", "interpreted")


def test_sections_of_this_machine_are_kept_and_those_of_another_are_not() -> None:
    sections = {"The planner": "| a |\n|---|\n| 1 |", "The router": "Text.\n\n| b |"}
    text = page("2 cores", sections)
    assert sections_of(text, "2 cores") == sections
    assert sections_of(text, "4 cores") == {}
    assert page("2 cores", sections_of(text, "2 cores")) == text
