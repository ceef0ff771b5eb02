"""What stands between load and engine: llmgw with all its features on, nothing at all, and the peers.

Each is a process tree on the services' core. A peer that this machine lacks and that cannot be installed is Missing, with the
reason, and is named as absent in what is printed.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs

from benchmarks.router.tools import KEY, PLACE, SERVICE_CORE, SOURCES, Missing, pinned
from tests.programs import compiled_builder, free_port

READY_LIMIT_S = 120.0  # LiteLLM alone needs half a minute
STOP_LIMIT_S = 20.0
MORE_PROGRAMS = ("/usr/sbin",)  # where Debian puts servers, and where a user's PATH does not look
CHAT = json.dumps({"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}).encode()


@attrs.frozen
class Order:
    """What a service is to be started with: its folder, its port, the engines behind it and the largest body that will come (bytes)."""

    folder: Path
    port: int
    engines: Sequence[str]
    body_max: int = 16_384

    @property
    def engine(self) -> str:
        """The first engine as host:port."""
        return self.engines[0].removeprefix("http://")


@attrs.frozen
class Service:
    """A service that runs. `process` None: the load goes to the engine itself."""

    name: str
    port: int
    process: subprocess.Popen[bytes] | None


def llmgw(order: Order) -> list[str]:
    """As the packages carry it: with its data plane compiled, where that was built (`make compiled`) from the sources as they are."""
    builder = compiled_builder()
    found = ["env", f"PYTHONPATH={builder.TARGET}"] if builder.is_current() else []
    return [*found, *interpreted(order)]


def llmgw_interpreted(order: Order) -> list[str]:
    """The same from its sources, to see what compiling is worth. Raises Missing where nothing is compiled."""
    if not compiled_builder().is_current():
        raise Missing("nothing is compiled, so llmgw is that already (make compiled)")
    return interpreted(order)


def interpreted(order: Order) -> list[str]:
    """A router by itself: a key, limits that are never reached, the guard's defaults, metrics, and the access log in a file."""
    endpoints = "".join(
        f'[[endpoint]]\nid = "u{number}"\nurl = "{url}"\nmodels = ["m"]\nengine = "vllm"\n' for number, url in enumerate(order.engines)
    )
    config = order.folder / "llmgw.toml"
    config.write_text(
        f"""
[router]
listen = "127.0.0.1:{order.port}"
[auth]
required = true
[[auth.key]]
name = "bench"
sha256 = "{hashlib.sha256(KEY.encode()).hexdigest()}"
max_parallel = 100000
requests_per_minute = 1000000000
tokens_per_minute = 1000000000
{endpoints}"""
    )
    return [sys.executable, "-m", "llmgw", "router", "--config", str(config)]


def nginx(order: Order) -> list[str]:
    """As a careful person sets it up for streams: no buffering of answers, kept connections, bodies in memory."""
    program = _program("nginx")
    config = order.folder / "nginx.conf"
    temporary = "".join(f"  {what}_temp_path {order.folder}/{what};\n" for what in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    config.write_text(
        f"""
daemon off;
{"user root;" if os.geteuid() == 0 else ""}
worker_processes 1;
worker_rlimit_nofile 65536;
pid {order.folder}/nginx.pid;
error_log stderr error;
events {{ worker_connections 16384; }}
http {{
  access_log off;
{temporary}
  upstream engine {{ server {order.engine}; keepalive 2048; keepalive_requests 1000000000; }}
  server {{
    listen 127.0.0.1:{order.port} backlog=4096;
    keepalive_requests 1000000000;
    client_max_body_size 64m;
    client_body_buffer_size 2m;
    location / {{
      proxy_pass http://engine;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
      proxy_read_timeout 300s;
    }}
  }}
}}
"""
    )
    return [program, "-p", str(order.folder), "-c", str(config)]


def haproxy(order: Order) -> list[str]:
    """Routes by the body's `model`, which it finds with `json_query`; the body must fit its buffer for that."""
    program = _program("haproxy")
    config = order.folder / "haproxy.cfg"
    config.write_text(
        f"""
global
  nbthread 1
  maxconn 8192
  tune.bufsize {order.body_max + 16_384}
defaults
  mode http
  http-reuse always
  timeout connect 2s
  timeout client 300s
  timeout server 300s
  timeout http-request 30s
frontend public
  bind 127.0.0.1:{order.port} backlog 4096
  option http-buffer-request
  option http-no-delay
  http-request set-var(txn.model) req.body,json_query('$.model')
  use_backend %[var(txn.model)] if {{ var(txn.model) -m found }}
  default_backend m
backend m
  server engine {order.engine}
"""
    )
    return [program, "-f", str(config), "-db"]


def smg(order: Order) -> list[str]:
    options = ["--policy", "round_robin", "--log-level", "warn", "--prometheus-port", str(free_port()), "--disable-load-monitoring"]
    return [_peer("smg", "peers"), "launch", "--worker-urls", *order.engines, "--host", "127.0.0.1", "--port", str(order.port), *options]


def vllm_router(order: Order) -> list[str]:
    options = ["--policy", "round_robin", "--log-level", "warning", "--prometheus-port", str(free_port())]
    return [_peer("vllm-router", "peers"), "--worker-urls", *order.engines, "--host", "127.0.0.1", "--port", str(order.port), *options]


def litellm(order: Order) -> list[str]:
    program, config = _peer("litellm", "litellm"), order.folder / "litellm.yaml"
    models = "".join(
        f'  - model_name: m\n    litellm_params: {{model: openai/m, api_base: "{url}/v1", api_key: none}}\n' for url in order.engines
    )
    config.write_text(f"model_list:\n{models}litellm_settings: {{telemetry: false}}\ngeneral_settings: {{master_key: {KEY}}}\n")
    offline = ["env", "LITELLM_LOCAL_MODEL_COST_MAP=True", "LITELLM_LOG=ERROR"]
    return [*offline, program, "--config", str(config), "--host", "127.0.0.1", "--port", str(order.port), "--num_workers", "1"]


SERVICES = {
    "llmgw": llmgw,
    "llmgw interpreted": llmgw_interpreted,
    "nginx": nginx,
    "haproxy": haproxy,
    "smg": smg,
    "vllm-router": vllm_router,
    "litellm": litellm,
}


def version(kind: str) -> str:
    """What the peer says it is, or what is pinned; of llmgw how its data plane runs; empty for what is none. Raises Missing."""
    if kind == "llmgw":
        return "compiled" if compiled_builder().is_current() else "interpreted"
    if kind in ("nginx", "haproxy"):
        done = subprocess.run([_program(kind), "-v"], check=False, capture_output=True, text=True)
        said = re.search(r"\d+\.\d+[\w.+~-]*", done.stdout + done.stderr)
        return said.group() if said else "of unknown version"
    pins = (line.partition("==") for path in SOURCES.glob("*.txt") for line in path.read_text().splitlines())
    return next((pinned for name, _, pinned in pins if name.partition("[")[0] == kind), "")


def _program(name: str) -> str:
    for folder in (*os.environ.get("PATH", "").split(":"), *MORE_PROGRAMS):
        if folder and os.access(Path(folder, name), os.X_OK):
            return str(Path(folder, name))
    raise Missing(f"not installed (apt install {name})")


def _peer(name: str, environment: str) -> str:
    """A program of a Python environment apart from ours, which is made on first use from the versions in ENVIRONMENT.txt."""
    place, wanted = PLACE / environment, SOURCES / f"{environment}.txt"
    stamp = place / "installed.txt"
    if not stamp.exists() or stamp.read_text() != wanted.read_text():
        for command in ([sys.executable, "-m", "venv", str(place)], [f"{place}/bin/pip", "install", "--quiet", "-r", str(wanted)]):
            done = subprocess.run(command, check=False, capture_output=True, text=True)
            if done.returncode:
                raise Missing(f"cannot be installed: {(done.stderr.strip() or 'no reason given').splitlines()[-1]}")
        stamp.write_text(wanted.read_text())
    return str(place / "bin" / name)


@contextlib.contextmanager
def running(kind: str, folder: Path, engines: Sequence[str], body_max: int = 16_384, name: str = "") -> Iterator[Service]:
    """A service of a kind, shown as `name`, in a folder of its own, from its first answer to the end of the block.

    Raises Missing, or RuntimeError when it does not come up.
    """
    name = name or kind
    if kind == "direct":
        yield Service(name, int(engines[0].rsplit(":", 1)[1]), None)
        return
    folder.mkdir(parents=True)
    port = free_port()
    command = SERVICES[kind](Order(folder, port, engines, body_max))
    with (folder / "access.log").open("wb") as out, (folder / "log").open("wb") as log:
        process = subprocess.Popen([*pinned(SERVICE_CORE), *command], stdin=subprocess.DEVNULL, stdout=out, stderr=log, cwd=folder)
        try:
            _wait_ready(port, process, folder)
            yield Service(name, port, process)
        finally:
            process.terminate()
            try:
                process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_ready(port: int, process: subprocess.Popen[bytes], folder: Path) -> None:
    ends_s = time.monotonic() + READY_LIMIT_S
    last = "nothing"
    while time.monotonic() < ends_s and process.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("POST", "/v1/chat/completions", CHAT, {"authorization": f"Bearer {KEY}", "content-type": "application/json"})
            answer = connection.getresponse()
            body = answer.read()
            if answer.status == 200:
                return
            last = f"{answer.status} {body[:200].decode(errors='replace')}"
        except (OSError, http.client.HTTPException) as err:
            last = repr(err)
        finally:
            connection.close()
        time.sleep(0.1)
    text = (folder / "log").read_text(errors="replace")[-2000:]
    raise RuntimeError(f"it did not come up: {last}\nIts log ends:\n{text}")
