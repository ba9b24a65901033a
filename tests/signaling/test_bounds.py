"""Floods and abandoned rooms: memory stays where it was, and others' rooms live on."""

from __future__ import annotations

import gc
import random
import sys

from peerllm_signaling import limits
from peerllm_signaling.budgets import Bucket, Buckets, address_group

from tests.signaling.board import Board


def open_and_abandon(board: Board, count: int) -> None:
    """From `count / 10` addresses, over time: each room is left at once, and forgotten half a minute later."""
    for index in range(count):
        opener = board.client(f"10.{index // 10 // 256}.{index // 10 % 256}.1")
        opener.open()
        opener.leave()
        board.now += 0.02
        if index % 50 == 0:
            board.switchboard.tick(board.now)
    board.pass_time(limits.ROOM_SECONDS, step=5)


def test_memory_is_flat_after_100_000_rooms_opened_and_abandoned(board: Board) -> None:
    """Counted in the interpreter's blocks; `test_memory` looks at a real process from outside."""
    open_and_abandon(board, 20_000)
    gc.collect()
    before = sys.getallocatedblocks()
    open_and_abandon(board, 80_000)
    gc.collect()
    after = sys.getallocatedblocks()
    assert len(board.switchboard.rooms) == 0
    assert board.switchboard.remembered() == 0
    assert after - before < 100


def test_the_server_holds_100_000_rooms_and_refuses_the_next(board: Board) -> None:
    for index in range(limits.MAX_ROOMS):
        board.client(f"{index // 10}").open()
    late = board.client()
    late.say("open", token="00" * 16, seats=1)
    assert late.errors == ["server_full"]


def test_a_guessed_number_is_rarely_a_room(board: Board) -> None:
    rooms = {board.client(f"{index // 10}").open() for index in range(5_000)}
    chance = random.Random(1)
    digits = len(str(max(rooms)))
    guesses = [chance.randrange(10 ** (digits - 1), 10**digits) for _ in range(20_000)]
    assert sum(guess in rooms for guess in guesses) < 20_000 * 0.015


def test_a_flood_of_claims_at_random_numbers_closes_nobodys_room(board: Board) -> None:
    opener = board.client()
    room = opener.open()
    chance = random.Random(2)
    for _ in range(10):
        for address in range(1_000):
            board.client(f"flood {address}").claim(chance.randrange(1000, 10_000)).leave()
        board.pass_time(1)
    opener.take()
    joiner = board.client().claim(room)
    assert joiner.errors == []
    assert len(board.switchboard.rooms) == 1


def test_a_bucket_refills_at_its_rate_and_never_beyond_its_burst() -> None:
    bucket = Bucket(per_minute=60, burst=2, now=0)
    assert [bucket.take(0) for _ in range(3)] == [True, True, False]
    assert bucket.take(1.0)
    assert not bucket.take(1.5)
    assert [bucket.take(100) for _ in range(3)] == [True, True, False]


def test_buckets_remember_so_many_addresses_and_forget_those_at_rest() -> None:
    buckets = Buckets(60, 2, most=3)
    for key in range(10):
        buckets.take(key, now=0)
    assert len(buckets) == 3
    buckets.forget_full(now=60)
    assert len(buckets) == 0


def test_an_ipv6_household_counts_as_one_address() -> None:
    assert address_group("2001:db8:1:2ff::1") == address_group("2001:db8:1:200::9")
    assert address_group("2001:db8:1:2ff::1") != address_group("2001:db8:1:300::1")
    assert address_group("::ffff:192.0.2.7") == address_group("192.0.2.7") == "192.0.2.7"
    assert address_group("fe80::1%eth0") == address_group("fe80::2")
    assert address_group("nonsense") == "unknown"
