"""What a role's process leaves out: it runs for months, and there are many of it on a machine."""

from __future__ import annotations

import sys


def leave_rich_out() -> None:
    """structlog imports rich where it is installed, for a form of tracebacks that no role writes: 5 MB in each process.

    Only `ctl` draws tables with it. Where structlog is loaded already there is nothing left to save.
    """
    if "structlog" not in sys.modules:
        sys.modules.setdefault("rich", None)  # type: ignore[arg-type]  # Python's own mark of a module that cannot be imported
