"""`llmgw dev` as a user has it: the real engine, the small model, the official client, ctl, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import psutil
import pytest

from tests.programs import Admin, Program, chat, end_tree, free_port, free_ports, processes_with, program, wait_for

pytestmark = pytest.mark.slow
ENGINE = Path(__file__).parent.parent / "chaos" / "stream_engine.py"
FAKE_ENGINE = ENGINE.with_name("eng.py")
DEMO = "gemma-3-270m"


class Dev:
    def __init__(self, folder: Path, process: Program, port: int, admin_port: int) -> None:
        self.folder, self.process, self.port = folder, process, port
        self.address = f"127.0.0.1:{port}"
        self.admin = Admin(f"127.0.0.1:{admin_port}", (folder / "data" / "admin-token").read_text().strip())

    def ctl(self, *args: str, code: int = 0) -> str:
        """What a command printed; found by itself through the state directory, as for a user."""
        done = subprocess.run(
            [sys.executable, "-m", "llmgw", "ctl", "--server", f"http://{self.admin.address}", *args],
            env={**os.environ, "LLMGW_TOKEN": self.admin.headers["authorization"].removeprefix("Bearer ")},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
        return done.stdout + done.stderr


def start(folder: Path, *args: str, name: str = "dev") -> tuple[Program, int, int]:
    port, admin_port = free_port(), free_port()
    config = folder / "dev.toml"
    config.write_text(f'[agent]\nengine_ports = "{free_ports(20)}"\n')
    command = [
        "dev",
        "--port",
        str(port),
        "--admin-port",
        str(admin_port),
        "--data-dir",
        str(folder / "data"),
        "--config",
        str(config),
        *args,
    ]
    return Program(command, folder, name), port, admin_port


@pytest.fixture(scope="module")
def dev(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dev]:
    folder = tmp_path_factory.mktemp("dev")
    process, port, admin_port = start(folder)
    try:
        process.wait_output("Ctrl-C ends everything", 180)
        yield Dev(folder, process, port, admin_port)
    finally:
        process.close()
        end_tree(str(folder))


@pytest.fixture
def client(dev: Dev) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://{dev.address}/v1", api_key="none", max_retries=0, timeout=120) as one:
        yield one


def test_the_official_client_chats_with_the_real_model(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "Say hello."}], max_tokens=16)
    assert answer.choices[0].message.content
    assert answer.model == "demo"
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 0


def test_the_official_client_streams(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model=DEMO, messages=[{"role": "user", "content": "Count."}], max_tokens=12, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text
    assert len(chunks) >= 4
    assert {chunk.model for chunk in chunks} == {DEMO}


def test_the_official_client_completes_lists_models_and_is_told_of_unknown_ones(client: openai.OpenAI) -> None:
    assert client.completions.create(model=DEMO, prompt="The sky is", max_tokens=4).choices[0].text
    assert {DEMO, "demo"} <= {model.id for model in client.models.list()}
    assert client.models.retrieve(DEMO).id == DEMO
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="nope", messages=[{"role": "user", "content": "x"}])
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=DEMO, messages="x")  # type: ignore[arg-type]


def test_a_second_model_comes_scales_and_goes_and_the_first_is_never_touched(dev: Dev, tmp_path: Path) -> None:
    (demo,) = dev.admin.wait_ready(DEMO)
    command = json.dumps([sys.executable, str(ENGINE), "--port", "{port}", "--mark", str(dev.folder)])
    file = tmp_path / "m2.toml"
    file.write_text(f'[[model]]\nname = "m2"\n[[model.profile]]\nengine = "command"\ncommand = {command}\n')
    assert "created" in dev.ctl("model", "apply", "-f", str(file), "--dry-run")
    assert dev.admin.replicas("m2") == []
    assert "created" in dev.ctl("model", "apply", "-f", str(file))
    (first,) = dev.admin.wait_ready("m2")
    assert chat(dev.address, "m2")[0] == 200
    assert "unchanged" in dev.ctl("model", "apply", "-f", str(file))
    dev.ctl("model", "scale", "m2", "2")
    ready = dev.admin.wait_ready("m2", 2)
    assert first["pid"] in {row["pid"] for row in ready}
    assert "2/2" in dev.ctl("model", "list")
    assert "m2" in dev.ctl("explain", "replica", first["id"])
    assert "stream" not in dev.ctl("replica", "logs", first["id"])
    dev.ctl("model", "rm", "m2", "--yes")
    assert chat(dev.address, "m2")[0] == 404
    wait_for(lambda: not any(psutil.pid_exists(row["pid"]) for row in ready), "both engines are gone")
    wait_for(lambda: dev.admin.replicas("m2") == [], "their records are gone")
    (after,) = dev.admin.wait_ready(DEMO)
    assert (after["pid"], after["attempt"]) == (demo["pid"], demo["attempt"])


def test_models_that_cannot_run_say_why_and_harm_nothing(dev: Dev, tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_text('[[model]]\nname = "x"\n[[model.profile]]\nengine = "warp"\n')
    assert "warp" in dev.ctl("model", "apply", "-f", str(file), code=3)
    file.write_text('[[model]]\nname = "big"\n[[model.profile]]\nengine = "command"\ncommand = ["/bin/true"]\ngpus = 64\n')
    dev.ctl("model", "apply", "-f", str(file))
    file.write_text('[[model]]\nname = "lost"\n[[model.profile]]\nengine = "xllamacpp"\ncheckpoint = "/nowhere/x.gguf"\n')
    dev.ctl("model", "apply", "-f", str(file))
    crash = f"import sys; sys.stderr.write('cannot load {dev.folder.name}\\n'); sys.exit(3)"
    command = json.dumps([sys.executable, "-c", crash])
    file.write_text(f'[[model]]\nname = "crash"\n[[model.profile]]\nengine = "command"\ncommand = {command}\n')
    dev.ctl("model", "apply", "-f", str(file))
    wait_for(lambda: "64 GPUs" in dev.ctl("explain", "model", "big"), "the arithmetic of the big one")
    wait_for(lambda: "checkpoint missing: /nowhere/x.gguf" in dev.ctl("explain", "model", "lost"), "the missing checkpoint")
    wait_for(lambda: any("exit" in row["reason"] for row in dev.admin.replicas("crash")), "the crash is told")
    status, answer = chat(dev.address, "big")
    assert (status, answer["error"]["code"]) == (503, "no_capacity"), answer
    assert dev.admin.events("replica.crashed")
    for name in ("big", "lost", "crash"):
        dev.ctl("model", "rm", name, "--yes")
    wait_for(lambda: {row["model"] for row in dev.admin.replicas()} == {DEMO}, "they are gone")
    assert chat(dev.address, "demo", max_tokens=2)[0] == 200


def test_the_events_tell_what_happened(dev: Dev) -> None:
    kinds = [event["kind"] for event in dev.admin.events()]
    assert "node.joined" in kinds
    assert "replica.ready" in kinds
    assert DEMO in dev.ctl("events")
    assert "gemma" in dev.ctl("status")
    assert dev.ctl("status", "--check")


def test_ctrl_c_ends_everything_and_a_second_start_comes_back(tmp_path: Path) -> None:
    process, port, admin_port = start(tmp_path)
    try:
        process.wait_output("Ctrl-C ends everything", 180)
        one = Dev(tmp_path, process, port, admin_port)
        (row,) = one.admin.wait_ready(DEMO)
        assert processes_with(str(tmp_path))
        assert process.end(signal.SIGINT) == 0
        assert not psutil.pid_exists(row["pid"])
        assert [p.pid for p in processes_with(str(tmp_path))] == []
        assert "Traceback" not in process.output
    finally:
        process.close()
    again, port, admin_port = start(tmp_path, "--no-engine", name="again")
    try:
        again.wait_output("Ctrl-C ends everything", 60)
        admin = Dev(tmp_path, again, port, admin_port).admin
        wait_for(lambda: admin.replicas() == [], "the stopped replica's record is gone")
        assert not [p for p in processes_with("xllamacpp_server") if str(tmp_path) in str(p.environ())]
        assert again.end(signal.SIGTERM) == 0
    finally:
        again.close()
        end_tree(str(tmp_path))


def test_a_second_ctrl_c_ends_at_once_and_leaves_no_engine(tmp_path: Path) -> None:
    process, port, admin_port = start(tmp_path, "--no-engine")
    try:
        process.wait_output("Ctrl-C ends everything", 60)
        one = Dev(tmp_path, process, port, admin_port)
        command = json.dumps([sys.executable, str(FAKE_ENGINE), "--port", "{port}", "--mark", str(tmp_path)])
        file = tmp_path / "deaf.toml"
        env = 'env = { FAKE_MODE = "deaf,fork,hide" }'
        file.write_text(f'[[model]]\nname = "deaf"\n[[model.profile]]\nengine = "command"\ncommand = {command}\n{env}\n')
        one.ctl("model", "apply", "-f", str(file))
        (row,) = one.admin.wait_ready("deaf")
        tree = [psutil.Process(row["pid"]), *psutil.Process(row["pid"]).children(recursive=True)]
        assert len(tree) == 4
        told = tmp_path / "state" / "llmgw" / "running"  # where `ctl` finds it
        assert [file.name for file in told.iterdir()] == [f"{admin_port}.toml"]
        process.process.send_signal(signal.SIGINT)
        process.wait_output("Ctrl-C again", 30)
        process.process.send_signal(signal.SIGINT)
        assert process.process.wait(30) == 130
        assert psutil.wait_procs(tree, 10)[1] == []
        assert list(told.iterdir()) == []
        assert "Traceback" not in process.output
    finally:
        process.close()
        end_tree(str(tmp_path))


def test_dev_says_in_one_line_what_keeps_it_from_starting(dev: Dev, tmp_path: Path) -> None:
    with program(
        ["dev", "--no-engine", "--data-dir", str(dev.folder / "data"), "--port", "0", "--admin-port", "0"], tmp_path, "same"
    ) as same:
        assert same.process.wait(30) == 4
        assert f"in use by pid {dev.process.process.pid}" in same.output
    with program(
        ["dev", "--no-engine", "--data-dir", str(tmp_path / "d"), "--port", str(dev.port), "--admin-port", "0"], tmp_path, "port"
    ) as port:
        assert port.process.wait(30) in (4, 6)
        assert str(dev.port) in port.output
    hide = tmp_path / "hide"
    hide.mkdir()
    (hide / "sitecustomize.py").write_text("import sys\nsys.modules['xllamacpp'] = None\n")
    env = {"PYTHONPATH": str(hide)}
    with program(["dev", "--data-dir", str(tmp_path / "e"), "--port", "0", "--admin-port", "0"], tmp_path, "wheel", env) as wheel:
        assert wheel.process.wait(30) == 3
        assert "llmgw[demo]" in wheel.output
        assert "Traceback" not in wheel.output
