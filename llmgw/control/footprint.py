"""How much memory a replica is promised before anything was measured, and in words where the number comes from. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from llmgw.control.observed import MemoryNeed
from llmgw.domain.model import Catalog, Profile

# Estimate of product.md ([[model.profile]] memory_mib): the files with a fifth for caches and buffers, and a base for the engine.
FILES_FACTOR: Final = 1.2
BASE_MIB: Final = 512
SizeOf = Callable[[str], int | None]


def estimate(profile: Profile, size_of: SizeOf) -> MemoryNeed:
    """`size_of(checkpoint)` is the size of its files in bytes, or None where it cannot be told from here."""
    if profile.memory_mib:
        return MemoryNeed(profile.memory_mib, "the profile's memory_mib")
    if not profile.checkpoint:
        return MemoryNeed(BASE_MIB, f"{BASE_MIB} MiB assumed without a checkpoint")
    size = size_of(profile.checkpoint)
    if size is None:
        return MemoryNeed(BASE_MIB, f"{BASE_MIB} MiB assumed, the size of {profile.checkpoint} is not known here")
    files_mib = -(-size // (1024 * 1024))
    return MemoryNeed(int(files_mib * FILES_FACTOR) + BASE_MIB, f"{files_mib} MiB of checkpoint files x {FILES_FACTOR} + {BASE_MIB} MiB")


def needs(catalog: Catalog, size_of: SizeOf) -> Mapping[str, MemoryNeed]:
    """By profile digest, for every profile that is started by us."""
    return {
        profile.digest(): estimate(profile, size_of) for model in catalog.models for profile in model.profiles if profile.engine != "openai"
    }
