"""Stands in for `llama-server`: its command line, its environment, what it prints and how it ends, around the shared server.

The tables hold the options that an operator is likely to use; whatever is not in them is refused in the real one's words.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import NoReturn

from llama_http import LlamaDialect, broken
from scripted import SCRIPT, Server, load, say

VERSION = "0.6.0-dev (build 11434, commit 930e2fa59)"
WHOLE_NUMBERS = {
    "-c": "--ctx-size", "--ctx-size": "", "-np": "--parallel", "--parallel": "", "-t": "--threads", "--threads": "",
    "-b": "--batch-size", "--batch-size": "", "-ub": "--ubatch-size", "--ubatch-size": "", "-cram": "--cache-ram", "--cache-ram": "",
    "--port": "", "-to": "--timeout", "--timeout": "", "--threads-http": "", "-n": "--predict", "--predict": "",
    "-lv": "--verbosity", "--verbosity": "",
}  # fmt: skip
TEXTS = {
    "-m": "--model", "--model": "", "--host": "", "-a": "--alias", "--alias": "", "--api-key": "", "--api-key-file": "",
    "-ngl": "--n-gpu-layers", "--n-gpu-layers": "", "--gpu-layers": "--n-gpu-layers", "-dev": "--device", "--device": "",
    "-sm": "--split-mode", "--split-mode": "", "-ts": "--tensor-split", "--tensor-split": "", "-mg": "--main-gpu", "--main-gpu": "",
    "--chat-template": "", "--chat-template-file": "", "-mm": "--mmproj", "--mmproj": "", "--pooling": "", "-fa": "--flash-attn",
    "--flash-attn": "", "-ctk": "--cache-type-k", "--cache-type-k": "", "-ctv": "--cache-type-v", "--cache-type-v": "",
    "--api-prefix": "", "--lora": "", "-md": "--model-draft", "--model-draft": "", "--reasoning-format": "",
}  # fmt: skip
SWITCHES = {
    "--metrics": "", "--props": "", "--slots": "", "--no-slots": "", "--ui": "", "--webui": "--ui", "--no-ui": "", "--no-webui": "--no-ui",
    "--embedding": "", "--embeddings": "--embedding", "--reranking": "", "--rerank": "--reranking", "--jinja": "", "--no-jinja": "",
    "--offline": "", "-cb": "--cont-batching", "--cont-batching": "", "--no-warmup": "", "--warmup": "", "--context-shift": "",
    "--version": "", "--log-timestamps": "", "--log-prefix": "", "-kvu": "--kv-unified", "--kv-unified": "", "--swa-full": "",
}  # fmt: skip


def refuse(text: str) -> NoReturn:
    say(text)
    sys.exit(1)


def parse(words: list[str]) -> dict[str, str]:
    """Long name to value. Ends the program for what the real one does not take."""
    found: dict[str, str] = {}
    while words:
        word = words.pop(0)
        option = word.replace("_", "-") if word.startswith("--") else word
        if option in SWITCHES:
            found[SWITCHES[option] or option] = "1"
            continue
        if option not in WHOLE_NUMBERS and option not in TEXTS:
            refuse(f"error: invalid argument: {option}")
        trouble = "" if words else "expected value for argument"
        value = words.pop(0) if words else ""
        if not trouble and option in WHOLE_NUMBERS and not value.lstrip("-").isdigit():
            trouble = "stoi"
        if trouble:
            refuse(f'error while handling argument "{option}": {trouble}\n\nusage:\n{option} N\n\n\nto show complete usage, run with -h')
        found[(WHOLE_NUMBERS | TEXTS)[option] or option] = value
    return found


def main() -> None:
    options = parse(sys.argv[1:])
    if "--version" in options:
        say(f"version: {VERSION}\nbuilt with GNU 12.2.0 for Linux x86_64")
        sys.exit(0)
    if options.get("--device") == "none" and os.environ.get("CUDA_VISIBLE_DEVICES"):
        refuse("stand-in: it was given GPUs and told to use none")
    key = options.get("--api-key") or os.environ.get("LLAMA_API_KEY", "")
    if key:
        say(f"0.00.001.000 I srv          init: api_keys: ****{key[-4:]}")
    model = options.get("--model", "")
    dialect = LlamaDialect(
        key=key,
        names={part.strip() for part in options.get("--alias", os.path.basename(model)).split(",") if part.strip()} or {"router"},
        metrics="--metrics" in options,
        embedding="--embedding" in options or "--reranking" in options,
        reranking="--reranking" in options,
    )
    try:
        server = Server(dialect, options.get("--host", "127.0.0.1"), int(options.get("--port", "9931")))
    except OSError:
        say(f"0.00.002.000 E srv         start: couldn't bind HTTP server socket, hostname: {options.get('--host')}")
        refuse("0.00.002.100 E srv  llama_server: exiting due to HTTP server error")
    if model:  # without one it is a router of models: it answers on /health and serves nothing
        trouble = load() or broken(model)
        if trouble:
            say(f"0.00.004.000 E {trouble}")
            say(f"0.00.004.100 E srv    load_model: failed to load model, '{model}'")
            refuse("0.00.004.200 E srv  llama_server: exiting due to model loading error")
    ends = threading.Event()

    def stop(*_: object) -> None:
        if ends.is_set():
            say("Received second interrupt, terminating immediately.")
            os._exit(1)
        ends.set()

    if not SCRIPT.get("deaf"):
        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, stop)
    server.up.set()
    say("0.00.005.000 I srv  llama_server: model loaded")
    ends.wait()
    dialect.work.held()  # its loop sees the wish to end
    say("0.00.009.000 I srv  llama_server: cleaning up before exit...")


if __name__ == "__main__":
    main()
