"""What our processes write to the standard error: structured lines, as text for a person or for a collector."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any, Final, TextIO, cast

import structlog

from llmgw.domain.words import plain, plain_line
from llmgw.settings.schema import LogSettings

_MANY_LINES: Final = frozenset({"exception", "stack"})  # our own


def configure_logs(settings: LogSettings, **always: object) -> None:
    """Sets up logging for this process. `auto` is coloured text on a terminal and logfmt elsewhere. `always` stands in every line."""
    output = LogOutput(sys.stderr)
    level = getattr(logging, settings.level.upper())
    kind = settings.format
    if kind == "auto":
        kind = "console" if sys.stderr is not None and sys.stderr.isatty() else "logfmt"
    renderer: Any
    if kind == "json":
        renderer = structlog.processors.JSONRenderer()
    elif kind == "logfmt":
        renderer = structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"], drop_missing=True, bool_as_flag=False)
    else:
        renderer = structlog.dev.ConsoleRenderer(colors=True, exception_formatter=_traceback)
    processors: list[Any] = [
        lambda logger, method, event: {**always, **event},
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
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, output)),
        cache_logger_on_first_use=True,
    )
    # The web server logs through the standard library; only what needs a person is passed on.
    handler = logging.StreamHandler(cast(TextIO, output))
    handler.setFormatter(_Plain("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logging.basicConfig(level=max(level, logging.WARNING), handlers=[handler])


class LogOutput:
    """The standard error as a place for lines. What cannot be written (a full disk, a reader that has gone) is lost: it ends nobody."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._descriptor = -1
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):  # a stand-in has none
                self._descriptor = stream.fileno()

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            if self._descriptor >= 0:  # past Python's buffer, which would try again for ever, and once more at the end
                os.write(self._descriptor, text.encode("utf-8", "backslashreplace"))
            elif self._stream is not None:
                self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Nothing is held back."""


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
