from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.rooms import RoomOfTwo, room_of_two
from tests.tiny_models import make_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama whose text transformers itself can make."""
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    make_model(folder, "llama")
    return folder


@pytest.fixture(scope="module")
def room(tiny_model: Path) -> Iterator[RoomOfTwo]:
    with room_of_two(str(tiny_model)) as both:
        yield both
