"""What `peerllm doctor` makes of a link that is lost under its measurements, and of a greeting that lies."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from peerllm.daemon import doctor
from peerllm.daemon.events import Connected, Notice, Progress, Trouble
from peerllm.daemon.meeting import tell_states
from peerllm.link import bench
from peerllm.protocol import cbor
from peerllm.protocol.errors import LinkError, PeerAway
from tests.link.pair import SECONDS, Pair


class Listener:
    def __init__(self) -> None:
        self.told: list[Notice] = []

    def tell(self, notice: Notice) -> None:
        self.told.append(notice)

    async def may_download(self, question: str) -> bool:
        return False


def lose(pair: Pair) -> None:
    """Both sides lose the connection at once, and will find another."""
    for side in (pair.left, pair.right):
        assert side.link._current is not None
        side.link._current._fail(PeerAway("cut"))


@pytest.mark.parametrize("lost_at", [0.0, 0.4], ids=["while loss is measured", "while a flood runs"])
async def test_a_connection_that_is_lost_once_is_measured_again(
    pair: Pair, lost_at: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_loss, real_flood = bench.measure_loss, bench.measure_throughput
    monkeypatch.setattr(bench, "measure_loss", lambda link: real_loss(link, seconds=0.5))
    monkeypatch.setattr(bench, "measure_throughput", lambda link: real_flood(link, seconds=0.5))
    await pair.start()
    listener, lost = Listener(), []

    def tell(notice: Notice) -> None:
        listener.told.append(notice)
        if isinstance(notice, Progress) and notice.fraction == lost_at and not lost:
            lost.append(asyncio.get_running_loop().call_later(0.2, lose, pair))

    person = Listener()
    monkeypatch.setattr(person, "tell", tell)
    tell_states(pair.left.link, tell)
    result: dict[str, Any] = {}
    async with asyncio.timeout(2 * SECONDS):
        serving = asyncio.create_task(bench.serve(pair.right.link))
        await doctor._measure(pair.left.link, person, result)
        await serving
    assert result["replaced"] == 1
    assert result["loss_out"] is not None
    assert min(result["mbit_out"], result["mbit_in"]) > 0.5
    assert [type(each) for each in listener.told if not isinstance(each, Progress)] == [Trouble, Connected]


async def test_what_was_measured_before_the_link_broke_stays(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    async def loss(link: object) -> bench.Loss:
        return bench.Loss(0.25, 0.0, [3.0, 4.0])

    async def breaks(link: object) -> tuple[float, float]:
        raise LinkError("it broke")

    monkeypatch.setattr(bench, "measure_loss", loss)
    monkeypatch.setattr(bench, "measure_throughput", breaks)
    result: dict[str, Any] = {}
    with pytest.raises(LinkError, match="it broke"):
        await doctor._measure(pair.left.link, Listener(), result)
    assert (result["rtt_ms"], result["loss_out"], result["mbit_out"]) == (3.0, 0.25, None)


async def test_a_connection_that_does_not_last_is_given_up(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[None] = []

    async def replaced() -> None:
        tries.append(None)
        raise bench.Replaced

    assert await doctor._settled(pair.left.link, replaced) is None
    assert len(tries) == doctor.TRIES


@pytest.mark.parametrize(
    ("release", "taken"),
    [
        ("0.1.0", "0.1.0"),
        ("1.2.3.dev4+g12ab", "1.2.3.dev4+g12ab"),
        ("", None),
        ("9.9\nPrevents it: run rm", None),
        ("\x1b[31m9.9", None),
        ("9.9\n", None),
        ("1" * 41, None),
        ("\N{ARABIC-INDIC DIGIT ONE}", None),
    ],
)
async def test_a_release_is_taken_only_if_it_can_be_one(release: str, taken: str | None) -> None:
    assert doctor._release(cbor.encode({"release": release})) == taken


async def test_a_greeting_of_another_kind_names_no_release() -> None:
    assert doctor._release(b"\xff\xff\xff") is None
