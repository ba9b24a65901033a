"""Events with fields, and no more of an address than a keyed hash. Bodies, numbers and tokens are never logged."""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import sys
import traceback
from typing import Any

import structlog

LEVELS = ("debug", "info", "warning", "error")
_KEY = secrets.token_bytes(32)  # of this process alone: two logs cannot be joined by it


def masked(group: str) -> str:
    """The same word for the same address for as long as this process lives, and no way back."""
    return hmac.new(_KEY, group.encode(), hashlib.sha256).hexdigest()[:12]


def configure(level: str) -> None:
    number = getattr(logging, level.upper())
    # Libraries write addresses and request lines into their messages: what they say does not come through.
    logging.getLogger().addHandler(logging.NullHandler())
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )


def get() -> Any:
    return structlog.get_logger()


class Bridge(logging.Handler):
    """What a library logs, as an event with the kind of the error and its place in the code: never its words, which
    hold addresses and what clients sent."""

    def emit(self, record: logging.LogRecord) -> None:
        kind, place = None, None
        if record.exc_info is not None and record.exc_info[0] is not None:
            kind = record.exc_info[0].__name__
            frames = traceback.extract_tb(record.exc_info[2])
            place = f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}" if frames else None
        event = get().error if record.levelno >= logging.ERROR and place is not None else get().debug
        event("library", name=record.name, kind=kind, place=place)
