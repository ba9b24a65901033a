"""An answer streams across a wide-area network, and nothing that happens to it costs its reader a token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.outliving import DISTURBANCES, QUESTION, TOKENS, LabRoom, Streaming, lab_room

pytestmark = [pytest.mark.root, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def room(tiny_model: Path) -> Iterator[LabRoom]:
    with lab_room(tiny_model, rtt_ms=20.0) as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(room: LabRoom) -> str:
    answer = room.first.complete(**QUESTION)
    assert answer["tokens"] == TOKENS
    return str(answer["text"])


@pytest.mark.parametrize("what", DISTURBANCES)
def test_the_text_is_the_undisturbed_one_to_the_letter(room: LabRoom, undisturbed: str, what: str) -> None:
    asker, disturb = DISTURBANCES[what]
    answer = Streaming(getattr(room, asker))
    goes_on = disturb(room)
    assert answer.finish(90) == undisturbed
    assert answer.tokens == TOKENS
    assert answer.seconds_to_next(goes_on) < float("inf"), "it was over before it was disturbed"
    for daemon in (room.first, room.second):
        daemon.wait_well()
