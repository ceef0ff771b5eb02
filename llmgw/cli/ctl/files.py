"""What `ctl` reads from a file or from standard input, up to a limit, with every fault in words."""

from __future__ import annotations

import sys
from pathlib import Path

from llmgw.domain.errors import Invalid, NotFound


def named(file: Path) -> str:
    """The file as a person named it; `-` is standard input."""
    return "standard input" if str(file) == "-" else str(file)


def read_bytes(file: Path, limit: int, what: str = "") -> bytes:
    """At most `limit` bytes. `what` ends the sentence about a larger file. Raises NotFound, Invalid."""
    source = named(file)
    try:
        if str(file) == "-":
            data = sys.stdin.buffer.read(limit + 1)
        else:
            with file.open("rb") as stream:
                data = stream.read(limit + 1)
    except FileNotFoundError as err:
        raise NotFound(f"there is no file {source}", code="no_such_file") from err
    except OSError as err:
        raise Invalid(f"{source} cannot be read: {err.strerror or err}") from err
    if len(data) > limit:
        raise Invalid(f"{source} is larger than {limit} bytes{what}")
    return data
