"""What our processes write to the standard error: structured lines, as text for a person or for a collector."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any, Final

import structlog

from llmgw.domain.words import plain, plain_line
from llmgw.settings.schema import LogSettings

_MANY_LINES: Final = frozenset({"exception", "stack"})  # our own


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
        renderer = structlog.dev.ConsoleRenderer(colors=True, exception_formatter=_traceback)
    processors: list[Any] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    if kind != "console":
        processors.append(structlog.processors.format_exc_info)
    if kind != "json":  # JSON escapes what others would pass on to a terminal
        processors.append(_harmless)
    structlog.configure(
        processors=[*processors, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    # The web server logs through the standard library; only what needs a person is passed on.
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Plain("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logging.basicConfig(level=max(level, logging.WARNING), handlers=[handler])


def _harmless(logger: Any, method: str, event: MutableMapping[str, Any]) -> Mapping[str, Any]:
    """What engines, agents and clients wrote steers no terminal, and looks like no line of ours."""
    return {
        name: value if not isinstance(value, str) else plain(value) if name in _MANY_LINES else plain_line(value)
        for name, value in event.items()
    }


def _traceback(out: Any, exc_info: Any) -> None:
    text = io.StringIO()
    structlog.dev.plain_traceback(text, exc_info)
    out.write(plain(text.getvalue()))


class _Plain(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return plain(super().format(record))
