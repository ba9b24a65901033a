"""A signaling server that lies: what passes through it is changed, moved, repeated, reflected, withheld and forged.

In every case no attempt comes about on keys that it knows, nothing that it made is taken for the other peer's, and the
error names the cause. `test_meddling_link.py` shows the same with whole links.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from peerllm_signaling.server import SignalingServer

from peerllm.protocol import limits
from peerllm.protocol.errors import PeerAway, ProtocolError, RoomClosed, RoomError, WrongCode
from peerllm.rooms import attempt as attempts
from peerllm.rooms import pake, wire
from tests.rooms.house import SECONDS, Data, House, Passing, connect, meddler, until

CAUSE = "signaling server"


# --- While two pair ---------------------------------------------------------------------------------------------------


async def test_a_dropped_confirmation_of_the_joiner_seats_nobody(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "JOIN_SECONDS", 0.5)
    async with meddler(house.url) as relay:
        relay.meddle = lambda passing: (
            [] if passing.is_from_client and passing.has_kind(wire.CONFIRM) else [passing.data]
        )
        room = await house.open(house.client("a"))
        with pytest.raises(RoomError, match=f"does not answer, or the {CAUSE} withholds"):
            await house.client("b", relay.url).join(str(room.code))
        assert room._seated.empty()
        assert room.wrong_guesses == 0


async def test_a_dropped_confirmation_of_the_opener_seats_nobody(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "JOIN_SECONDS", 0.5)
    async with meddler(house.url) as relay:
        relay.meddle = lambda passing: (
            [] if not passing.is_from_client and passing.has_kind(wire.CONFIRM) else [passing.data]
        )
        room = await house.open(house.client("a"))
        with pytest.raises(RoomError, match=f"the {CAUSE} withholds"):
            await house.client("b", relay.url).join(str(room.code))
        assert room._seated.empty()


async def test_a_dropped_last_message_seats_nobody(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "JOIN_SECONDS", 0.5)
    async with meddler(house.url) as relay:
        relay.meddle = lambda passing: [] if passing.has_kind(wire.DONE) else [passing.data]
        room = await house.open(house.client("a"))
        with pytest.raises(RoomError):
            await house.client("b", relay.url).join(str(room.code))
        assert room._seated.empty()


@pytest.mark.parametrize(("kind", "is_from_client"), [(wire.CONFIRM, True), (wire.CONFIRM, False), (wire.DONE, True)])
async def test_a_changed_message_of_the_pairing_seats_nobody(
    house: House, kind: int, is_from_client: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "JOIN_SECONDS", 1.0)

    def change(passing: Passing) -> Iterable[Data]:
        data = passing.data
        if isinstance(data, bytes) and passing.is_from_client is is_from_client and passing.has_kind(kind):
            data = data[:-1] + bytes([data[-1] ^ 1])
        return [data]

    async with meddler(house.url, change) as relay:
        room = await house.open(house.client("a"))
        with pytest.raises((RoomError, ProtocolError), match=f"{CAUSE}|words|refused"):
            await house.client("b", relay.url).join(str(room.code))
        assert room._seated.empty()


async def test_a_server_that_joins_with_a_guess_is_seen_and_gets_nothing(house: House) -> None:
    guesses: list[tuple[int, int]] = []
    room = await house.open(house.client("a"), on_guess=lambda *guess: guesses.append(guess))
    with pytest.raises(WrongCode):
        await house.client("server").join(f"{room.code.number}-zoo-zoo-zoo")
    assert guesses == [(1, 9)]
    assert room._seated.empty()


async def test_a_server_that_holds_up_the_refusal_does_not_hold_up_the_count(house: House) -> None:
    async with meddler(house.url) as relay:
        guesses: list[int] = []
        room = await house.open(house.client("a", relay.url), on_guess=lambda count, _: guesses.append(count))

        def hurry(passing: Passing) -> Iterable[Data]:
            """A claim that is declared gone the moment its guess has been passed on, and no answer gets out."""
            if passing.is_from_client and (passing.has_kind(wire.REFUSED, claim=True) or passing.op == "refuse"):
                return []
            if not passing.is_from_client and passing.has_kind(wire.CONFIRM, claim=True):
                assert isinstance(passing.data, bytes)
                gone = json.dumps({"op": "gone", "claim": int.from_bytes(passing.data[:4]), "reason": "left"})
                return [passing.data, gone]
            return [passing.data]

        relay.meddle = hurry
        joining = asyncio.create_task(house.client("server").join(f"{room.code.number}-zoo-zoo-zoo"))
        await until(lambda: bool(guesses))
        joining.cancel()
        await asyncio.gather(joining, return_exceptions=True)
        assert guesses == [1]
        await room.close()


async def test_a_server_that_answers_for_an_absent_opener_learns_one_guess_and_is_refused(house: House) -> None:
    code = "4127-copper-winter-anchor"
    impostor = pake.Opener(4127, b"zoo-zoo-zoo", b"K" * 32)

    async with meddler(house.url) as relay:

        def answer(passing: Passing) -> Iterable[Data]:
            if passing.is_from_client and passing.op == "claim":
                greeting = base64.b64decode(json.loads(passing.data)["greeting"])
                relay.say_back(passing, impostor.take_greeting(greeting))
                return []
            if passing.is_from_client and passing.has_kind(wire.CONFIRM):
                relay.say_back(passing, bytes([wire.CONFIRM]) + bytes(200))
                return []
            return [] if not passing.is_from_client else [passing.data]

        relay.meddle = answer
        with pytest.raises(WrongCode, match="does not know the words of this code"):
            await house.client("b", relay.url).join(code)
    assert house.client("b").store.rooms() == []


async def test_a_server_between_two_with_a_guess_of_its_own_fails_at_both_ends(house: House) -> None:
    guesses: list[int] = []
    room = await house.open(house.client("a"), on_guess=lambda count, _: guesses.append(count))
    number = room.code.number
    to_joiner, to_opener = (
        pake.Opener(number, b"zoo-zoo-zoo", b"K" * 32),
        pake.Joiner(number, b"zoo-zoo-zoo", b"K" * 32),
    )

    async with meddler(house.url) as relay:

        def stand_between(passing: Passing) -> Iterable[Data]:
            if passing.is_from_client and passing.op == "claim":
                value = json.loads(passing.data)
                relay.say_back(passing, to_joiner.take_greeting(base64.b64decode(value["greeting"])))
                value["greeting"] = base64.b64encode(to_opener.greeting()).decode()
                return [json.dumps(value)]
            if passing.is_from_client and passing.has_kind(wire.CONFIRM):
                with pytest.raises(WrongCode):
                    to_joiner.take_confirmation(bytes(passing.data))  # type: ignore[arg-type]
                return []
            if not passing.is_from_client and isinstance(passing.data, bytes) and not passing.has_kind(wire.REFUSED):
                relay.say_on(passing, to_opener.take_greeting(passing.data))
                return []
            return [passing.data]

        relay.meddle = stand_between
        with pytest.raises(WrongCode):
            await house.client("b", relay.url).join(str(room.code))
    assert guesses == [1]
    assert room._seated.empty()


# --- While two who know each other connect ----------------------------------------------------------------------------


def at_sealed(change: Callable[[int, bytes], list[bytes]]) -> Callable[[Passing], Iterable[Data]]:
    """Meddles with sealed messages from the client; `change(count, frame)` gives what passes. START is number 0."""
    count = 0

    def meddle(passing: Passing) -> Iterable[Data]:
        nonlocal count
        if not (passing.is_from_client and passing.has_kind(wire.SEALED) and isinstance(passing.data, bytes)):
            return [passing.data]
        count += 1
        return list(change(count - 1, passing.data))

    return meddle


def flipped(frame: bytes, place: int) -> bytes:
    changed = bytearray(frame)
    changed[place] ^= 1
    return bytes(changed)


held: list[bytes] = []


def swap_first_two(count: int, frame: bytes) -> list[bytes]:
    if count == 1:
        held[:] = [frame]
        return []
    return [frame, *held] if count == 2 else [frame]


CHANGES: dict[str, tuple[Callable[[int, bytes], list[bytes]], str]] = {
    "a changed byte of the content": (lambda count, frame: [flipped(frame, -20) if count else frame], "changed"),
    "a changed counter": (lambda count, frame: [flipped(frame, 16) if count else frame], "repeated|lost or moved"),
    "one cut short": (lambda count, frame: [frame[:-1] if count else frame], "changed"),
    "one repeated": (lambda count, frame: [frame, frame] if count else [frame], "repeated"),
    "two in the wrong order": (swap_first_two, "lost or moved"),
    "one withheld": (lambda count, frame: [] if count == 1 else [frame], "lost or moved"),
}


@pytest.mark.parametrize("name", CHANGES)
async def test_a_sealed_message_arrives_as_it_was_sent_or_ends_the_attempt(house: House, name: str) -> None:
    change, words = CHANGES[name]
    async with meddler(house.url) as relay:
        begins, accepts = await house.pair(relay.url)
        relay.meddle = at_sealed(change)
        ours, theirs = await connect(begins, accepts)
        for body in (b"fingerprint", b"candidate", b"another"):
            await ours.send(body)
        received = []
        with pytest.raises(ProtocolError, match=f"{words}.*{CAUSE}"):
            async with asyncio.timeout(SECONDS):
                while True:
                    received.append(await theirs.receive())
        assert received == [b"fingerprint", b"candidate", b"another"][: len(received)]
        await house.close()


async def test_a_message_reflected_to_its_sender_is_refused(house: House) -> None:
    async with meddler(house.url) as relay:
        begins, accepts = await house.pair(relay.url)
        ours, _ = await connect(begins, accepts)

        def reflect(passing: Passing) -> Iterable[Data]:
            if passing.is_from_client and passing.has_kind(wire.SEALED):
                relay.say_back(passing, passing.data)
                return []
            return [passing.data]

        relay.meddle = reflect
        await ours.send(b"mine")
        await ours.send(b"and mine")
        with pytest.raises(ProtocolError, match=CAUSE):
            async with asyncio.timeout(SECONDS):
                await ours.receive()
        await house.close()


async def test_a_beginning_reflected_is_told(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ATTEMPT_SECONDS", 0.5)
    async with meddler(house.url) as relay:
        begins, _ = await house.pair(relay.url)

        def reflect(passing: Passing) -> Iterable[Data]:
            if passing.is_from_client and passing.has_kind(wire.BEGIN):
                relay.say_back(passing, passing.data)
                return []
            return [passing.data]

        relay.meddle = reflect
        with pytest.raises(ProtocolError, match=f"Our own message came back.*{CAUSE}"):
            await begins.begin(1)
        await house.close()


@pytest.mark.parametrize("are_restarted", [False, True])
async def test_an_old_session_replayed_gives_no_attempt(
    house: House, monkeypatch: pytest.MonkeyPatch, are_restarted: bool
) -> None:
    monkeypatch.setattr(limits, "ATTEMPT_SECONDS", 0.5)
    async with meddler(house.url) as relay:
        begins, accepts = await house.pair(relay.url)
        ours, theirs = await connect(begins, accepts)
        await ours.send(b"old")
        async with asyncio.timeout(SECONDS):
            assert await theirs.receive() == b"old"
        recorded = [*relay.bodies(wire.BEGIN), *relay.bodies(wire.SEALED)]
        answers = relay.bodies(wire.ANSWER)
        assert len(recorded) == 3
        if are_restarted:
            await begins.close(), await accepts.close()
            begins, accepts = [
                house.keep(await house.client("a" if peer.is_opener else "b", relay.url).resume())
                for peer in (begins, accepts)
            ]

        def replay(passing: Passing) -> Iterable[Data]:
            """Whatever begins, the old session takes its place, in both directions."""
            if passing.is_from_client and passing.has_kind(wire.BEGIN):
                return recorded
            if passing.is_from_client and passing.has_kind(wire.ANSWER):
                return answers
            return [passing.data]

        relay.meddle = replay
        accepting = asyncio.create_task(accepts.accept())
        with pytest.raises(PeerAway):
            await begins.begin(2)
        with pytest.raises(ProtocolError, match=CAUSE):
            async with asyncio.timeout(SECONDS):
                await accepting
        await house.close()


async def test_a_beginning_replayed_alone_is_no_attempt(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """It opens, for the server has it from the other peer: but nobody can prove it a second time."""
    monkeypatch.setattr(limits, "ATTEMPT_SECONDS", 0.3)
    async with meddler(house.url) as relay:
        begins, accepts = await house.pair(relay.url)
        await connect(begins, accepts)
        old = relay.bodies(wire.BEGIN)[:1]
        relay.meddle = lambda passing: (
            old if passing.is_from_client and passing.has_kind(wire.BEGIN) else [passing.data]
        )
        accepting = asyncio.create_task(accepts.accept())
        with pytest.raises(PeerAway):
            await begins.begin(2)
        assert not accepting.done()
        assert len(accepts._unproven) == 1
        accepting.cancel()
        await asyncio.gather(accepting, return_exceptions=True)
        await house.close()


async def test_a_server_that_answers_for_an_absent_peer_is_told(house: House) -> None:
    async with meddler(house.url) as relay:
        begins, _ = await house.pair(relay.url)
        forged_key = X25519PrivateKey.generate()

        def answer(passing: Passing) -> Iterable[Data]:
            if passing.is_from_client and passing.has_kind(wire.BEGIN) and isinstance(passing.data, bytes):
                stranger = X25519PrivateKey.generate()
                frame = attempts.Beginning(stranger, forged_key.public_key(), 1, wire.VERSIONS).frame
                tag = passing.data[1 : 1 + wire.ATTEMPT_BYTES]
                forged = bytes([wire.ANSWER]) + tag + (1).to_bytes(2) + frame[13:]
                relay.say_back(passing, forged)
                return []
            return [passing.data]

        relay.meddle = answer
        with pytest.raises(ProtocolError, match=f"not the peer that this room was made with.*{CAUSE}"):
            await begins.begin(1)
        await house.close()


async def test_a_beginning_that_the_server_made_is_told_to_the_one_who_accepts(house: House) -> None:
    async with meddler(house.url) as relay:
        begins, accepts = await house.pair(relay.url)

        def forge(passing: Passing) -> Iterable[Data]:
            if passing.is_from_client and passing.has_kind(wire.BEGIN):
                stranger = X25519PrivateKey.generate()
                return [attempts.Beginning(stranger, accepts._identity.public_key(), 1, wire.VERSIONS).frame]
            return [passing.data]

        relay.meddle = forge
        beginning = asyncio.create_task(begins.begin(1))
        with pytest.raises(ProtocolError, match=f"Someone else than the peer.*{CAUSE}"):
            async with asyncio.timeout(SECONDS):
                await accepts.accept()
        beginning.cancel()
        await asyncio.gather(beginning, return_exceptions=True)
        await house.close()


async def test_versions_changed_on_their_way_are_found_out(house: House) -> None:
    async with meddler(house.url) as relay:
        begins, accepts = await house.pair(relay.url)

        def change(passing: Passing) -> Iterable[Data]:
            data = passing.data
            if passing.is_from_client and passing.has_kind(wire.BEGIN) and isinstance(data, bytes):
                return [data[:9] + wire.pack_range(wire.Versions(1, 9)) + data[13:]]
            return [data]

        relay.meddle = change
        beginning = asyncio.create_task(begins.begin(1))
        with pytest.raises(ProtocolError, match=CAUSE):
            async with asyncio.timeout(SECONDS):
                await accepts.accept()
        beginning.cancel()
        await asyncio.gather(beginning, return_exceptions=True)
        await house.close()


async def test_a_server_that_calls_the_releases_unequal_is_not_believed(house: House) -> None:
    async with meddler(house.url) as relay:
        begins, _ = await house.pair(relay.url)

        def claim_unequal(passing: Passing) -> Iterable[Data]:
            if passing.is_from_client and passing.has_kind(wire.BEGIN) and isinstance(passing.data, bytes):
                relay.say_back(passing, attempts.unequal(passing.data, wire.VERSIONS))
                return []
            return [passing.data]

        relay.meddle = claim_unequal
        with pytest.raises(ProtocolError, match=f"arrived changed.*{CAUSE}"):
            await begins.begin(1)
        await house.close()


NONSENSE: list[Data] = [
    b"",
    b"\x00",
    b"\x11",
    b"\x12" + bytes(8),
    b"\x13" + bytes(3),
    b"\x14",
    b"\xff" * 100,
    bytes(16_000),
    "",
    "[]",
    "{}",
    '{"op": 7}',
    '{"op": "present", "turn": {"urls": 7}}',
    '{"op": "meeting", "stun": ["x"]}',
    '{"op": "turn", "turn": 5}',
    '{"op": "someday"}',
    '{"op": "error", "code": []}',
    '{"op": "error", "code": {}}',
    '{"op": "error"}',
    "[" * 5000,
]


@pytest.mark.parametrize("nonsense", NONSENSE, ids=[repr(each)[:30] for each in NONSENSE])
async def test_nonsense_from_the_server_does_not_end_a_peer(
    house: House, nonsense: Data, server: SignalingServer
) -> None:
    async with meddler(house.url) as relay:
        begins, accepts = await house.pair(relay.url)
        relay.meddle = lambda passing: [passing.data] if passing.is_from_client else [nonsense, passing.data]
        beginning = asyncio.create_task(begins.begin(1))
        async with asyncio.timeout(SECONDS):
            while True:
                try:
                    theirs = await accepts.accept()
                    break
                except ProtocolError as error:  # told, and passed over
                    assert CAUSE in str(error)
            assert (await beginning).session_key == theirs.session_key
        await house.close()


@pytest.mark.parametrize("nonsense", NONSENSE, ids=[repr(each)[:30] for each in NONSENSE])
async def test_nonsense_from_the_server_does_not_end_a_room(house: House, nonsense: Data) -> None:
    async with meddler(house.url) as relay:
        room = await house.client("a", relay.url).open()
        try:
            relay.meddle = lambda passing: [passing.data] if passing.is_from_client else [nonsense, passing.data]
            async with asyncio.timeout(SECONDS):
                peers = await asyncio.gather(room.admit(), house.client("b").join(str(room.code)))
            for peer in peers:
                house.keep(peer)
        except (RoomClosed, ProtocolError) as error:
            pytest.fail(str(error))
        finally:
            await house.close()
            await room.close()


@pytest.mark.parametrize("nonsense", NONSENSE, ids=[repr(each)[:30] for each in NONSENSE])
async def test_nonsense_from_the_server_gives_a_joiner_a_seat_or_a_typed_error(house: House, nonsense: Data) -> None:
    async with meddler(house.url) as relay:
        room = await house.open(house.client("a"))
        relay.meddle = lambda passing: [passing.data] if passing.is_from_client else [nonsense, passing.data]
        with contextlib.suppress(RoomError, ProtocolError):
            async with asyncio.timeout(SECONDS):
                house.keep(await house.client("b", relay.url).join(str(room.code)))
        await house.close()


async def test_a_fault_of_our_own_in_a_room_is_told_to_who_waits(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    room = await house.open(house.client("a"))

    def explode(message: dict[str, Any]) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(room, "_begin_claim", explode)
    joining = asyncio.create_task(house.client("b").join(str(room.code)))
    with pytest.raises(RoomClosed, match="fault of ours"):
        async with asyncio.timeout(SECONDS):
            await room.admit()
    joining.cancel()
    await asyncio.gather(joining, return_exceptions=True)


async def test_a_room_that_cannot_seat_who_knows_the_words_says_why(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    opener = house.client("a")
    room = await house.open(opener)

    def full(_: object) -> None:
        raise RoomError("The room cannot be remembered: the disk is full.")

    monkeypatch.setattr(opener.store, "remember", full)
    joining = asyncio.create_task(house.client("b").join(str(room.code)))
    with pytest.raises(RoomError, match="disk is full"):
        async with asyncio.timeout(SECONDS):
            await room.admit()
    joining.cancel()
    await asyncio.gather(joining, return_exceptions=True)


async def test_a_fault_of_our_own_at_the_rendezvous_is_told_to_who_waits(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    begins, accepts = await house.pair()

    def explode(frame: bytes) -> list[bytes]:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(accepts, "on_frame", explode)
    beginning = asyncio.create_task(begins.begin(1))
    with pytest.raises(RoomClosed, match="fault of ours"):
        async with asyncio.timeout(SECONDS):
            await accepts.accept()
    beginning.cancel()
    await asyncio.gather(beginning, return_exceptions=True)
