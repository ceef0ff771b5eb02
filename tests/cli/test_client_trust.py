"""What ctl says of a certificate that it does not take."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from llmgw.cli.ctl.client import Client
from llmgw.cli.ctl.places import find
from llmgw.domain.errors import Unavailable


@pytest.mark.parametrize(
    ("verify_code", "ca", "words"),
    [
        (10, "", "is this machine's clock right?"),
        (9, "", "is this machine's clock right?"),
        (19, "", "LLMGW_CA names the file"),
        (20, "ca.pem", "ca.pem holds no CA that made its certificate"),
        (62, "", "not trusted: the reason"),
    ],
)
def test_each_reason_is_told_with_what_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verify_code: int, ca: str, words: str
) -> None:
    monkeypatch.setenv("LLMGW_TOKEN", "t")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LLMGW_CA", ca)
    fault = ssl.SSLCertVerificationError()
    fault.verify_code, fault.verify_message = verify_code, "the reason"
    monkeypatch.setattr("http.client.HTTPSConnection.connect", lambda _: (_ for _ in ()).throw(fault))
    monkeypatch.setattr(Client, "_tls", lambda _: ssl.create_default_context())
    with pytest.raises(Unavailable, match="not trusted") as told:
        Client(find("https://ctl-1.example:8081"))._connect()
    assert words in str(told.value)
