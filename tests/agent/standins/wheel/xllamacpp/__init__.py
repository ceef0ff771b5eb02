"""Stands in for the wheel `xllamacpp`: the names that our entry module uses, and nothing that the real one does not have."""

from __future__ import annotations

import enum
from typing import Any

from llama_http import LlamaDialect, broken
from scripted import Server as _Http
from scripted import load, say


class llama_pooling_type(enum.IntEnum):
    LLAMA_POOLING_TYPE_UNSPECIFIED = -1
    LLAMA_POOLING_TYPE_NONE = 0
    LLAMA_POOLING_TYPE_MEAN = 1
    LLAMA_POOLING_TYPE_CLS = 2
    LLAMA_POOLING_TYPE_LAST = 3
    LLAMA_POOLING_TYPE_RANK = 4


class llama_load_mode(enum.IntEnum):
    LLAMA_LOAD_MODE_AUTO = -1
    LLAMA_LOAD_MODE_NONE = 0


class CommonParamsModel:
    __slots__ = ("docker_repo", "hf_file", "hf_repo", "path", "url")


class CpuParams:
    __slots__ = ("n_threads", "poll", "priority", "strict_cpu")


class CommonParams:
    __slots__ = (
        "api_keys", "cache_ram_mib", "chat_template", "cpuparams", "cpuparams_batch", "embedding", "endpoint_metrics", "hostnames",
        "load_mode", "mmproj", "model", "model_alias", "n_batch", "n_ctx", "n_gpu_layers", "n_parallel", "n_ubatch", "pooling_type",
        "port", "ui", "use_jinja", "verbosity",
    )  # fmt: skip

    def __init__(self) -> None:
        self.model = CommonParamsModel()
        self.mmproj = CommonParamsModel()
        self.cpuparams = CpuParams()
        self.cpuparams_batch = CpuParams()
        self.api_keys: list[str] = []
        self.hostnames = ["127.0.0.1"]
        self.model_alias: set[str] = set()
        self.port = 8080
        self.embedding = False
        self.endpoint_metrics = False
        self.pooling_type = llama_pooling_type.LLAMA_POOLING_TYPE_UNSPECIFIED


class Server:
    """Serves from a thread; its constructor returns when the model is loaded."""

    def __init__(self, params: Any) -> None:
        (key,) = params.api_keys
        say(f"0.00.001.000 I srv          init: api_keys: ****{key[-4:]}")
        dialect = LlamaDialect(
            key=key,
            names=params.model_alias,
            metrics=params.endpoint_metrics,
            embedding=params.embedding,
            reranking=params.pooling_type == llama_pooling_type.LLAMA_POOLING_TYPE_RANK,
        )
        http = _Http(dialect, params.hostnames[0], params.port)
        self.listening_address = f"http://{params.hostnames[0]}:{params.port}"
        trouble = load() or broken(params.model.path)
        if trouble:
            say(f"0.00.004.000 E {trouble}")
            say("0.00.005.000 E srv          init: exiting due to model loading error")
            raise RuntimeError("Failed to init server, please check the input params.")
        http.up.set()
