"""A file and a document are tried in a process of their own: what a start would stumble over is found there, and nothing else happens."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
import trio

from llmgw.wiring.dry_load import WHY_MAX, dry_load

SHORT_S = 3.0  # of a process that hangs for good; the others get the whole time


@pytest.fixture
def own(tmp_path: Path) -> str:
    return f'server.data_dir = "{tmp_path}"\n'


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    pair = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    subprocess.run([*command, "-subj", "/CN=localhost", "-out", pair[0], "-keyout", pair[1]], check=True, capture_output=True, timeout=60)
    return pair


async def tried(file: str | bytes, document: str = "", **options) -> str:
    return await dry_load(file.encode() if isinstance(file, str) else file, document, "/etc/llmgw/llmgw.toml", **options)


async def test_what_loads_is_said_to_load_and_leaves_nothing_behind(own: str, tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    tls = f'[tls]\ncertificate = "{certificate[0]}"\nkey = "{certificate[1]}"\n[store]\n'
    assert await tried(own + tls, "[lease]\nttl_s = 30\n") == ""
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("more", "document", "words"),
    [
        ("", "[lease]\nttl_s = 3\n", "lease.renew_s: must be at most a third of ttl_s"),
        ("", "[lease\n", "the settings is not TOML at line 1"),
        ("", "[server]\nname = 'x'\n", "one machine's own key"),
        ("log.levle = 'info'", "", "/etc/llmgw/llmgw.toml is not valid:\n  log.levle: unknown key; did you mean log.level?"),
        ("lease.ttl_s = 3", "", "lease.renew_s"),
        ("store = {replica = 's3://bucket/x', s3_credentials = 'file:/no/such/credentials'}", "", "/no/such/credentials"),
        ("metrics.token = 'env:LLMGW_NO_SUCH_TOKEN'", "", "metrics.token: the environment variable LLMGW_NO_SUCH_TOKEN is not set"),
        ("metrics.token = 'file:/no/such/token'", "", "metrics.token"),
        ("tls = {certificate = '/no/such.pem', key = '/no/such.key'}", "", "/no/such.pem"),
        ("server.admin_listen = 'x'", "", "server.admin_listen"),
    ],
)
async def test_what_a_start_would_stumble_over_is_found_with_its_key(own: str, more: str, document: str, words: str) -> None:
    assert words in await tried(own + more, document)


async def test_a_replicated_store_loads_where_its_credentials_and_litestream_are_there(own: str, tmp_path: Path) -> None:
    (tmp_path / "credentials").write_text("AWS_ACCESS_KEY_ID=k\nAWS_SECRET_ACCESS_KEY=s\n")
    (tmp_path / "credentials").chmod(0o600)
    store = f"store = {{replica = 's3://bucket/x', s3_credentials = 'file:{tmp_path}/credentials'}}"
    assert await tried(own + store, "[lease]\nttl_s = 30\n") == ""


async def test_the_files_cluster_keys_do_not_count_where_there_is_a_document(own: str) -> None:
    """They are in vain: a document that contradicts nothing loads, whatever the file says beside it."""
    assert await tried(own + "lease = {ttl_s = 9, renew_s = 3}", "[lease]\nttl_s = 30\nrenew_s = 10\n") == ""


async def test_a_certificate_that_is_none_and_a_folder_that_is_none_are_told(
    own: str, tmp_path: Path, certificate: tuple[Path, Path]
) -> None:
    (tmp_path / "bad.pem").write_text("no certificate")
    assert "bad.pem" in await tried(own + f'tls = {{certificate = "{tmp_path}/bad.pem", key = "{certificate[1]}"}}')
    assert "server.data_dir" in await tried(f'server.data_dir = "{tmp_path}/none"')
    assert "server.data_dir" in await tried(f'server.data_dir = "{tmp_path}/bad.pem"')


async def test_a_file_that_is_not_utf_8_is_told_with_its_line(own: str) -> None:
    assert await tried(own.encode() + b"# \xff") == "/etc/llmgw/llmgw.toml is not UTF-8 text (line 2)"


async def test_a_very_long_fault_is_cut(own: str) -> None:
    why = await tried(own + "".join(f"{'x' * 80}{number} = 1\n" for number in range(200)))
    assert 0 < len(why) <= WHY_MAX


@pytest.fixture
def hanging(own: str, tmp_path: Path) -> str:
    """A file that no start gets past: its secret is a pipe that nobody writes."""
    os.mkfifo(tmp_path / "pipe")
    return own + f'tls = {{certificate = "{tmp_path}/pipe", key = "{tmp_path}/pipe"}}'


def children() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # of another test's that has just ended nothing can be read
            if "llmgw.wiring.dry_load" in child.cmdline():
                found.append(child)
    return found


async def test_one_that_hangs_is_ended_and_is_a_reason_not_to_restart(hanging: str) -> None:
    assert await tried(hanging, limit_s=SHORT_S) == f"trying it took longer than {SHORT_S:g} s on this machine"
    assert children() == []


async def test_one_that_is_killed_is_a_reason_not_to_restart(hanging: str) -> None:
    said: list[str] = []

    async def work() -> None:
        said.append(await tried(hanging))

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(work)
            while not (found := children()):
                await trio.sleep(0.02)
            found[0].send_signal(signal.SIGKILL)
    assert said == ["trying it on this machine ended with -9; the log says more"]


async def test_a_cancel_ends_the_process_too(hanging: str) -> None:
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tried, hanging)
            while not children():
                await trio.sleep(0.02)
            nursery.cancel_scope.cancel()
    assert children() == []
