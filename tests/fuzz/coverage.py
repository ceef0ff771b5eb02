"""Fuzzing led by coverage: `python -m tests.fuzz.coverage SECONDS [TARGET...]` gives each target so many seconds.

An input that breaks a promise is written to `tests/fuzz/corpus/TARGET/`, where `make test` replays it, and ends the run with 1.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.fuzz.inputs import CORPUS, SEEDS, SIZE_MAX, WORDS, kept
from tests.fuzz.targets import TARGETS

# What is watched for new paths; the modules are loaded anew with counters in them.
WATCHED = [
    *(f"llmgw.router.{name}" for name in ("http1", "sse", "body", "gate", "guard_rules", "prompt", "families")),
    "llmgw.settings",
]


def one(target: str, seconds: int, folder: Path) -> None:
    """Fuzzes in this process, and ends it: the library does."""
    import atheris

    for name in [name for name in sys.modules if name.startswith(tuple(WATCHED)) or name == "tests.fuzz.targets"]:
        del sys.modules[name]
    with atheris.instrument_imports(include=WATCHED):
        targets = importlib.import_module("tests.fuzz.targets")
    seeds = folder / "seeds"
    seeds.mkdir()
    for number, data in enumerate(SEEDS[target] + kept(target)):
        (seeds / f"{number}").write_bytes(data[:SIZE_MAX])
    words = folder / "words"
    words.write_text("".join('"' + "".join(f"\\x{byte:02x}" for byte in word) + '"\n' for word in WORDS[target]))
    found = CORPUS / target
    found.mkdir(parents=True, exist_ok=True)
    options = [f"-max_total_time={seconds}", f"-max_len={SIZE_MAX}", f"-dict={words}", f"-artifact_prefix={found}/", "-verbosity=0"]
    atheris.Setup([sys.argv[0], *options, "-print_final_stats=1", str(seeds)], targets.TARGETS[target])
    atheris.Fuzz()


def main(given: list[str]) -> int:
    """Exit code 0: nothing was broken."""
    seconds, names = int(given[0]), given[1:] or list(TARGETS)
    broken = []
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            ended = subprocess.run([sys.executable, "-m", "tests.fuzz.coverage", "--one", name, str(seconds), folder], check=False)
        print(f"{name}: {'nothing broken' if ended.returncode == 0 else 'BROKEN'}", flush=True)
        if ended.returncode:
            broken.append(name)
    return 1 if broken else 0


if __name__ == "__main__":
    if sys.argv[1] == "--one":
        one(sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
    else:
        sys.exit(main(sys.argv[1:]))
