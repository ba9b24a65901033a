"""What goes wrong: dead and hung workers, clients that leave, peers that do not fit, daemons that collide."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from peerllm.cli.demo_processes import DemoFailed, stage
from peerllm.protocol.errors import PeerllmError
from tests.e2e.rooms import RoomOfTwo, kill, room_code, room_of_two, start_daemon, start_signaling, wait_until
from tests.tiny_models import make_model

LONG = {"prompt": "the tide", "max_tokens": 400, "temperature": 0, "draft_length": 0}


@pytest.fixture(scope="module")
def slow_room(tiny_model: Path) -> Iterator[RoomOfTwo]:
    """A round trip of 40 ms, so that a long answer is still being made when something happens to it."""
    with room_of_two(str(tiny_model), rtt=40.0) as both:
        yield both


def text_of(event: dict[str, Any]) -> str:
    return "".join(choice["text"] for choice in event["choices"])


def begin_answer(room: RoomOfTwo, peer: str, **changes: Any):  # type: ignore[no-untyped-def]
    events = getattr(room, peer).client.stream("/v1/completions", LONG | changes)
    for event in events:
        if event["choices"] and event["choices"][0]["text"]:
            return events
    raise AssertionError("no text came")


@pytest.mark.timeout(180)
@pytest.mark.parametrize("hit", ["first", "second"])
def test_a_stopped_worker_is_found_and_replaced_and_the_answer_goes_on(slow_room: RoomOfTwo, hit: str) -> None:
    daemon = getattr(slow_room, hit)
    undisturbed = slow_room.first.complete("the tide", max_tokens=120)["text"]
    events = begin_answer(slow_room, "first", max_tokens=120)
    kill(daemon.worker_pid(), signal.SIGSTOP)
    wait_until(lambda: not daemon.is_well(), 10)
    assert undisturbed.endswith("".join(text_of(event) for event in events))
    for each in (slow_room.first, slow_room.second):
        each.wait_well()
    assert daemon.status()["worker"]["restarts"] > 0


@pytest.mark.timeout(180)
@pytest.mark.parametrize("hit", ["first", "second"])
def test_an_answer_whose_workers_die_again_and_again_ends_in_a_typed_error(slow_room: RoomOfTwo, hit: str) -> None:
    daemon = getattr(slow_room, hit)
    caught: list[PeerllmError] = []

    def read() -> None:
        try:
            list(begin_answer(slow_room, "first"))
        except PeerllmError as error:
            caught.append(error)

    reading = threading.Thread(target=read)
    reading.start()
    while reading.is_alive():
        with contextlib.suppress(ProcessLookupError, TypeError):  # between two workers
            kill(daemon.worker_pid())
        reading.join(0.5)
    assert [error.code for error in caught] == ["worker_died"]
    for each in (slow_room.first, slow_room.second):
        each.wait_well()
    assert slow_room.first.complete("the tide", max_tokens=8)["tokens"] == 8


@pytest.mark.parametrize("peer", ["first", "second"])
def test_a_client_that_goes_away_stops_its_answer(slow_room: RoomOfTwo, peer: str) -> None:
    events = begin_answer(slow_room, peer)
    assert slow_room.first.status()["queue"]["active"] == 1
    events.close()
    wait_until(lambda: slow_room.first.status()["queue"]["active"] == 0, 2)
    assert slow_room.first.complete("the tide", max_tokens=4)["tokens"] == 4


def test_requests_of_both_peers_wait_in_one_line(slow_room: RoomOfTwo) -> None:
    events = begin_answer(slow_room, "second")
    waiting = slow_room.first.client.stream("/v1/completions", LONG | {"max_tokens": 4})
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(os.fspath(slow_room.first.socket))
    body = b'{"prompt": "x", "max_tokens": 1}'
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body) + body
    )
    wait_until(lambda: slow_room.first.status()["queue"]["waiting"] == 1, 5)
    connection.close()
    wait_until(lambda: slow_room.first.status()["queue"]["waiting"] == 0, 5)
    events.close()
    assert list(waiting)[-1]


@pytest.mark.parametrize(
    ("up", "join", "why"),
    [
        (("--layers", "0:3"), ("--layers", "2:4"), "held twice"),
        (("--layers", "0:1"), ("--layers", "2:4"), "held by nobody"),
        (("--dtype", "float32"), ("--dtype", "bfloat16"), "no dtype in common"),
    ],
)
def test_divisions_that_cannot_work_are_refused_on_both_sides_with_the_reason(
    tiny_model: Path, up: tuple[str, ...], join: tuple[str, ...], why: str
) -> None:
    with stage() as here:
        signaling = start_signaling(here)
        first = start_daemon(here, "first", signaling, "up", "--model", str(tiny_model), *up)
        second = start_daemon(here, "second", signaling, "join", room_code(first), "--model", str(tiny_model), *join)
        for daemon in (first, second):
            with pytest.raises(DemoFailed, match=why):
                daemon.child.wait_for("Ready:", 60)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--layers", "0:4"), "whole model"),
        (("--layers", "1:3"), "held by nobody"),
        (("--layers", "2:9"), "beyond the model"),
        (("--draft", "model:/nope"), "--draft model:/nope"),
        (("--context", "1"), "from 16 up"),
        (("--signaling", "http://127.0.0.1:1"), "not the address of a signaling server"),
    ],
)
def test_what_no_partner_could_mend_is_refused_before_a_room_is_opened(
    tiny_model: Path, options: tuple[str, ...], why: str
) -> None:
    with stage() as here:
        child = here.start(
            "first",
            *("peerllm", "up", "--model", str(tiny_model), "--signaling", "ws://127.0.0.1:9", "--device", "cpu"),
            *("--state-dir", str(here.folder / "own"), "--socket", str(here.folder / "own.sock"), *options),
        )
        with pytest.raises(DemoFailed, match=why):
            child.wait_for("Room code", 60)


def test_a_joiner_with_another_model_is_refused_and_what_differs_is_named(tiny_model: Path, tmp_path: Path) -> None:
    other = make_model(tmp_path / "other", "llama", seed=5)
    with stage() as here:
        signaling = start_signaling(here)
        first = start_daemon(here, "first", signaling, "up", "--model", str(tiny_model))
        second = start_daemon(here, "second", signaling, "join", room_code(first), "--model", str(other))
        for daemon in (first, second):
            with pytest.raises(DemoFailed, match=r"weights in model\.safetensors"):
                daemon.child.wait_for("Ready:", 60)


def test_a_joiner_never_opens_a_path_that_the_other_side_names(tiny_model: Path) -> None:
    with stage() as here:
        signaling = start_signaling(here)
        first = start_daemon(here, "first", signaling, "up", "--model", str(tiny_model))
        second = start_daemon(here, "second", signaling, "join", room_code(first))
        with pytest.raises(DemoFailed, match="--model"):
            second.child.wait_for("Ready:", 60)


def test_a_second_daemon_on_the_same_socket_or_state_is_refused_and_the_first_lives_on(
    room: RoomOfTwo, tiny_model: Path
) -> None:
    with stage() as here:
        for taken in (
            ("--socket", str(room.first.socket), "--state-dir", str(here.folder / "own")),
            ("--socket", str(here.folder / "own.sock"), "--state-dir", str(room.stage.folder / "first")),
        ):
            command = ("peerllm", "up", "--model", str(tiny_model), "--signaling", room.signaling, *taken)
            child = here.start(f"late-{len(taken[1])}", *command)
            with pytest.raises(DemoFailed, match=r"(?i)another"):
                child.wait_for("Room code", 60)
    assert room.first.complete("the tide", max_tokens=4)["tokens"] == 4
