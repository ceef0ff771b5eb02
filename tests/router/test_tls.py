"""TLS on both sides: the public port with a certificate of its own, and engines behind https://."""

from __future__ import annotations

import http.server
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.router.fakes import CHAT, CHAT_S, GOOD_S, OK_BODY, WAIT_S, Client, RouterProcess, get, post, staged, until


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    pair = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    names = [
        "-subj",
        "/CN=localhost",
        "-addext",
        "subjectAltName=DNS:localhost,IP:127.0.0.1",
        "-addext",
        "basicConstraints=critical,CA:TRUE",
    ]
    subprocess.run([*command, *names, "-out", pair[0], "-keyout", pair[1]], check=True, capture_output=True, timeout=60)
    return pair


class _Tls(Client):
    def __init__(self, address: tuple[str, int], certificate: Path) -> None:
        super().__init__(address)
        context = ssl.create_default_context(cafile=str(certificate))
        self.sock = context.wrap_socket(self.sock, server_hostname="localhost")


def test_the_public_port_speaks_tls_with_its_own_certificate(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    with staged(tmp_path) as stage:
        stage.router.close()
        pair = f'tls_certificate = "{certificate[0]}"\ntls_key = "{certificate[1]}"\n[route]'
        router = RouterProcess(tmp_path, stage.text.replace("[route]", pair, 1))
        try:
            with _Tls(router.address, certificate[0]) as client:
                client.send(post(CHAT))
                assert client.answer().body.decode() == OK_BODY
                stage.u1.script = GOOD_S
                client.send(post(CHAT_S))
                assert client.answer().events[-1] == "data: [DONE]"
                big = CHAT.replace(b'"hi"', b'"' + b"a" * 3_000_000 + b'"')
                client.send(post(big))
                assert client.answer().whole
                assert stage.u1.requests[-1]["body"] == big
            with _Tls(router.address, certificate[0]) as client:
                client.send(get("/health").replace(b"HTTP/1.1", b"HTTP/1.0"))
                assert client.rest().endswith(b'{"status":"ok"}')  # an end that TLS itself tells, else this raises
            with Client(router.address) as plain:
                plain.send(get("/health"))
                assert b"HTTP/1.1" not in plain.rest()
            with _Tls(router.address, certificate[0]) as client:
                client.send(get("/health"))
                assert client.answer().status == 200
        finally:
            router.close()


@pytest.fixture
def https_engine(certificate: tuple[Path, Path]) -> Iterator[int]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(OK_BODY)))
            self.end_headers()
            self.wfile.write(OK_BODY.encode())

        def do_GET(self) -> None:
            text = b"vllm:num_requests_running 3\nvllm:num_requests_waiting 4\n" + b"x" * 40_000
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()
    thread.join(WAIT_S)


@pytest.mark.parametrize("trusted", [True, False])
def test_an_engine_behind_https_is_reached_when_its_certificate_is_trusted(
    tmp_path: Path, certificate: tuple[Path, Path], https_engine: int, trusted: bool
) -> None:
    with staged(tmp_path) as stage:
        stage.router.close()
        text = stage.text.replace(f"http://127.0.0.1:{stage.u1.port}", f"https://localhost:{https_engine}")
        router = RouterProcess(tmp_path, text, {"SSL_CERT_FILE": str(certificate[0])} if trusted else None)
        try:
            for _ in range(3):
                got = router.ask(post(CHAT))
                assert got.status == (200 if trusted else 503)
                assert trusted == (got.body.decode() == OK_BODY)
                assert trusted or "certificate" in got.error["message"] or "has failed of late" in got.error["message"]
            big = CHAT.replace(b'"hi"', b'"' + b"a" * 3_000_000 + b'"')
            assert router.ask(post(big)).status == (200 if trusted else 503)
            if trusted:  # its load is asked for in the same way
                until(lambda: "llmgw_endpoint_waiting{" in router.ask(get("/metrics")).body.decode(), "the engine's load")
                assert router.metric_of("llmgw_endpoint_waiting", 'endpoint="u1"') == 4
        finally:
            router.close()


def test_a_certificate_that_cannot_be_read_is_one_clear_line(tmp_path: Path) -> None:
    from tests.router.fakes import router_command

    with staged(tmp_path) as stage:
        pair = f'tls_certificate = "{tmp_path}/no.pem"\ntls_key = "{tmp_path}/no.key"\n[route]'
        config = tmp_path / "bad.toml"
        config.write_text(stage.text.replace("[route]", pair, 1))
    done = subprocess.run(router_command(config), capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 3
    assert "no.pem" in done.stderr
    assert "Traceback" not in done.stderr
