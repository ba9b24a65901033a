"""Logs are events with fields, on standard error: for people on a terminal, one JSON object a line elsewhere.

What users say and what opens a room never gets in: fields whose name says so are replaced by a word, at any depth.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import Any, TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

LEVELS = ("debug", "info", "warning", "error")

SECRET_FIELDS = frozenset(
    {
        "code", "room_code", "words", "key", "private_key", "session_key", "secret", "password", "credential",
        "prompt", "text", "texts", "message_text", "messages", "content", "token", "tokens", "candidates", "body",
    }
)  # fmt: skip
"""Names of fields that are never shown. An error's code goes under `error`."""
REDACTED = "(redacted)"


def redact(logger: WrappedLogger, name: str, event: EventDict) -> EventDict:
    """A structlog processor: the same event without what `SECRET_FIELDS` name."""
    return {field: _redacted(field, value) for field, value in event.items()}


def _redacted(field: str, value: Any) -> Any:
    if field.lower() in SECRET_FIELDS:
        return REDACTED
    if isinstance(value, Mapping):
        return {key: _redacted(str(key), item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_redacted("", item) for item in value]
    return value


def configure_logging(level: str = "info", stream: TextIO | None = None) -> None:
    """Sends structlog's events, and what libraries log, to `stream` (standard error).

    Libraries log at warnings and above only: their lower levels show addresses and what is sent.

    Args:
        level: one of `LEVELS`.
    """
    stream = sys.stderr if stream is None else stream
    threshold = getattr(logging, level.upper())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        redact,
    ]
    on_terminal = stream.isatty()
    # Tracebacks without the values of variables: a frame's variables have prompts and keys in them.
    if on_terminal:
        last: list[Processor] = [
            structlog.dev.ConsoleRenderer(colors=True, exception_formatter=structlog.dev.plain_traceback)
        ]
    else:
        last = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    structlog.configure(
        processors=[*shared, *last],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.WriteLoggerFactory(file=stream),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last]
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(threshold, logging.WARNING))
    # What it calls errors are requests that are no HTTP; each is answered, and none is ours to mend.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
