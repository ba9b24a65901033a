"""Opening and joining rooms over a real server."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from peerllm_signaling import limits as server_limits
from peerllm_signaling.server import SignalingServer

from peerllm.protocol import limits
from peerllm.protocol.errors import (
    RoomClosed,
    RoomCrowded,
    RoomError,
    RoomNotFound,
    SignalingUnreachable,
    VersionMismatch,
    WrongCode,
)
from peerllm.rooms import pake, wire
from peerllm.rooms.codes import RoomCode
from peerllm.rooms.room import _Claim
from peerllm.rooms.wire import Introduction, Versions
from tests.rooms.house import SECONDS, Data, House, Passing, connect, meddler, signaling, until


def wrong(code: RoomCode) -> str:
    return str(RoomCode(code.number, ("zoo", *code.words[1:]) if code.words[0] != "zoo" else ("ability",) * 3))


async def test_two_who_share_a_code_learn_each_others_keys(house: House) -> None:
    one, two = await house.pair()
    assert (one.local_id, one.remote_id) == (two.remote_id, two.local_id)
    assert one.is_opener is not two.is_opener
    assert one.room_name == two.room_name


async def test_wrong_words_are_told_to_both_and_cost_no_seat(house: House) -> None:
    guesses: list[tuple[int, int]] = []
    room = await house.open(house.client("a"), on_guess=lambda *guess: guesses.append(guess))
    with pytest.raises(WrongCode, match="Ask for the code again"):
        await house.client("b").join(wrong(room.code))
    assert guesses == [(1, 9)]
    async with asyncio.timeout(SECONDS):
        peers = await asyncio.gather(room.admit(), house.client("b").join(str(room.code)))
    for peer in peers:
        house.keep(peer)


async def test_ten_wrong_guesses_close_the_room_and_both_users_are_told(house: House) -> None:
    guesses: list[tuple[int, int]] = []
    room = await house.open(house.client("a"), on_guess=lambda *guess: guesses.append(guess))
    stranger = house.client("stranger")
    for _ in range(limits.MAX_WRONG_GUESSES):
        with pytest.raises(WrongCode):
            await stranger.join(wrong(room.code))
    assert [guess for guess, _ in guesses] == list(range(1, 11))
    with pytest.raises(RoomClosed, match="10 times someone tried wrong words"):
        async with asyncio.timeout(SECONDS):
            await room.admit()
    with pytest.raises(RoomNotFound):  # the right words come too late
        await house.client("b").join(str(room.code))


async def test_guesses_made_at_once_are_ten_at_most(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even while the opener's refusals, and its word that the room is closed, are held up."""
    guesses: list[int] = []
    room = await house.open(house.client("a"), on_guess=lambda count, _: guesses.append(count))
    held = asyncio.Event()
    refuse = room._refuse

    async def hold(*args: Any) -> None:
        await held.wait()
        await refuse(*args)

    monkeypatch.setattr(room, "_refuse", hold)
    stranger = house.client("stranger")
    await asyncio.to_thread(stranger.store.identity)
    joining = [asyncio.create_task(stranger.join(wrong(room.code))) for _ in range(8)]
    await until(lambda: len(guesses) == 8)
    # A lying server: those are gone, and here are others.
    joiners = {number: pake.Joiner(room.code.number, b"zoo-zoo-zoo", b"K" * 32) for number in range(100, 106)}

    really_tell = room._tell

    async def tell(claim: _Claim, body: bytes) -> None:
        if claim.number not in joiners:
            await really_tell(claim, body)
        elif body[:4] == wire.MAGIC:
            claim.put(joiners[claim.number].take_greeting(body))

    monkeypatch.setattr(room, "_tell", tell)
    others = [
        asyncio.create_task(room._answer(_Claim(number=number), joiner.greeting()))
        for number, joiner in joiners.items()
    ]
    await until(lambda: len(guesses) == 10)
    await asyncio.sleep(3 * limits.SPAKE2_SECONDS)  # time for an eleventh, if there were one
    assert guesses == list(range(1, 11))
    held.set()
    await asyncio.gather(*joining, *others, return_exceptions=True)
    with pytest.raises(RoomClosed):
        await room.admit()


async def test_a_third_is_told_that_the_room_is_crowded_and_those_inside_go_on(house: House) -> None:
    room = await house.open(house.client("a"))
    async with asyncio.timeout(SECONDS):
        one, two = await asyncio.gather(room.admit(), house.client("b").join(str(room.code)))
    house.keep(one), house.keep(two)
    with pytest.raises(RoomCrowded):
        await house.client("c").join(str(room.code))
    begins, accepts = (one, two) if one.is_controlling else (two, one)
    ours, theirs = await connect(begins, accepts)
    assert ours.session_key == theirs.session_key


async def test_a_full_room_whose_connection_broke_comes_back_at_once_and_a_third_is_still_told(
    house: House, server: SignalingServer
) -> None:
    async with meddler(house.url) as relay:
        room = await house.open(house.client("a", relay.url))
        async with asyncio.timeout(SECONDS):
            one, two = await asyncio.gather(room.admit(), house.client("b").join(str(room.code)))
        house.keep(one), house.keep(two)
        old = room._socket
        await old._socket.close()
        await until(lambda: room._socket is not old)
        with pytest.raises(RoomCrowded):
            await house.client("c").join(str(room.code))
        assert [passing.op for passing in relay.seen if passing.is_from_client].count("open") == 2
        await house.close()


async def test_a_full_room_comes_back_after_the_server_was_started_anew(house: House) -> None:
    async with signaling() as first:
        room = await house.open(house.client("a", first.address))
        async with asyncio.timeout(SECONDS):
            one, two = await asyncio.gather(room.admit(), house.client("b", first.address).join(str(room.code)))
        house.keep(one), house.keep(two)
        port = first.port
    async with signaling(port) as second:
        await until(lambda: len(second.switchboard.rooms) > 0)
        with pytest.raises(RoomCrowded):
            await house.client("c", second.address).join(str(room.code))
        await house.close()


async def test_a_server_that_does_not_understand_is_not_asked_again(house: House) -> None:
    async with meddler(house.url) as relay:
        room = await house.open(house.client("a", relay.url))
        begins, accepts = await house.pair(relay.url, names=("c", "d"))
        await until(lambda: begins._rendezvous.can_talk and accepts._rendezvous.can_talk)

        def misunderstand(passing: Passing) -> list[Data]:
            if passing.is_from_client and passing.op in ("open", "meet"):
                relay.say_back(passing, '{"op": "error", "code": "bad_message"}')
                return []
            return [passing.data]

        relay.seen.clear()
        relay.meddle = misunderstand
        for socket in (room._socket, begins._rendezvous.socket):
            assert socket is not None
            await socket._socket.close()
        async with asyncio.timeout(SECONDS):
            with pytest.raises(RoomError, match="does not understand this release"):
                await room.admit()
            with pytest.raises(RoomClosed, match="does not understand this release"):
                while True:
                    begins._check()
                    await begins._next()
        asked = [passing.op for passing in relay.seen if passing.is_from_client and passing.op in ("open", "meet")]
        assert sorted(asked) == ["meet", "open"]
        await house.close()


async def test_a_joiner_whose_connection_breaks_at_the_last_step_can_resume(house: House) -> None:
    async with meddler(house.url) as relay:
        room = await house.open(house.client("a"))

        def cut(passing: Passing) -> list[Data]:
            if not passing.is_from_client and passing.op == "seated":
                relay.close_soon(passing)
                return []
            return [passing.data]

        relay.meddle = cut
        joiner = house.client("b", relay.url)
        async with asyncio.timeout(SECONDS):
            with pytest.raises(RoomError, match="`peerllm resume`"):
                await joiner.join(str(room.code))
            one = house.keep(await room.admit())
        relay.meddle = lambda passing: [passing.data]
        two = house.keep(await joiner.resume())
        begins, accepts = (one, two) if one.is_controlling else (two, one)
        ours, theirs = await connect(begins, accepts)
        assert ours.session_key == theirs.session_key
        await house.close()


@pytest.mark.parametrize("has_met", [False, True])
async def test_a_joiner_that_is_refused_at_the_last_step_remembers_what_it_did_before(
    house: House, has_met: bool
) -> None:
    if has_met:
        await house.pair()
    before = house.client("b").store.rooms()
    async with meddler(house.url) as relay:
        room = await house.open(house.client("a"))

        def refuse(passing: Passing) -> list[Data]:
            is_last = not passing.is_from_client and passing.op == "seated"
            return ['{"op": "error", "code": "refused"}'] if is_last else [passing.data]

        relay.meddle = refuse
        later = house.client("b", relay.url)
        later._clock = lambda: time.time() + 100
        with pytest.raises(RoomError, match="refused"):
            await later.join(str(room.code))
        assert house.client("b").store.rooms() == before
        await house.close()


async def test_a_number_that_is_no_room_is_told(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ROOM_MISSING_SECONDS", 4.0)
    begun = time.monotonic()
    with pytest.raises(RoomNotFound, match="no room of this number"):
        await house.client("b").join("9999999-copper-winter-anchor")
    assert 2 < time.monotonic() - begun < limits.JOIN_SECONDS


async def test_a_closed_room_is_gone(house: House) -> None:
    room = await house.client("a").open()
    await room.close()
    with pytest.raises(RoomNotFound):
        await house.client("b").join(str(room.code))
    with pytest.raises(RoomClosed):
        await room.admit()


async def test_a_room_that_nobody_joins_ends_and_says_so(
    house: House, server: SignalingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_limits, "ROOM_SECONDS", 0.1)
    room = await house.open(house.client("a"))
    with pytest.raises(RoomClosed, match="Nobody joined within ten minutes"):
        async with asyncio.timeout(SECONDS):
            await room.admit()
    await until(room._runner.done)
    assert room._socket.is_closed


async def test_waiting_for_a_peer_can_be_cancelled_and_taken_up_again(house: House) -> None:
    room = await house.open(house.client("a"))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await room.admit()
    async with asyncio.timeout(SECONDS):
        one, two = await asyncio.gather(room.admit(), house.client("b").join(str(room.code)))
    house.keep(one), house.keep(two)


async def test_a_daemon_cannot_join_its_own_room(house: House) -> None:
    room = await house.open(house.client("a"))
    with pytest.raises(RoomError, match=r"very daemon"):
        await house.client("a").join(str(room.code))


async def test_unequal_releases_say_so_and_it_is_no_guess(house: House) -> None:
    guesses: list[int] = []
    room = await house.open(house.client("a"), on_guess=lambda count, _: guesses.append(count))
    later = house.client("b")
    later.versions = Versions(7, 9)
    with pytest.raises(VersionMismatch, match="this one speaks versions 7 to 9, the other peer's 1"):
        await later.join(str(room.code))
    assert guesses == []


async def test_a_third_peer_is_introduced_to_the_second(house: House) -> None:
    room = await house.open(house.client("a"), seats=2)
    heard: list[Introduction] = []
    async with asyncio.timeout(SECONDS):
        a_b, b = await asyncio.gather(room.admit(), house.client("b").join(str(room.code)))
        b.on_introduction = heard.append
        a_c, c = await asyncio.gather(room.admit(), house.client("c").join(str(room.code)))
    for peer in (a_b, b, a_c, c):
        house.keep(peer)
    assert c.introductions == [Introduction(b.local_id, 1)]
    begins, accepts = (a_b, b) if a_b.is_controlling else (b, a_b)
    ours, theirs = await connect(begins, accepts)
    attempt = ours if begins is a_b else theirs
    async with asyncio.timeout(SECONDS):
        await a_b.introduce(attempt, Introduction(c.local_id, 2))
        while not heard:
            await b._next()
    assert heard == b.introductions == [Introduction(c.local_id, 2)]


async def test_nobody_at_the_address_is_told_within_five_seconds(house: House) -> None:
    async with signaling() as other:
        url = other.address
    begun = time.monotonic()
    with pytest.raises(SignalingUnreachable, match="cannot be reached"):
        await house.client("a", url).open()
    assert time.monotonic() - begun < limits.SIGNALING_CONNECT_SECONDS


async def test_a_server_that_never_answers_is_told(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SIGNALING_CONNECT_SECONDS", 0.1)
    monkeypatch.setattr("peerllm.rooms.server.connect.__kwdefaults__", {"insecure": False, "seconds": 0.1})
    accepted: list[asyncio.StreamWriter] = []

    def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.append(writer)

    mute = await asyncio.start_server(hold, "127.0.0.1", 0)
    url = f"ws://127.0.0.1:{mute.sockets[0].getsockname()[1]}"
    with pytest.raises(SignalingUnreachable, match="does not answer"):
        await house.client("a", url).open()
    for writer in accepted:
        writer.close()
    mute.close()
    await mute.wait_closed()


async def test_a_waiting_room_comes_back_after_the_server_was_started_anew(house: House) -> None:
    async with signaling() as first:
        room = await house.open(house.client("a", first.address))
        port = first.port
    async with signaling(port) as second:
        await until(lambda: len(second.switchboard.rooms) > 0)
        async with asyncio.timeout(SECONDS):
            one, two = await asyncio.gather(room.admit(), house.client("b", second.address).join(str(room.code)))
        house.keep(one), house.keep(two)
        await house.close()


async def test_a_peer_that_joins_right_after_a_restart_waits_for_the_room_to_come_back(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "ROOM_MISSING_SECONDS", SECONDS)
    async with signaling() as first:
        room = await house.open(house.client("a", first.address))
        port = first.port
    may_return = asyncio.Event()
    come_back = room._come_back

    async def later(why: SignalingUnreachable) -> None:
        await may_return.wait()
        await come_back(why)

    monkeypatch.setattr(room, "_come_back", later)
    async with signaling(port) as second, meddler(second.address) as relay:
        joining = asyncio.create_task(house.client("b", relay.url).join(str(room.code)))
        await until(lambda: any("room_not_found" in str(passing.data) for passing in relay.seen))
        may_return.set()
        async with asyncio.timeout(SECONDS):
            one, two = await asyncio.gather(room.admit(), joining)
        house.keep(one), house.keep(two)
        await house.close()


async def test_a_peer_that_joins_while_the_opener_comes_back_waits_for_it(
    house: House, server: SignalingServer
) -> None:
    room = await house.open(house.client("a"))
    await room._socket._socket.close()  # its connection breaks
    async with asyncio.timeout(SECONDS):
        one, two = await asyncio.gather(room.admit(), house.client("b").join(str(room.code)))
    house.keep(one), house.keep(two)


async def test_an_openers_answer_takes_as_long_whatever_it_computes(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SPAKE2_SECONDS", 0.2)
    room = await house.open(house.client("a"))
    begun = time.monotonic()
    with pytest.raises(WrongCode):
        await house.client("b").join(wrong(room.code))  # a greeting, and a confirmation that is refused
    assert time.monotonic() - begun >= 0.4


async def test_spake2_never_holds_up_the_loop(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    for kind, name in ((pake.Joiner, "greeting"), (pake.Joiner, "take_greeting"), (pake.Opener, "take_greeting")):
        monkeypatch.setattr(kind, name, _noting_threads(getattr(kind, name), threads))
    longest = 0.0
    is_over = False

    async def watch() -> None:
        nonlocal longest
        while not is_over:
            # The loop's own work: what a busy machine adds to the wall's clock is not our doing.
            begun = time.thread_time()
            await asyncio.sleep(0)
            longest = max(longest, time.thread_time() - begun)

    watching = asyncio.create_task(watch())
    await house.pair()
    is_over = True
    await watching
    assert longest < limits.LOOP_BLOCKED_SECONDS
    assert len(threads) == 3
    assert threading.get_ident() not in threads


def _noting_threads(method: Callable[..., bytes], threads: list[int]) -> Callable[..., bytes]:
    def noting(*args: Any) -> bytes:
        threads.append(threading.get_ident())
        return method(*args)

    return noting
