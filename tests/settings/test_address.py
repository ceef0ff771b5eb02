"""Addresses and secrets as an operator writes them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmgw.domain.errors import Invalid
from llmgw.settings import secrets
from llmgw.settings.address import (
    TcpAddress,
    UnixAddress,
    engine_url_fault,
    is_loopback,
    leads_to,
    listen_fault,
    parse_listen,
    parse_ports,
    url_fault,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("127.0.0.1:8080", TcpAddress("127.0.0.1", 8080)),
        ("[::1]:0", TcpAddress("::1", 0)),
        ("[fe80::1%eth0]:80", TcpAddress("fe80::1%eth0", 80)),
        ("localhost:1", TcpAddress("localhost", 1)),
        ("unix:/run/llmgw.sock", UnixAddress("/run/llmgw.sock")),
    ],
)
def test_an_address_to_listen_on_is_read_and_written_alike(text, value):
    assert parse_listen(text) == value
    assert str(value) == text


@settings(deadline=None)
@given(st.text(max_size=40))
def test_any_text_is_an_address_or_has_a_reason(text):
    fault = listen_fault(text)
    if fault is None:
        assert parse_listen(str(parse_listen(text))) == parse_listen(text)
    else:
        assert fault
    for check in (url_fault, engine_url_fault, secrets.reference_fault, secrets.env_name_fault):
        assert check(text) != ""


def test_loopback_is_told_from_its_text():
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "127.0.0.1.example.com", "128.0.0.1"))


@pytest.mark.parametrize(
    ("url", "listen"),
    [
        ("http://127.0.0.1:8080", "127.0.0.1:8080"),
        ("http://127.0.0.1:8080/base", "127.0.0.1:8080"),
        ("https://127.0.0.1:8080", "127.0.0.1:8080"),  # nobody else can have that port
        ("http://localhost:8080", "127.0.0.1:8080"),
        ("http://LOCALHOST:8080", "[::1]:8080"),
        ("http://0.0.0.0:8080", "127.0.0.1:8080"),
        ("http://[::]:8080", "[::1]:8080"),
        ("http://[0:0:0:0:0:0:0:1]:8080", "localhost:8080"),
        ("http://[::ffff:127.0.0.1]:8080", "0.0.0.0:8080"),
        ("http://127.0.0.1:8080", "0.0.0.0:8080"),
        ("http://127.9.9.9:8080", "0.0.0.0:8080"),
        ("http://localhost:8080", "0.0.0.0:8080"),
        ("http://[::1]:8080", "[::]:8080"),
        ("http://0.0.0.0:8080", "[::]:8080"),
        ("http://10.0.0.5:8080", "10.0.0.5:8080"),
        ("http://Router.example:8080", "router.example:8080"),
        ("http://127.0.0.1", "127.0.0.1:80"),
        ("https://[::1]", "[::1]:443"),
    ],
)
def test_an_address_that_leads_back_to_whoever_listens_is_known_in_every_spelling(url, listen):
    assert leads_to(url, listen)


@pytest.mark.parametrize(
    ("url", "listen"),
    [
        ("http://127.0.0.1:8081", "127.0.0.1:8080"),
        ("http://127.0.0.2:8080", "127.0.0.1:8080"),
        ("http://[::1]:8080", "127.0.0.1:8080"),
        ("http://[::1]:8080", "0.0.0.0:8080"),
        ("http://10.0.0.5:8080", "127.0.0.1:8080"),
        ("http://gpu-1:8080", "0.0.0.0:8080"),
        ("http://127.0.0.1:8080", "127.0.0.1:0"),
        ("http://127.0.0.1:80", "unix:/run/llmgw.sock"),
        ("https://127.0.0.1", "127.0.0.1:80"),
    ],
)
def test_an_address_of_somebody_else_leads_to_them(url, listen):
    assert not leads_to(url, listen)


@pytest.mark.parametrize("address", ["[1:2]:80", "[::.]:80", "[1:2:3:4:5:6:7:8:9]:80", "[fe80::1%]:80"])
def test_what_only_looks_like_ipv6_is_told(address):
    assert "is not an IPv6 address" in str(listen_fault(address))
    assert "is not an IPv6 address" in str(url_fault(f"http://{address}"))


@pytest.mark.parametrize("url", ["http://h", "https://h.example:443/base", "http://[::1]:8000", "http://127.0.0.1:1/"])
def test_a_good_url_has_no_fault(url):
    assert url_fault(url) is None


@pytest.mark.parametrize(
    "url",
    [
        "",
        "h",
        "http://",
        "http:///x",
        "http://h:0",
        "http://h:99999",
        "http://h:x",
        "http://h/a b",
        "http://h/#f",
        "http://[x]:1",
        "http://h//x",
        "HTTP://h",
        "http://h/é",
    ],
)
def test_a_bad_url_has_a_fault(url):
    assert url_fault(url)


def test_an_engines_url_leaves_out_v1():
    assert engine_url_fault("http://h/v1/") == "leave out /v1, which every request brings with it: 'http://h'"
    assert engine_url_fault("http://h/openai/v1")
    assert engine_url_fault("http://h/v10") is None


def test_a_range_of_ports_is_two_numbers():
    assert parse_ports("20000-20999") == (20000, 20999)
    assert parse_ports("5 - 5") == (5, 5)
    with pytest.raises(ValueError, match="rise"):
        parse_ports("0-5")


def test_a_secret_comes_from_the_environment_or_a_file(tmp_path: Path):
    file = tmp_path / "token"
    file.write_text(" s3cret\n")
    assert secrets.resolve("env:T", "metrics.token", {"T": "x"}) == "x"
    assert secrets.resolve(f"file:{file}", "metrics.token", {}) == "s3cret"
    assert secrets.resolve("", "metrics.token", {}) == ""


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        ("env:T", r"metrics\.token: the environment variable T is not set"),
        ("file:/nowhere/at/all", r"metrics\.token: /nowhere/at/all cannot be read: No such file"),
        ("file:/dev/null", "is empty"),
        ("file:/dev/zero", "is larger than"),
        ("hunter2", "does not stand in this file"),
    ],
)
def test_a_secret_that_is_not_there_names_the_key_and_the_place(reference, reason):
    with pytest.raises(Invalid, match=reason) as caught:
        secrets.resolve(reference, "metrics.token", {})
    assert "hunter2" not in str(caught.value)
