"""What our processes write to the standard error: structured lines, as text for a person or for a collector."""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog

from llmgw.settings.schema import LogSettings


def configure_logs(settings: LogSettings) -> None:
    """Sets up logging for this process. `auto` is coloured text on a terminal and logfmt elsewhere."""
    level = getattr(logging, settings.level.upper())
    kind = settings.format
    if kind == "auto":
        kind = "console" if sys.stderr.isatty() else "logfmt"
    renderer: Any
    if kind == "json":
        renderer = structlog.processors.JSONRenderer()
    elif kind == "logfmt":
        renderer = structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"], drop_missing=True)
    else:
        renderer = structlog.dev.ConsoleRenderer(colors=True, exception_formatter=structlog.dev.plain_traceback)
    processors: list[Any] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    if kind != "console":
        processors.append(structlog.processors.format_exc_info)
    structlog.configure(
        processors=[*processors, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    # The web server logs through the standard library; only what needs a person is passed on.
    logging.basicConfig(stream=sys.stderr, level=max(level, logging.WARNING), format="%(asctime)s %(levelname)s %(name)s %(message)s")
