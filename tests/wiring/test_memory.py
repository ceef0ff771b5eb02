"""How a process keeps memory."""

from __future__ import annotations

import subprocess
import sys

# Page faults of 200 bodies of 1 MB, each put together of parts and let go: 256 pages each, where the kernel gets them back.
ROUNDS = """
import resource, sys
from llmgw.wiring.memory import keep_freed_memory
if sys.argv[1:]:
    keep_freed_memory()
parts = [bytes(65536) for _ in range(16)]
joined = [b"".join(parts), b"".join(parts)]  # what is between them is no free end of the heap
joined.clear()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(200):
    one, other = b"".join(parts), b"".join(parts)
    del one, other
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _faults(*how: str) -> int:
    return int(subprocess.run([sys.executable, "-c", ROUNDS, *how], check=True, capture_output=True, text=True).stdout)


def test_what_a_body_leaves_behind_is_there_for_the_next() -> None:
    assert _faults("kept") < 1_000
    assert _faults() > 10_000  # by itself the allocator gives it all back
