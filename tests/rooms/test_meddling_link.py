"""Whole links over a signaling server that lies: none comes up, and both users hear why within 15 seconds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from peerllm.link import Link, LinkConfig, LinkState
from peerllm.protocol.errors import PeerllmError
from peerllm.rooms import SeatedPeer, wire
from peerllm.rooms import attempt as attempts
from tests.rooms.house import SECONDS, Data, House, Meddler, Passing, connect, meddler

Meddle = Callable[[Passing], Iterable[Data]]


@dataclass
class Side:
    """One end, and everything that it was given to believe."""

    link: Link
    states: list[LinkState] = field(default_factory=list)
    hellos: list[bytes] = field(default_factory=list)


def side(peer: SeatedPeer) -> Side:
    hellos: list[bytes] = []
    link = Link(peer, LinkConfig(loopback=True), hello=lambda: b"hello", on_hello=hellos.append)
    made = Side(link, hellos=hellos)
    link.on_state = made.states.append
    return made


async def start(made: Side) -> tuple[PeerllmError | None, float]:
    """How the start ended, and after how many seconds."""
    begun = time.monotonic()
    try:
        await made.link.start()
    except PeerllmError as error:
        return error, time.monotonic() - begun
    return None, time.monotonic() - begun


def bodies(change: Callable[[list[bytes], bytes], list[bytes]]) -> Callable[[Meddler, SeatedPeer], Meddle]:
    """Changes what links say to each other: every sealed message but the first of an attempt. `change` gets what came
    before in that attempt."""

    def make(relay: Meddler, accepts: SeatedPeer) -> Meddle:
        earlier: dict[tuple[int, bytes], list[bytes]] = {}

        def meddle(passing: Passing) -> Iterable[Data]:
            frame = passing.data
            if not (passing.is_from_client and passing.has_kind(wire.SEALED) and isinstance(frame, bytes)):
                return [frame]
            tag, counter, _ = wire.unpack_sealed(frame)
            before = earlier.setdefault((passing.connection, tag), [])
            is_first = counter == 0 and len(frame) < 40  # START is empty; the accepting side begins with a body
            changed: list[Data] = [frame] if is_first else list(change(before, frame))
            before.append(frame)
            return changed

        return meddle

    return make


def swap_fingerprint(before: list[bytes], frame: bytes) -> list[bytes]:
    """All that a server can do to what it cannot read: other bytes in the place where the fingerprint is."""
    changed = bytearray(frame)
    changed[len(frame) // 2] ^= 0xFF
    return [bytes(changed)]


def swap_candidates(before: list[bytes], frame: bytes) -> list[bytes]:
    """An earlier message of the attempt in the place of the candidates."""
    return [before[-1] if before else frame[:-1]]


def replay(relay: Meddler, accepts: SeatedPeer) -> Meddle:
    begin = relay.bodies(wire.BEGIN)[:1]
    answer = relay.bodies(wire.ANSWER)[:1]
    sealed = [frame for frame in relay.bodies(wire.SEALED) if begin and frame[1:9] == begin[0][1:9]]

    def meddle(passing: Passing) -> Iterable[Data]:
        if passing.is_from_client and passing.has_kind(wire.BEGIN):
            return [*begin, *sealed]
        if passing.is_from_client and passing.has_kind(wire.ANSWER):
            return answer
        return [passing.data]

    return meddle


def reflect(relay: Meddler, accepts: SeatedPeer) -> Meddle:
    def meddle(passing: Passing) -> Iterable[Data]:
        if passing.is_from_client and isinstance(passing.data, bytes):
            relay.say_back(passing, passing.data)
        return [passing.data]

    return meddle


def drop_confirmation(relay: Meddler, accepts: SeatedPeer) -> Meddle:
    def meddle(passing: Passing) -> Iterable[Data]:
        frame = passing.data
        is_start = isinstance(frame, bytes) and passing.has_kind(wire.SEALED) and len(frame) < 40
        return [] if passing.is_from_client and is_start else [frame]

    return meddle


def answer_for_the_absent(relay: Meddler, accepts: SeatedPeer) -> Meddle:
    def meddle(passing: Passing) -> Iterable[Data]:
        frame = passing.data
        if not (passing.is_from_client and isinstance(frame, bytes)):
            return [frame]
        if passing.has_kind(wire.BEGIN):
            stranger = X25519PrivateKey.generate()
            forged = attempts.Beginning(stranger, accepts._identity.public_key(), 1, wire.VERSIONS).frame
            relay.say_back(passing, bytes([wire.ANSWER]) + frame[1:9] + (1).to_bytes(2) + forged[13:])
            return [forged]  # and it begins in the other's name, too
        return []

    return meddle


ATTACKS: dict[str, Callable[[Meddler, SeatedPeer], Meddle]] = {
    "swaps the fingerprint": bodies(swap_fingerprint),
    "swaps candidates": bodies(swap_candidates),
    "replays an old session": replay,
    "reflects every message": reflect,
    "drops the confirmation": drop_confirmation,
    "answers for an absent peer": answer_for_the_absent,
}


async def attack(house: House, name: str) -> list[str]:
    """What went wrong: nothing, if the attack failed as it should."""
    async with meddler(house.url) as relay:
        begins, accepts = await house.pair(relay.url, names=(f"{name} a", f"{name} b"))
        for attempt in await connect(begins, accepts):  # something old to replay
            await attempt.send(b"old")
        relay.meddle = ATTACKS[name](relay, accepts)
        sides = [side(begins), side(accepts)]
        results = await asyncio.gather(*(start(made) for made in sides))
        wrong = []
        for made, (error, seconds) in zip(sides, results, strict=True):
            if error is None or LinkState.UP in made.states or made.hellos or made.link.epoch:
                wrong.append(f"{name}: a link came up ({made.states})")
            elif "signaling server" not in error.message:
                wrong.append(f"{name}: {error.message!r} does not name the cause")
            if seconds > 15:
                wrong.append(f"{name}: took {seconds:.1f} s")
            await made.link.close()
        await begins.close(), await accepts.close()
        return wrong


async def test_no_attack_of_a_signaling_server_brings_a_link_up(house: House) -> None:
    wrong = await asyncio.gather(*(attack(house, name) for name in ATTACKS))
    assert not [each for several in wrong for each in several]


async def test_through_the_same_relay_honest_messages_bring_a_link_up(house: House) -> None:
    """Without this, the test above could pass for the wrong reason."""
    async with meddler(house.url) as relay:
        begins, accepts = await house.pair(relay.url)
        sides = [side(begins), side(accepts)]
        async with asyncio.timeout(SECONDS):
            await asyncio.gather(*(made.link.start() for made in sides))
            await sides[0].link.send(b"application data")
            assert await sides[1].link.receive() == b"application data"
        assert [made.hellos for made in sides] == [[b"hello"], [b"hello"]]
        for made in sides:
            await made.link.close()
        await house.close()
