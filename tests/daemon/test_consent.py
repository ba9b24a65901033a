"""Nothing is downloaded before the person agreed: Setup between an engine and a person that the tests play."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from peerllm.daemon.config import DaemonConfig
from peerllm.daemon.engine import Engine
from peerllm.daemon.events import Notice
from peerllm.daemon.setup import Setup
from peerllm.daemon.worker_process import Reply
from peerllm.protocol.errors import DownloadNeeded, ModelNotFound
from peerllm.protocol.identity import LayerRange, ModelIdentity
from peerllm.protocol.messages import Offer, Plan

MODEL = "someone/model"
IDENTITY = ModelIdentity(config="c", vocabulary="v", tensors="t", layers=4)
OFFER = Offer(name=MODEL, source=MODEL, identity=IDENTITY, codec="exact", dtypes=("float32",), free_bytes=1, context=64)
PLAN = Plan(opener_layers=LayerRange(0, 2), joiner_layers=LayerRange(2, 4), dtype="float32", context=64)


class FetchingEngine(Engine):
    """Describing and fetching need leave, except for what is `here`; fetching with it is a download."""

    def __init__(self, *, here: frozenset[str] = frozenset()) -> None:
        super().__init__(on_progress=lambda *_: None, on_lost=lambda _: None, on_restored=lambda: None)
        self.here = here
        self.downloads: list[str] = []

    async def call(self, op: str, payload: bytes = b"", *, deadline: float | None = None, **arguments: Any) -> Reply:
        if op in ("describe", "fetch") and op not in self.here:
            if not arguments["allow_download"]:
                raise DownloadNeeded(f"{op}: 1.20 GB are not on this machine")
            self.downloads += ["fetch"] * (op == "fetch")
        answers: dict[str, dict[str, Any]] = {
            "machine": {"devices": [{"device": "cpu", "free_bytes": 1}], "dtypes": ["float32"]},
            "describe": {"folder": "/snapshot", "source": MODEL, "revision": "c0ffee", "download_bytes": 9}
            | {"layers": 4, "max_context": 64},
            "plan": {"context": 64, "words": []},
            "fetch": {"folder": "/snapshot"},
            "load": {},
        }
        return Reply(answers[op], b"")


class Somebody:
    def __init__(self, *answers: bool) -> None:
        self.answers = list(answers)
        self.questions: list[str] = []

    def tell(self, notice: Notice) -> None:
        pass

    async def may_download(self, question: str) -> bool:
        self.questions.append(question)
        return self.answers.pop(0)


def setup_of(engine: Engine, person: Somebody, *, is_download_allowed: bool = False) -> Setup:
    here = Path("/nowhere")
    return Setup(
        DaemonConfig(
            signaling="ws://127.0.0.1:1",
            state_dir=here,
            socket=here,
            model=MODEL,
            is_download_allowed=is_download_allowed,
        ),
        engine,
        person,
    )


async def test_a_yes_to_the_whole_model_covers_its_layers() -> None:
    engine, person = FetchingEngine(), Somebody(True)
    setup = setup_of(engine, person)
    await setup.describe()
    await setup._fetch_and_load(OFFER, PLAN, LayerRange(0, 2))
    assert engine.downloads == ["fetch"]
    assert len(person.questions) == 1


async def test_layers_that_are_missing_of_a_model_that_is_partly_here_are_asked_for_each_time() -> None:
    engine, person = FetchingEngine(here=frozenset({"describe"})), Somebody(True, False)
    setup = setup_of(engine, person)
    await setup.describe()
    assert person.questions == []
    await setup._fetch_and_load(OFFER, PLAN, LayerRange(0, 2))
    assert engine.downloads == ["fetch"]
    with pytest.raises(ModelNotFound, match=r"1\.20 GB .*--yes"):
        await setup._fetch_and_load(OFFER, PLAN, LayerRange(1, 3))
    assert engine.downloads == ["fetch"]
    assert len(person.questions) == 2


async def test_a_no_downloads_nothing() -> None:
    engine, person = FetchingEngine(), Somebody(False)
    with pytest.raises(ModelNotFound, match="nobody here agreed"):
        await setup_of(engine, person).describe()
    assert engine.downloads == []


async def test_with_leave_from_the_start_nobody_is_asked() -> None:
    engine, person = FetchingEngine(), Somebody()
    setup = setup_of(engine, person, is_download_allowed=True)
    await setup.describe()
    await setup._fetch_and_load(OFFER, PLAN, LayerRange(0, 2))
    assert engine.downloads == ["fetch"]
    assert person.questions == []
