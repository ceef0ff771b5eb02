"""Entry module of engine `xllamacpp`, run by `agent.own_modules` with llama.cpp's options as arguments.

A process of its own, so that a crash of llama.cpp is an engine's crash. It lives on when the agent dies, and ends on
SIGTERM. Its secret, names, port and checkpoint come from the environment, never from argv.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
from typing import Any, Final

from llmgw.agent.engines import xllamacpp as description
from llmgw.agent.engines.description import KEY_VARIABLE
from llmgw.domain.errors import EXIT_BROKEN, EXIT_INVALID, Invalid

RETRIED_VARIABLE: Final = "LLMGW_ENGINE_OPENMP"


def parameters(library: Any, env: dict[str, str], args: list[str]) -> Any:
    """llama.cpp's parameters for this process. Raises `Invalid` for a wrong option, KeyError for a missing variable."""
    chosen = description.options(args)
    params = library.CommonParams()
    params.model.path = env[description.CHECKPOINT_VARIABLE]
    params.hostnames = [env[description.HOST_VARIABLE]]
    params.port = int(env[description.PORT_VARIABLE])
    params.api_keys = [env[KEY_VARIABLE]]
    params.model_alias = set(json.loads(env[description.NAMES_VARIABLE]))
    params.endpoint_metrics = True
    params.ui = False
    params.embedding = env.get(description.EMBEDDING_VARIABLE) == "1"
    if env.get(description.RERANK_VARIABLE) == "1":
        params.embedding = True
        params.pooling_type = library.llama_pooling_type.LLAMA_POOLING_TYPE_RANK
    for name, value in chosen.items():
        if name == "n_threads":
            params.cpuparams.n_threads = value
            params.cpuparams_batch.n_threads = value
        elif name == "chat_template":
            params.use_jinja = "{" in str(value)  # a template itself needs jinja; llama.cpp knows the names of its own without
            params.chat_template = value
        elif name == "mmproj":
            params.mmproj.path = value
        elif name == "no_mmap":
            params.load_mode = library.llama_load_mode.LLAMA_LOAD_MODE_NONE
        else:
            setattr(params, name, value)
    return params


def start_again_with_openmp() -> None:
    """llama.cpp's wheel takes its OpenMP runtime from the system. Where there is none, this process starts anew with the one of
    the package `cmeel-libomp`: a loader path is read at a program's start only. Returns where that cannot help.
    """
    found = importlib.util.find_spec("cmeel")
    if found is None or found.origin is None or os.environ.get(RETRIED_VARIABLE):
        return
    folder = os.path.join(os.path.dirname(os.path.dirname(found.origin)), "cmeel.prefix", "lib")
    if not os.path.exists(os.path.join(folder, "libgomp.so.1")):
        return
    path = ":".join(part for part in (folder, os.environ.get("LD_LIBRARY_PATH", "")) if part)
    environment = {**os.environ, "LD_LIBRARY_PATH": path, RETRIED_VARIABLE: "1"}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def main() -> int:
    """Serves until a signal ends the process; returns an exit code when it cannot serve.

    No handlers: the agent drains a replica before it sends TERM, so there is nothing to finish, and llama.cpp's own way out
    waits for connections that clients keep open. The default action also ends a load that Python could not interrupt.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        import xllamacpp as library  # a wheel that only this process needs; its absence is told in one line
    except ImportError as err:
        if "libgomp" in str(err):
            start_again_with_openmp()
        print(f"engine xllamacpp cannot be loaded: {err}", file=sys.stderr)
        return EXIT_INVALID
    try:
        params = parameters(library, dict(os.environ), sys.argv[1:])
    except Invalid as err:
        print(err.message, file=sys.stderr)
        return EXIT_INVALID
    except KeyError as err:
        print(f"{err.args[0]} is not set; this program is started by llmgw's agent", file=sys.stderr)
        return EXIT_INVALID
    try:
        server = library.Server(params)
    except RuntimeError as err:
        print(f"llama.cpp cannot serve {params.model.path}: {err}", file=sys.stderr)
        return EXIT_BROKEN
    print(f"serving {params.model.path} at {server.listening_address}", file=sys.stderr, flush=True)
    while True:
        signal.pause()


if __name__ == "__main__":
    sys.exit(main())
