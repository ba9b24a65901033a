"""The worker as the daemon sees it: a process at the other end of a socket pair."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from peerllm.engine import versions, worker
from peerllm.protocol import limits
from peerllm.protocol.errors import EngineError
from tests.engine.worker_end import Worker


@pytest.fixture
def start():
    running = []

    def begin(*arguments):
        running.append(Worker("--threads", "1", *arguments))
        return running[-1]

    yield begin
    for each in running:
        each.stop()


def test_a_round_through_two_workers_is_the_models_own(tiny, start):
    from tests import tiny_models

    model = tiny("llama")
    first, last = start(), start()
    ready = first.load(model.folder)
    assert (ready["context"], ready["vocabulary"], ready["width"], ready["has_chat_template"]) == (256, 304, 64, True)
    assert ready["eos_token_ids"] == [1] and ready["bos_token_id"] == 0
    assert ready["bytes"]["weights"] > 0 and ready["seconds"]["weights"] >= 0
    last.load(model.folder, (2, 4))
    assert any(event["event"] == "progress" and event["fraction"] == 1.0 for _, event in last.events)
    tokens = first.call("tokenize", prompt=tiny_models.PROMPTS[0])[0]["tokens"]
    assert tokens == model.prompts[0]
    for each in (first, last):
        each.call("open", session=5, sampling={"temperature": 0.0})
    rows = len(tokens) - 1
    times, hidden = first.call("prefill", session=5, start=0, tokens=tokens[:rows])
    assert set(times) == {"layers_us", "encode_us", "decode_us"}
    assert last.call("prefill", hidden, session=5, start=0, rows=rows)[1] == b""
    answer, known = [], 0
    while len(answer) < 8:
        sequence = [*tokens, *answer]
        block, hidden = first.call(
            "draft_block",
            session=5,
            tokens=sequence[known:],
            draft_length=3,
            min_probability=0.0,
            **{"from": known},
        )
        known = len(sequence)
        verdict, _ = last.call("verify", hidden, session=5, start=block["start"], candidates=block["candidates"])
        answer += [*block["candidates"][: verdict["accepted"]], verdict["next_token"]]
    assert answer[:8] == tiny_models.generate_greedily(model.whole, tokens, 8)
    said = first.call("text", session=5, tokens=answer, final=True)[0]
    assert "".join(said["pieces"]) + said["text"] == model.tokenizer.decode(answer, skip_special_tokens=True)


def test_an_error_is_an_answer_and_the_worker_lives_on(tiny, start):
    process = start()
    for op, fields, code in (
        ("nonsense", {}, "protocol_error"),
        ("draft_block", {"session": 1}, "engine_error"),
        ("load", {"folder": 3}, "protocol_error"),
        ("load", {"folder": "/nowhere", "layers": [0, 1], "dtype": "float32", "codec": "exact"}, None),
    ):
        header, _ = process.answer(process.ask(op, **fields))
        assert set(header["error"]) == {"code", "message", "param"}
        assert code is None or header["error"]["code"] == code
    process.load(tiny("llama").folder)
    header, _ = process.answer(process.ask("load", folder=str(tiny("llama").folder), layers=[0, 9], dtype="float32",
                                           codec="exact"))  # fmt: skip
    assert header["error"]["code"] == "layers_mismatch"


def test_it_beats_from_before_torch_is_imported_and_while_it_computes(tiny, start):
    process = start()
    begun = time.monotonic()
    header, _ = process.frame()
    assert header == {"event": "beat"} and time.monotonic() - begun < 2.0
    process.load(tiny("llama").folder, context=512, layers=(0, 4))
    process.call("open", session=1, sampling={})
    process.events.clear()
    until = time.monotonic() + 2.2
    while time.monotonic() < until:
        process.call("prefill", session=1, start=0, tokens=[7] * 500)
    beats = [at for at, event in process.events if event["event"] == "beat"]
    assert len(beats) >= 3
    assert max(b - a for a, b in itertools.pairwise(beats)) < 4 * limits.HEARTBEAT_SECONDS


def test_the_pipes_end_ends_it_at_once_in_mid_compute(tiny, start):
    process = start()
    process.load(tiny("llama").folder, context=512, layers=(0, 4))
    process.call("open", session=1, sampling={})
    for _ in range(300):
        process.ask("prefill", session=1, start=0, tokens=[7] * 500)
    process.socket.close()
    begun = time.monotonic()
    process.process.wait(10)
    assert time.monotonic() - begun < 1.0


def test_ctrl_c_is_left_to_the_daemon(start):
    process = start()
    process.frame()
    process.process.send_signal(signal.SIGINT)
    assert process.call("machine")[0]["devices"]


def test_a_daemon_that_sends_faster_than_the_worker_computes_is_held_back(tiny, start):
    """Two MiB wait in the worker, and what the kernel's buffers hold; the rest stays with the sender."""
    process = start()
    process.load(tiny("llama").folder, layers=(2, 4), context=512)
    process.call("open", session=1, sampling={})
    os.kill(process.process.pid, signal.SIGSTOP)
    os.kill(process.process.pid, signal.SIGCONT)
    payload = bytes(500 * 64 * 4)
    sent = []

    def flood():
        for _ in range(200):
            number = process.ask("prefill", payload, session=1, start=0, rows=500)
            sent.append(number)

    thread = threading.Thread(target=flood, daemon=True)
    thread.start()
    number = None
    most_ahead = 0
    for _ in range(200):
        header, _ = process.frame()
        while "event" in header:
            header, _ = process.frame()
        number = header["id"]
        most_ahead = max(most_ahead, len(sent) - (number - sent[0] + 1))
    thread.join(5)
    assert number == sent[-1] and len(sent) == 200
    allowed = limits.MAX_UNPROCESSED_BYTES + 2 * 256 * limits.KIB + 512 * limits.KIB
    assert most_ahead * len(payload) < allowed + 2 * len(payload)


def test_it_never_imports_what_a_machine_with_torch_alone_lacks(tiny):
    code = (
        "import sys\n"
        "from peerllm.engine import worker, operations, engine\n"
        "from peerllm.engine.operations import Operations\n"
        "ops = Operations(threads=1, progress=lambda *a: None)\n"
        f"ops.perform('load', {{'folder': {str(tiny('llama').folder)!r}, 'layers': [0, 2], 'dtype': 'float32',"
        " 'codec': 'exact', 'draft': 'ngram'}, b'')\n"
        "bad = {'cbor2', 'aiortc', 'aioice', 'structlog', 'aiohttp', 'uvloop'} & set(sys.modules)\n"
        "sys.exit(f'imported: {bad}' if bad else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_starting_it_imports_no_torch_before_the_first_beat():
    code = "import sys; from peerllm.engine import worker; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize(
    ("found", "is_right"),
    [("2.10.1", False), ("2.11.0+cu130", True), ("2.13.0+cpu", True), ("2.15.0", False), ("2.14.0a0+git1", True)],
)
def test_other_releases_of_torch_are_refused_with_what_to_install(monkeypatch, found, is_right):
    monkeypatch.setattr(versions.metadata, "version", lambda name: found if name == "torch" else "5.20.0")
    if is_right:
        versions.check_versions()
    else:
        with pytest.raises(EngineError, match=r"torch>=2\.11,<2\.15"):
            versions.check_versions()


def test_a_package_that_is_missing_is_named(monkeypatch):
    def version(name):
        if name == "transformers":
            raise versions.metadata.PackageNotFoundError(name)
        return "2.12.0"

    monkeypatch.setattr(versions.metadata, "version", version)
    refusing = worker._operations(None, lambda stage, fraction: None)
    with pytest.raises(EngineError, match="transformers is not installed"):
        refusing.perform("machine", {}, b"")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="torch has another OpenMP there")
@pytest.mark.parametrize(
    ("wish", "spins"),
    [({}, "6000"), ({"GOMP_SPINCOUNT": "77"}, "77"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "30000000000")],
)
def test_its_threads_soon_sleep_at_a_barrier_unless_the_user_wishes_otherwise(tiny, wish, spins, tmp_path, monkeypatch):
    """Spinning, they would lose time slices to whoever else computes on the machine. libgomp says what it goes by."""
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):  # a bench that was imported here set one of them
        monkeypatch.delenv(name, raising=False)
    log = tmp_path / "log"
    with log.open("w") as stderr:
        worker = Worker(environment={"OMP_DISPLAY_ENV": "verbose", **wish}, stderr=stderr)
        try:
            worker.load(tiny("llama").folder)
        finally:
            worker.stop()
    assert f"GOMP_SPINCOUNT = '{spins}'" in log.read_text()
