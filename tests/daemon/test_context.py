"""How much context two peers agree on: two Setups face to face, over engines that know what fits and nothing else."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from peerllm.daemon.config import DaemonConfig
from peerllm.daemon.engine import Engine
from peerllm.daemon.setup import Agreed, Setup
from peerllm.daemon.worker_process import Reply
from peerllm.protocol.errors import NotEnoughMemory
from peerllm.protocol.fields import to_map
from peerllm.protocol.identity import LayerRange, ModelIdentity
from tests.daemon.test_consent import Somebody

MOST = 32768
LEAST = 256
IDENTITY = ModelIdentity(config="c", vocabulary="v", tensors="t", layers=4)
MODEL = {
    "name": "m", "source": None, "revision": None, "folder": "/m", "identity": to_map(IDENTITY), "layers": 4,
    "max_context": MOST, "hidden_size": 64, "download_bytes": 1,
}  # fmt: skip


class RoomyEngine(Engine):
    """Has room for a context of `fits`."""

    def __init__(self, fits: int) -> None:
        super().__init__(on_progress=lambda *_: None, on_lost=lambda _: None, on_restored=lambda: None)
        self.fits = fits
        self.asked: list[str] = []

    async def call(self, op: str, payload: bytes = b"", *, deadline: float | None = None, **arguments: Any) -> Reply:
        self.asked.append(op)
        answers: dict[str, dict[str, Any]] = {
            "machine": {"devices": [{"device": "cpu", "free_bytes": 1}], "dtypes": ["float32"]},
            "describe": MODEL,
            "fetch": {"folder": "/m"},
            "load": {"context": arguments.get("context")},
        }
        if op != "plan":
            return Reply(answers[op], b"")
        if arguments["context"] > self.fits and (arguments["is_context_named"] or self.fits < LEAST):
            raise NotEnoughMemory(f"{arguments['context']} positions are too many; {self.fits} would fit")
        return Reply({"context": min(arguments["context"], self.fits), "words": []}, b"")


class Side:
    """One end of a channel, and the Setup that talks over it."""

    def __init__(self, fits: int, context: int | None, layers: LayerRange | None = None) -> None:
        here = Path("/nowhere")
        self.engine = RoomyEngine(fits)
        config = DaemonConfig(
            signaling="", state_dir=here, socket=here, model="m", context=context, layers=layers, draft="none"
        )
        self.setup = Setup(config, self.engine, Somebody(True, True))
        self.queue: asyncio.Queue[Any] = asyncio.Queue()
        self.other: Side | None = None

    async def send(self, message: Any) -> None:
        assert self.other is not None
        self.other.queue.put_nowait(message)

    async def receive(self) -> Any:
        return await self.queue.get()


async def agree(opener: Side, joiner: Side) -> list[Any]:
    """What each side agrees to, or refuses for."""
    opener.other, joiner.other = joiner, opener
    return await asyncio.gather(
        *(side.setup.agree(side, is_opener=side is opener) for side in (opener, joiner)),  # type: ignore[arg-type]
        return_exceptions=True,
    )


async def sides(*each: Side) -> tuple[Side, ...]:
    for side in each:
        await side.setup.describe()
        side.engine.asked.clear()
    return each


def contexts(agreed: list[Any]) -> list[int]:
    for each in agreed:
        if not isinstance(each, Agreed):
            raise each
    return [each.boundary.context for each in agreed]


@pytest.mark.parametrize(
    ("fits", "named", "expected"),
    [
        ((9000, 4000), (None, None), 4000),
        ((4000, 9000), (None, None), 4000),
        ((MOST, MOST), (None, None), MOST),
        ((9000, 4000), (2048, None), 2048),
        ((9000, 4000), (2048, 1024), 1024),
        ((1500, 4000), (2048, 1024), 1024),
        ((9000, 100), (None, 64), 64),
    ],
)
async def test_the_context_is_the_largest_that_fits_both_and_nobody_wants_less(
    fits: tuple[int, int], named: tuple[int | None, int | None], expected: int
) -> None:
    opener, joiner = await _pair(fits, named)
    assert contexts(await agree(opener, joiner)) == [expected, expected]
    for side in (opener, joiner):
        assert side.engine.asked == ["plan", "fetch", "load"]


async def _pair(fits: tuple[int, int], named: tuple[int | None, int | None]) -> tuple[Side, Side]:
    made = [Side(MOST, wish) for wish in named]
    await sides(*made)
    for side, room in zip(made, fits, strict=True):
        side.engine.fits = room  # what fits one layer fits; this is about the layers that come out
    return made[0], made[1]


@pytest.mark.parametrize(
    ("fits", "named"),
    [
        ((9000, 4000), (8192, None)),
        ((4000, 9000), (8192, None)),
        ((9000, 4000), (None, 8192)),
        ((4000, 9000), (None, 8192)),
        ((9000, 100), (None, None)),
        ((100, 9000), (None, None)),
    ],
)
async def test_a_named_context_that_does_not_fit_one_side_is_refused_at_both_before_anything_is_fetched(
    fits: tuple[int, int], named: tuple[int | None, int | None]
) -> None:
    opener, joiner = await _pair(fits, named)
    for refused in await agree(opener, joiner):
        assert isinstance(refused, NotEnoughMemory)
        assert f"{min(fits)} would fit" in refused.message
    for side in (opener, joiner):
        assert not {"fetch", "load"} & set(side.engine.asked)


async def test_when_the_other_side_starts_anew_the_context_stays_and_nothing_is_loaded_again() -> None:
    opener, joiner = await _pair((9000, 4000), (None, None))
    await agree(opener, joiner)
    again = (await sides(Side(5000, None)))[0]  # more is free now; an answer in the making is worth more
    opener.engine.asked.clear()
    assert contexts(await agree(opener, again)) == [4000, 4000]
    assert opener.engine.asked == []


async def test_what_is_loaded_has_room_for_less() -> None:
    opener, joiner = await _pair((9000, 4000), (None, None))
    await agree(opener, joiner)
    for wish, asked in ((2048, ["fetch", "load"]), (2048, [])):
        again = (await sides(Side(9000, wish)))[0]
        opener.engine.asked.clear()
        opener.engine.loaded = {}
        assert contexts(await agree(opener, again)) == [wish, wish]
        assert opener.engine.asked == asked


async def test_a_context_that_is_named_anew_is_planned_anew() -> None:
    opener, joiner = await _pair((9000, 4000), (None, None))
    await agree(opener, joiner)
    again = (await sides(Side(9000, 8192)))[0]
    assert contexts(await agree(opener, again)) == [8192, 8192]
    back = (await sides(Side(9000, None)))[0]  # what a name cut short grows again
    assert contexts(await agree(opener, back)) == [9000, 9000]


async def test_what_cannot_fit_whoever_the_other_peer_is_is_said_before_there_is_one() -> None:
    for layers, calls in ((LayerRange(0, 2), 1), (None, 2)):
        side = Side(100, None, layers)
        with pytest.raises(NotEnoughMemory, match="100 would fit"):
            await side.setup.describe()
        assert side.engine.asked.count("plan") == calls
    await Side(100, 64, LayerRange(0, 2)).setup.describe()
