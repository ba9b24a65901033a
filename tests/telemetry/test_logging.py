"""Logs: their form, their level, and what never gets into them."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from peerllm.telemetry.logging import REDACTED, SECRET_FIELDS, configure_logging


class Stream(io.StringIO):
    def __init__(self, is_terminal: bool = False) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal

    def events(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.getvalue().splitlines()]


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """What `configure_logging` changes is the process's."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def test_elsewhere_an_event_is_one_json_object_a_line() -> None:
    stream = Stream()
    configure_logging("info", stream)
    structlog.get_logger().info("link_up", path="direct", rtt_ms=83.2)
    (event,) = stream.events()
    assert event.pop("timestamp")
    assert event == {"event": "link_up", "level": "info", "path": "direct", "rtt_ms": 83.2}


def test_on_a_terminal_an_event_is_a_line_for_people() -> None:
    stream = Stream(is_terminal=True)
    configure_logging("info", stream)
    structlog.get_logger().info("link_up", path="direct")
    assert "link_up" in stream.getvalue()
    assert not stream.getvalue().startswith("{")


@pytest.mark.parametrize(("level", "shown"), [("debug", 4), ("info", 3), ("warning", 2), ("error", 1)])
def test_the_level_is_a_threshold(level: str, shown: int) -> None:
    stream = Stream()
    configure_logging(level, stream)
    log = structlog.get_logger()
    for name in ("debug", "info", "warning", "error"):
        getattr(log, name)("something")
    assert len(stream.events()) == shown


@pytest.mark.parametrize("is_terminal", [False, True])
@pytest.mark.parametrize("field", sorted(SECRET_FIELDS))
def test_secrets_are_redacted_at_any_depth(field: str, is_terminal: bool) -> None:
    stream = Stream(is_terminal)
    configure_logging("debug", stream)
    secret = "4127-copper-walrus"
    log = structlog.get_logger().bind(**{field: secret})
    log.info("bound")
    structlog.get_logger().info(
        "nested", **{field.upper(): secret, "deep": {"list": [{field: secret}], "tuple": ({field: [secret]},)}}
    )
    assert secret not in stream.getvalue()
    assert stream.getvalue().count(REDACTED) == 4


def test_a_traceback_shows_no_values_of_variables() -> None:
    for is_terminal in (False, True):
        stream = Stream(is_terminal)
        configure_logging("debug", stream)
        prompt = "what the user said"
        try:
            raise ValueError(len(prompt))
        except ValueError:
            structlog.get_logger().exception("failed")
        assert "ValueError: 18" in stream.getvalue()
        assert prompt not in stream.getvalue().replace('prompt = "what the user said"', "")


def test_libraries_are_heard_from_warnings_up() -> None:
    stream = Stream()
    configure_logging("debug", stream)
    library = logging.getLogger("aioice.ice")
    library.info("Connection(0) Check CandidatePair(('203.0.113.5', 1) -> ...)")
    library.warning("something is %s", "wrong")
    (event,) = stream.events()
    assert (event["event"], event["level"]) == ("something is wrong", "warning")


def test_configuring_twice_writes_once() -> None:
    first, second = Stream(), Stream()
    configure_logging("info", first)
    log = structlog.get_logger()
    configure_logging("info", second)
    log.info("x")
    logging.getLogger("library").warning("y")
    assert first.getvalue() == ""
    assert len(second.events()) == 2
