"""The link's figures in the lab: `python -m tests.lab figures [NAME …] [--samples N]`; the names are ALL's keys.

Benchmarks, not tests: a busy machine moves them. Blocks are multiples of the lab's own ping.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peerllm.link.bench import SMALLEST, quantile
from tests.e2e.outliving import DISTURBANCES, QUESTION, Streaming, lab_room
from tests.lab.net import NATS, PING_SECONDS, Lab
from tests.lab.peers import Peers
from tests.lab.servers import STUN, relay, start_signaling
from tests.tiny_models import make_model

RTT_MS = 80.0
CELLS: dict[str, dict[str, float]] = {
    "clean": {},
    "0.5% loss each way, 1 ms reordering": {"loss": 0.005, "jitter_ms": 1.0},
    "20 Mbit/s, 100 ms of buffer": {"rate_mbit": 20.0, "buffer_ms": 100.0},
}
BLOCKS = (16, 16_000, 64_000, 200_000)


def blocks(samples: int, *, own: bool = True) -> None:
    for name, shape in CELLS.items():
        with Lab(rtt_ms=RTT_MS, **shape) as lab:
            ping = lab.ping_ms(20)
            peers = Peers(lab, left={"own_sctp": own})
            peers.start()
            peers.right.do("serve")
            found = peers.left.ask("measure", 600.0, sizes=BLOCKS, samples=samples)
            print(f"{name} ({'ours' if own else 'stock'}; ping {ping:.1f} ms)")
            for each in found["blocks"]:
                shares = "  ".join(f"p{share} {each[f'p{share}_ms'] / ping:.2f}" for share in (50, 95, 99))
                print(f"  {each['bytes']:>7} {each['direction']:3}  {shares}  retransmitted {each['retransmitted']}")
            peers.close()


def stock(samples: int) -> None:
    blocks(samples, own=False)


def steady(samples: int) -> None:
    """50 messages of 4 KB a second."""
    with Lab(rtt_ms=RTT_MS) as lab:
        ping = lab.ping_ms(20)
        peers = Peers(lab)
        peers.start()
        peers.right.do("serve")
        took = peers.left.ask("steady", 120.0, seconds=min(60.0, samples * 0.3))
        print(f"50 × 4 KB a second: p50 {quantile(took, 0.5) / ping:.2f}  p99 {quantile(took, 0.99) / ping:.2f}")
        peers.close()


def bulk(samples: int) -> None:
    """A transfer for each forty samples: the median, and the worst.

    At 2 Mbit/s, pings of the system's and 16 bytes over the link go on meanwhile: p95 at most 100 ms more than the
    round trip is the aim.
    """
    for mbit, buffer_ms, size in ((20, 1000, 8_000_000), (2, 100, 1_600_000), (2, 1000, 1_600_000)):
        runs = [_transfer(mbit, buffer_ms, size) for _ in range(max(1, samples // 40))]
        words = []
        for name, (words_of, is_more_better) in _BULK.items():
            values = sorted(run[name] for run in runs)
            worst = values[0] if is_more_better else values[-1]
            words.append(f"{name} {words_of(quantile(values, 0.5))} (worst {words_of(worst)})")
        print(f"{mbit} Mbit/s, {buffer_ms} ms, {len(runs)} transfers: {'  '.join(words)}")


_BULK: dict[str, tuple[Callable[[float], str], bool]] = {
    "of the rate": ("{:.1%}".format, True),
    "queue p95": ("{:.0f} ms".format, False),
    "ping p95": ("{:+.0f} ms".format, False),
    "pings lost": ("{:.0%}".format, False),
    "retransmitted": ("{:.1%}".format, False),
    "beside p95, round trips": ("{:.2f}".format, False),
    "beside p95": ("{:+.0f} ms".format, False),
}
"""What is measured of a transfer: its words, and whether more is better."""


def _transfer(mbit: int, buffer_ms: int, size: int) -> dict[str, float]:
    with Lab(rtt_ms=RTT_MS, rate_mbit=mbit, buffer_ms=buffer_ms) as lab:
        ping = lab.ping_ms(20)
        peers = Peers(lab)
        peers.start()
        peers.right.do("serve")
        lab.report("a")
        beside = 4_000 if mbit > 2 else SMALLEST
        chunk = 200_000 if mbit > 2 else 50_000
        pings: list[float] = []
        # As long as the transfer takes at the full rate: afterwards the queue is empty, and would flatter.
        count = int(size * 8e-6 / mbit / PING_SECONDS)
        pinger = _in_background(lambda: pings.extend(lab.pings_ms(count)))
        found = peers.left.ask("bulk", 120.0, size=size, chunk=chunk, beside=beside)
        pinger.join()
        report, stats = lab.report("a"), peers.left.ask("stats")
        exchange = quantile(found["beside_ms"], 0.95)
        peers.close()
    return {
        "of the rate": found["bytes_per_second"] * 8e-6 / mbit,
        "queue p95": report["p95_wait"] * 1000,
        "ping p95": quantile(pings, 0.95) - ping,
        "pings lost": 1 - len(pings) / count,
        "retransmitted": stats["retransmitted"] / max(1, stats["packets_sent"]),
        "beside p95, round trips": exchange / ping,
        "beside p95": exchange - ping,
    }


def paths(samples: int) -> None:
    """Which path each pair of NATs gets, and how soon it is UP: the median of three."""
    for left in NATS:
        for right in NATS:
            took, found = [], set()
            for _ in range(3):
                with (
                    tempfile.TemporaryDirectory() as folder,
                    Lab(rtt_ms=RTT_MS, nat=(left, right)) as lab,
                    relay(lab, Path(folder)) as turn,
                ):
                    start_signaling(lab)
                    peers = Peers(lab, left={"stun": STUN, "turn": turn})
                    started = peers.start()
                    took.append(max(each["seconds"] for each in started))
                    found |= {each["path"] for each in started}
                    peers.close()
            print(f"{left:>15} – {right:15} {' '.join(found):8} UP after {quantile(took, 0.5):.2f} s")


def share(samples: int) -> None:
    """Two links over one bottleneck, then a link and a TCP flow."""
    with Lab(rtt_ms=RTT_MS, rate_mbit=20, buffer_ms=200) as lab:
        pairs = [Peers(lab), Peers(lab)]
        for peers in pairs:
            peers.start()
            peers.right.do("serve")
        for index, peers in enumerate(pairs):
            peers.left.do("bulk", size=20_000_000)
            time.sleep(2.0 * (1 - index))
        before = [peers.left.ask("stats")["bytes_sent"] for peers in pairs]
        time.sleep(4.0)
        sent = [peers.left.ask("stats")["bytes_sent"] - known for peers, known in zip(pairs, before, strict=True)]
        print(f"two links share 20 Mbit/s: {[f'{each * 8e-6 / 4 / 20:.0%}' for each in sent]}")
        for peers in pairs:
            peers.close()
    for buffer_ms in (100, 1000):
        with Lab(rtt_ms=RTT_MS, rate_mbit=2, buffer_ms=buffer_ms) as lab:
            peers = Peers(lab)
            peers.start()
            peers.right.do("serve")
            peers.left.do("bulk", size=6_000_000, chunk=50_000)
            script = (
                "import socket,time,sys\n"
                "s=socket.create_server(('0.0.0.0',9000)) if sys.argv[1]=='take' else None\n"
                "c=s.accept()[0] if s else socket.create_connection((sys.argv[1],9000))\n"
                "e=time.monotonic()+14; n=0\n"
                "while time.monotonic()<e:\n"
                "    d=c.recv(65536) if s else c.send(bytes(8192))\n"
                "    if not d: break\n"
                "    n+=len(d) if s else 0\n"
                "print(n)"
            )
            taking = lab.start("b", "python3", "-c", script, "take", stdout=-1, text=True)
            time.sleep(1.0)
            lab.start("a", "python3", "-c", script, lab.hosts["b"].address)
            taken = int(taking.communicate(timeout=60)[0])
            print(
                f"a TCP flow beside a link, 2 Mbit/s, {buffer_ms} ms of buffer: {taken * 8e-6 / 14 / 2:.0%} of the rate"
            )
            peers.close()


def recovery(samples: int) -> None:
    """From a changed address, or a network restored after 12 s, to UP with a new epoch on both sides."""
    with Lab(rtt_ms=RTT_MS, nat=("port-preserving", "none")) as lab:
        peers = Peers(lab)
        peers.start()
        took: dict[str, list[float]] = {"address of a": [], "address of b": [], "cut for 12 s": []}
        for index in range(max(3, samples // 40)):
            for name, found in took.items():
                epoch = peers.left.ask("stats")["epoch"]
                if name.startswith("cut"):
                    lab.cut("a")
                    time.sleep(12.0)
                    begun = time.monotonic()
                    lab.restore("a")
                else:
                    begun = time.monotonic()
                    lab.change_address(name[-1], step=1 + index)
                found.append(max(end.wait_state("up", epoch_above=epoch) for end in (peers.left, peers.right)) - begun)
        for name, found in took.items():
            print(f"{name}: up again after {quantile(found, 0.5):.1f} s in the median, {max(found):.1f} s at most")
        peers.close()


def outliving(samples: int) -> None:
    """What tests/e2e/test_outliving.py does to a 300-token answer, and how long its reader then waits."""
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), "llama")
        with lab_room(Path(folder), rtt_ms=RTT_MS) as room:
            undisturbed = room.first.complete(**QUESTION)["text"]
            for name, (asker, disturb) in DISTURBANCES.items():
                took = []
                for _ in range(max(3, samples // 40)):
                    answer = Streaming(getattr(room, asker))
                    goes_on = disturb(room)
                    if answer.finish(180) != undisturbed:
                        raise AssertionError(f"{name}: the text is another")
                    took.append(answer.seconds_to_next(goes_on))
                    for daemon in (room.first, room.second):
                        daemon.wait_well()
                median = quantile(took, 0.5)
                print(f"{name}: next token after {median:.2f} s in the median, {max(took):.2f} s at most", flush=True)


def cpu(samples: int) -> None:
    """Seconds of CPU for a megabyte, both ends, ours and stock, in one lab."""
    used = {}
    with Lab(rtt_ms=10.0) as lab:
        for own in (False, True):
            peers = Peers(lab, left={"own_sctp": own})
            peers.start()
            peers.right.do("serve")
            ends = (peers.left, peers.right)
            before = sum(end.ask("stats")["cpu"] for end in ends)
            peers.left.ask("bulk", 240.0, size=16_000_000)
            used[own] = (sum(end.ask("stats")["cpu"] for end in ends) - before) / 16
            peers.close()
    ratio = used[True] / used[False]
    print(f"CPU of a megabyte, both ends: stock {used[False]:.3f} s, ours {used[True]:.3f} s: {ratio:.2f}")


ALL: dict[str, Callable[[int], None]] = {
    "blocks": blocks,
    "stock": stock,
    "steady": steady,
    "bulk": bulk,
    "paths": paths,
    "share": share,
    "recovery": recovery,
    "outliving": outliving,
    "cpu": cpu,
}


def _in_background(what: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=what, daemon=True)
    thread.start()
    return thread


def main(names: list[str], samples: int) -> None:
    for name in names or [each for each in ALL if each != "stock"]:
        ALL[name](samples)
