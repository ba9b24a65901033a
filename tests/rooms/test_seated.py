"""Attempts between two who know each other: fresh keys each time, ghosts evicted, half-open sockets found."""

from __future__ import annotations

import asyncio
import gc
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from peerllm_signaling.server import SignalingServer

from peerllm.protocol import limits
from peerllm.protocol.errors import (
    PeerAway,
    ProtocolError,
    RoomClosed,
    RoomNotFound,
    SignalingUnreachable,
    VersionMismatch,
)
from peerllm.rooms import noise
from peerllm.rooms import server as rooms_server
from peerllm.rooms.rendezvous import Rendezvous
from peerllm.rooms.server import ServerSocket
from peerllm.rooms.wire import Versions
from tests.rooms.house import SECONDS, House, connect, signaling, until, wire


async def test_an_attempt_carries_bodies_both_ways_in_order(house: House) -> None:
    ours, theirs = await connect(*await house.pair(), epoch=7)
    assert ours.epoch == theirs.epoch == 7
    assert ours.session_key == theirs.session_key
    assert len(ours.session_key) == 32
    bodies = [bytes([each]) * (each * 1000) for each in range(17)]
    await asyncio.gather(*(ours.send(body) for body in bodies), *(theirs.send(body) for body in bodies))
    async with asyncio.timeout(SECONDS):
        assert [await theirs.receive() for _ in bodies] == bodies
        assert [await ours.receive() for _ in bodies] == bodies


async def test_the_longest_body_passes_and_a_longer_one_is_refused(house: House) -> None:
    ours, theirs = await connect(*await house.pair())
    await ours.send(bytes(limits.MAX_SIGNALING_BYTES))
    async with asyncio.timeout(SECONDS):
        assert len(await theirs.receive()) == limits.MAX_SIGNALING_BYTES
    with pytest.raises(ProtocolError, match="at most 16384"):
        await ours.send(bytes(limits.MAX_SIGNALING_BYTES + 1))


async def test_every_attempt_has_keys_of_its_own_and_the_newest_is_accepted(house: House) -> None:
    begins, accepts = await house.pair()
    begun = [await begins.begin(epoch) for epoch in (1, 2, 3)]
    async with asyncio.timeout(SECONDS):
        accepted = await accepts.accept()
        while accepted.epoch != 3:
            accepted = await accepts.accept()
    assert accepted.session_key == begun[2].session_key
    assert len({attempt.session_key for attempt in begun}) == 3


async def test_attempts_live_beside_each_other_until_there_are_too_many(house: House) -> None:
    begins, accepts = await house.pair()
    pairs = [await connect(begins, accepts, epoch) for epoch in range(1, limits.MAX_ATTEMPTS + 2)]
    with pytest.raises(PeerAway, match="newer"):
        await pairs[0][0].receive()
    for ours, theirs in pairs[1:]:
        await ours.send(b"still here")
        async with asyncio.timeout(SECONDS):
            assert await theirs.receive() == b"still here"


async def test_a_peer_that_is_not_there_is_told_in_time(house: House) -> None:
    begins, accepts = await house.pair()
    await accepts.close()
    begun = time.monotonic()
    with pytest.raises(PeerAway, match="not at the signaling server"):
        await begins.begin(1)
    assert time.monotonic() - begun < limits.SIGNALING_SECONDS


async def test_a_peer_that_comes_while_an_attempt_waits_is_found(house: House) -> None:
    begins, accepts = await house.pair()
    await accepts.close()
    name = "a" if accepts.is_opener else "b"
    beginning = asyncio.create_task(begins.begin(1))
    await until(lambda: not begins._rendezvous.is_present)
    back = house.keep(await house.client(name).resume())
    async with asyncio.timeout(SECONDS):
        theirs = await back.accept()
        assert (await beginning).session_key == theirs.session_key


async def test_an_attempt_ends_when_the_other_peer_stays_away(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ABSENCE_SECONDS", 0.05)
    begins, accepts = await house.pair()
    ours, _ = await connect(begins, accepts)
    await accepts.close()
    async with asyncio.timeout(SECONDS):
        with pytest.raises(PeerAway, match="left"):
            await ours.receive()


async def test_an_attempt_survives_a_new_connection_to_the_server(house: House) -> None:
    begins, accepts = await house.pair()
    ours, theirs = await connect(begins, accepts)
    presence = begins._rendezvous.presence
    assert accepts._rendezvous.socket is not None
    await accepts._rendezvous.socket._socket.close()
    await until(
        lambda: (
            begins._rendezvous.presence > presence and begins._rendezvous.is_present and accepts._rendezvous.is_present
        )
    )
    await theirs.send(b"after the break")
    async with asyncio.timeout(SECONDS):
        assert await ours.receive() == b"after the break"


async def test_peers_find_each_other_again_after_restarts_without_words(house: House) -> None:
    for peer in await house.pair():
        await peer.close()
    async with asyncio.timeout(SECONDS):
        one, two = await asyncio.gather(house.client("a").resume(), house.client("b").resume())
    house.keep(one), house.keep(two)
    assert (one.is_opener, two.is_opener) == (True, False)
    ours, theirs = await connect(*((one, two) if one.is_controlling else (two, one)))
    assert ours.session_key == theirs.session_key


async def test_a_room_is_resumed_by_its_name_and_forgotten_by_it(house: House) -> None:
    one, _ = await house.pair()
    name = one.room_name
    before = house.client("a").store.room(name).met_at
    later = house.client("a")
    later._clock = lambda: before + 100.0
    again = house.keep(await later.resume(name.upper().replace("-", " ")))
    assert house.client("a").store.room(name).met_at == before + 100
    assert again.remote_id in (one.local_id, one.remote_id)
    house.client("a").store.forget(name)
    with pytest.raises(RoomNotFound):
        await house.client("a").resume(name)


@pytest.mark.parametrize("who", ["begins", "accepts"])
async def test_a_room_that_is_forgotten_under_a_running_daemon_ends_at_the_next_attempt(house: House, who: str) -> None:
    begins, accepts = await house.pair()
    await connect(begins, accepts)
    ours, other = (begins, accepts) if who == "begins" else (accepts, begins)
    house.client("a" if ours.is_opener else "b").store.forget(ours.room_name)
    beginning = asyncio.create_task(begins.begin(2))
    async with asyncio.timeout(SECONDS):
        with pytest.raises(RoomClosed, match="forgotten"):
            await (beginning if who == "begins" else accepts.accept())
    beginning.cancel()
    await asyncio.gather(beginning, return_exceptions=True)
    assert ours.on_frame(b"\x11" + bytes(200)) == []
    with pytest.raises(RoomClosed, match="forgotten"):
        await (ours.begin(3) if who == "begins" else ours.accept())
    assert other._failure is None


async def test_a_restored_state_directory_still_connects_and_no_key_is_used_twice(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sealed: list[tuple[bytes, int]] = []
    made: dict[int, bytes] = {}
    real = noise.SealedDirection

    class Recording(real):  # type: ignore[misc, valid-type]
        """Every key and nonce under which anything was sealed."""

        def __init__(self, key: bytes) -> None:
            super().__init__(key)
            made[id(self)] = key
            self.keep = key

        __slots__ = ("keep",)

        def seal(self, plain: bytes, associated: bytes) -> bytes:
            sealed.append((self.keep, self.counter))
            result: bytes = super().seal(plain, associated)
            return result

    monkeypatch.setattr(noise, "SealedDirection", Recording)
    begins, accepts = await house.pair()
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "a", copy)

    async def talk(begins: Any, accepts: Any) -> None:
        ours, theirs = await connect(begins, accepts)
        for attempt in (ours, theirs):
            await attempt.send(b"the same words each time")

    await talk(begins, accepts)
    await begins.close(), await accepts.close()
    shutil.rmtree(tmp_path / "a")
    copy.rename(tmp_path / "a")
    one, two = await house.client("a").resume(), await house.client("b").resume()
    house.keep(one), house.keep(two)
    await talk(*((one, two) if one.is_controlling else (two, one)))
    assert len(sealed) == len(set(sealed)) > 8


async def test_a_crashed_peers_ghost_gives_way_to_its_new_self(house: House) -> None:
    begins, ghost = await house.pair()
    name = "a" if ghost.is_opener else "b"
    back = house.keep(await house.client(name).resume())
    with pytest.raises(RoomClosed, match="took this one's place"):
        async with asyncio.timeout(SECONDS):
            await ghost.accept()
    ours, theirs = await connect(begins, back)
    assert ours.session_key == theirs.session_key


async def test_the_ghost_does_not_come_back_to_fight(house: House, server: SignalingServer) -> None:
    begins, ghost = await house.pair()
    back = house.keep(await house.client("a" if ghost.is_opener else "b").resume())
    await until(lambda: ghost._failure is not None)
    await connect(begins, back)
    await until(lambda: not ghost._rendezvous.is_running)
    assert len(server.switchboard.meetings) == 2


async def test_leaving_while_a_broken_connection_is_put_away_leaves_no_socket(
    house: House, server: SignalingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelled while it waits for the tasks of a connection that has just ended."""
    is_ending = asyncio.Event()

    async def slow_to_end(self: Rendezvous, socket: ServerSocket) -> None:
        try:
            await asyncio.sleep(SECONDS)
        finally:
            is_ending.set()
            await asyncio.sleep(0.05)

    made: list[ServerSocket] = []

    async def remember(*args: Any, **options: Any) -> ServerSocket:
        made.append(await connect_to_server(*args, **options))
        return made[-1]

    connect_to_server = rooms_server.connect
    monkeypatch.setattr(Rendezvous, "_probe", slow_to_end)
    monkeypatch.setattr(rooms_server, "connect", remember)
    one, two = await house.pair()
    await until(lambda: one._rendezvous.socket is not None and two._rendezvous.socket is not None)
    await server.stop()
    async with asyncio.timeout(SECONDS):
        await is_ending.wait()
    await house.close()
    assert made
    assert all(socket._session.closed for socket in made)
    assert not one._rendezvous.is_running


async def test_a_half_open_socket_is_found_when_the_link_is_suspect_and_replaced(
    house: House, server: SignalingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SIGNALING_PROBE_SECONDS", 0.1)
    async with wire(server.port) as old_path, wire(server.port) as new_path:
        begins, accepts = await house.pair(old_path.url)
        await until(lambda: begins._rendezvous.is_present and accepts._rendezvous.is_present)
        old = accepts._rendezvous.socket
        old_path.is_cut = True
        begins._rendezvous.url = accepts._rendezvous.url = new_path.url
        begun = time.monotonic()
        begins.suspect(), accepts.suspect()
        await until(
            lambda: (
                accepts._rendezvous.socket is not old
                and accepts._rendezvous.is_present
                and begins._rendezvous.is_present
            )
        )
        assert time.monotonic() - begun < limits.SIGNALING_HEARTBEAT_SECONDS / 2  # when silence would be noticed
        ours, theirs = await connect(begins, accepts)
        assert ours.session_key == theirs.session_key
        assert len(server.switchboard.meetings) == 2  # the fresh ones evicted the old
        await house.close()


async def test_beginning_an_attempt_finds_a_half_open_socket_by_itself(
    house: House, server: SignalingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SIGNALING_PROBE_SECONDS", 0.1)
    async with wire(server.port) as old_path:
        begins, accepts = await house.pair(old_path.url)
        await until(lambda: begins._rendezvous.is_present and accepts._rendezvous.is_present)
        accepts._rendezvous.url = begins._rendezvous.url = house.url
        accepts.suspect()
        old_path.is_cut = True
        assert begins._rendezvous.socket is not None
        begins._rendezvous.socket.heard_at -= 1  # nothing was heard for longer than a probe takes
        await connect(begins, accepts)
        await house.close()


async def test_a_half_open_socket_is_found_without_anyone_asking(
    house: House, server: SignalingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SIGNALING_HEARTBEAT_SECONDS", 0.2)
    async with wire(server.port) as old_path:
        begins, accepts = await house.pair(old_path.url)
        await until(lambda: begins._rendezvous.is_present and accepts._rendezvous.is_present)
        begins._rendezvous.url = accepts._rendezvous.url = house.url
        old_path.is_cut = True
        old = begins._rendezvous.socket, accepts._rendezvous.socket
        await until(
            lambda: (
                begins._rendezvous.socket not in old
                and accepts._rendezvous.socket not in old
                and begins._rendezvous.can_talk
            )
        )
        await connect(begins, accepts)
        await house.close()


async def test_suspicion_of_a_socket_that_is_well_changes_nothing(house: House) -> None:
    begins, accepts = await house.pair()
    await connect(begins, accepts)
    before = begins._rendezvous.socket
    begins.suspect()
    assert before is not None
    heard = before.heard_at
    await until(lambda: before.heard_at > heard)
    await connect(begins, accepts, 2)
    assert begins._rendezvous.socket is before


async def test_pairs_meet_again_by_themselves_after_the_server_was_started_anew(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with signaling() as first:
        begins, accepts = await house.pair(first.address)
        port = first.port
    with monkeypatch.context() as patch:
        patch.setattr(limits, "ATTEMPT_SECONDS", 0.2)
        with pytest.raises(SignalingUnreachable):
            await begins.begin(1)
    async with signaling(port):
        begun = time.monotonic()
        ours, theirs = await connect(begins, accepts)
        assert ours.session_key == theirs.session_key
        assert time.monotonic() - begun < 3
        await house.close()


async def test_a_new_utc_day_moves_the_rendezvous_and_the_pair_with_it(house: House) -> None:
    begins, accepts = await house.pair()
    await connect(begins, accepts)
    for peer in (begins, accepts):
        peer._rendezvous.clock = lambda: (
            time.time() + 86400 * 1.5
        )  # a day and a half later: one id of three is still shared
        assert peer._rendezvous.socket is not None
        await peer._rendezvous.meet(peer._rendezvous.socket)
    ours, theirs = await connect(begins, accepts, 2)
    assert ours.session_key == theirs.session_key


async def test_peers_whose_releases_have_no_version_in_common_say_so(house: House) -> None:
    begins, accepts = await house.pair()
    accepts.versions = Versions(5, 6)
    with pytest.raises(VersionMismatch, match="this one speaks versions 1, the other peer's 5 to 6"):
        await begins.begin(1)


async def test_a_release_connects_to_the_one_before(house: House) -> None:
    begins, accepts = await house.pair()
    begins.versions = Versions(1, 2)
    ours, theirs = await connect(begins, accepts)
    assert ours.session_key == theirs.session_key


async def test_beginning_can_be_cancelled_without_a_trace(house: House) -> None:
    begins, accepts = await house.pair()
    await until(lambda: begins._rendezvous.is_present)
    for _ in range(20):
        beginning = asyncio.create_task(begins.begin(1))
        await asyncio.sleep(0)
        beginning.cancel()
        await asyncio.gather(beginning, return_exceptions=True)
    assert not begins._pending
    await connect(begins, accepts, 2)
    gc.collect()


async def test_a_closed_peer_says_so(house: House) -> None:
    begins, accepts = await house.pair()
    waiting = asyncio.create_task(accepts.accept())
    await asyncio.sleep(0)
    await accepts.close()
    await begins.close()
    with pytest.raises(RoomClosed):
        await waiting
    with pytest.raises(RoomClosed):
        await begins.begin(1)


async def test_stun_is_offered_by_the_signaling_server(house: House, server: SignalingServer) -> None:
    begins, _ = await house.pair()
    await until(lambda: begins._rendezvous.is_present)
    assert begins.ice_servers.stun == tuple(("127.0.0.1", port) for port in server.stun_ports)
    assert begins.ice_servers.turn is None
