"""Events with fields, and no more of an address than a keyed hash. Bodies, numbers and tokens are never logged."""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import sys
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
