"""`peerllm doctor`: what keeps two peers from working together well, found before they try. `advice` says what to do.

The report is plain values, as `--json` prints them: `signaling`, `nat`, `candidates`, `relays`, `link` (None for one
machine alone), `loop`, `machine`, `versions`.
"""

from __future__ import annotations

import asyncio
import platform
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any, TypeVar

import peerllm
from peerllm.daemon.bench import told_of_its_end
from peerllm.daemon.config import DaemonConfig
from peerllm.daemon.events import Connected, Person, Progress
from peerllm.daemon.meeting import make_link, meet, tell_states
from peerllm.daemon.worker_process import WorkerProcess
from peerllm.link import Link, LinkState, TurnServer, bench
from peerllm.link.nat import NatKind, Outside, look_outside
from peerllm.protocol import cbor, limits
from peerllm.protocol.errors import LinkError, PeerllmError, ProtocolError
from peerllm.protocol.fields import from_map, text, to_map
from peerllm.rooms.keys import StateLock
from peerllm.rooms.probe import Reached, reach
from peerllm.telemetry.watchdog import LoopWatchdog

MACHINE_SECONDS = 60.0
"""To import torch and look at its devices: 2 to 5 s, and ten times that from a cold disk or on a busy machine."""
MEASURE_SECONDS = 20.0
"""Each of the two measurements over the link takes 3 to 6 s; a path that breaks under it is not waited for."""
TRIES = 3
"""A connection that was replaced under a measurement is measured anew, so many times in all."""
_LOOK_SECONDS = 0.1
_RELEASE = re.compile(r"[0-9A-Za-z.+!-]{1,40}")
"""What a release can be called; the other side's goes into the report."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Greeting:
    """HELLO's body between two doctors."""

    release: str = text(limits.MAX_NAME_CHARS, default="")


async def examine(config: DaemonConfig, person: Person, *, is_alone: bool) -> dict[str, Any]:
    """Everything that one machine can say alone; and, unless `is_alone`, what a link to the room's other side says.

    All that needs no other part's answer is asked at once, each within seconds of its own. Nothing of it raises: what
    does not work is in the report.
    """
    watchdog = LoopWatchdog()
    watchdog.start()
    looking = asyncio.gather(_signaling_and_outside(config), _machine())
    measuring = None if is_alone else asyncio.create_task(_with_peer(config, person, looking))
    if is_alone:
        person.tell(Progress("looking at this machine and its network", 0.0))
    (signaling, outside), machine = await looking
    link = None if measuring is None else await measuring
    watchdog.stop()
    return {
        "release": peerllm.__version__,
        "signaling": signaling,
        **outside,
        "link": link,
        "loop": watchdog.summary(),
        "machine": machine,
        "versions": _versions(machine),
    }


# --- One machine alone ------------------------------------------------------------------------------------------------


async def _signaling_and_outside(config: DaemonConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    signaling: dict[str, Any] = {"url": config.signaling or None, "connect_ms": None, "round_trip_ms": None}
    signaling["error"] = None
    reached: Reached | None = None
    if config.signaling:
        try:
            reached = await reach(config.signaling, insecure=config.is_insecure)
        except PeerllmError as error:
            signaling["error"] = error.message
        else:
            signaling["connect_ms"] = _ms(reached.connect_seconds)
            signaling["round_trip_ms"] = _ms(reached.round_trip_seconds)
    return signaling, await _outside(config, reached)


async def _outside(config: DaemonConfig, reached: Reached | None) -> dict[str, Any]:
    if config.is_loopback:
        return _outside_values(Outside(NatKind.UNKNOWN), "the link is kept on this machine")
    if reached is None:
        return _outside_values(await look_outside(()), "no signaling server could be asked")
    servers = reached.ice_servers
    relays = servers.turn
    found = await look_outside(
        servers.stun,
        ()
        if relays is None
        else [
            TurnServer(host, port, relays.username, relays.credential, how) for host, port, how in relays.endpoints()
        ],
    )
    why = None
    if found.kind is NatKind.UNKNOWN:
        if not servers.stun:
            why = "the signaling server offers no STUN"
        elif len({each.server for each in found.mappings}) < 2:
            why = "only one STUN port of the signaling server answers"
        else:
            why = "the signaling server is on this machine or in its network"
    return _outside_values(found, why)


def _outside_values(found: Outside, why: str | None) -> dict[str, Any]:
    addresses = {(each.local[0], each.seen[0]) for each in found.mappings}
    return {
        "nat": {
            "kind": found.kind.value,
            "why_unknown": why,
            "addresses": [{"local": local, "seen": seen} for local, seen in sorted(addresses)],
        },
        "candidates": [{"kind": each.kind, "address": each.address, "port": each.port} for each in found.candidates],
        "relays": [
            {
                "host": each.server.host,
                "port": each.server.port,
                "transport": each.server.transport,
                "answers": each.answers,
                "ms": _ms(each.seconds),
            }
            for each in found.relays
        ],
    }


async def _machine() -> dict[str, Any]:
    """What the worker answers to `machine`, and `error`: in words, or None."""
    worker = WorkerProcess()
    try:
        async with asyncio.timeout(MACHINE_SECONDS):
            await worker.start()
            return {**(await worker.call("machine")).values, "error": None}
    except TimeoutError:
        return {"error": f"the engine did not start within {MACHINE_SECONDS:.0f} s"}
    except PeerllmError as error:
        return {"error": error.message}
    finally:
        await worker.close()


def _versions(machine: dict[str, Any]) -> dict[str, str]:
    versions = {"peerllm": peerllm.__version__, "python": platform.python_version()}
    versions |= {name: machine[name] for name in ("torch", "transformers") if name in machine}
    versions |= {name: metadata.version(name) for name in ("aiortc", "aioice")}
    return versions | {"system": f"{platform.system()} {platform.release()} {platform.machine()}"}


# --- With the other side ----------------------------------------------------------------------------------------------


async def _with_peer(config: DaemonConfig, person: Person, looking: asyncio.Future[Any]) -> dict[str, Any]:
    """Joins or opens the room; the joiner measures and the opener answers."""
    result: dict[str, Any] = {"path": None, "error": None}
    try:
        with StateLock(config.state_dir):
            peer, room = await meet(config, person.tell)
            greeted: list[bytes] = []
            link = make_link(config, peer, hello=_hello, on_hello=greeted.append)
            async with told_of_its_end(link, peer, room):
                begun = time.monotonic()
                await link.start()
                stats = link.stats()
                result |= {"path": stats.path, "seconds_to_up": round(time.monotonic() - begun, 3)}
                result["other_release"] = _release(greeted[-1])
                person.tell(Connected(stats.path, stats.rtt_ms))
                tell_states(link, person.tell)
                await asyncio.wait([looking])  # importing torch beside a measurement would be measured too
                if peer.is_opener:
                    # The other side may still be importing it.
                    await bench.serve(link, patience=MACHINE_SECONDS + bench.SERVE_SECONDS)
                    result["rtt_ms"] = None if (rtt := link.stats().rtt_ms) is None else round(rtt, 2)
                    result["is_measured_there"] = True
                else:
                    await _measure(link, person, result)
    except PeerllmError as error:
        result["error"] = error.message
    return result


async def _measure(link: Link, person: Person, result: dict[str, Any]) -> None:
    """Puts into `result` what is measured, as it comes: what breaks later leaves it there."""
    begun_epoch = link.epoch
    result |= dict.fromkeys(("rtt_ms", "rtt_p95_ms", "loss_out", "loss_in", "mbit_out", "mbit_in", "retransmitted"))
    result["replaced"] = 0
    try:
        person.tell(Progress("measuring the link", 0.0))
        loss = await _settled(link, lambda: _loss(link))
        if loss is not None:
            result |= {
                "rtt_ms": round(min(loss.took_ms), 2),
                "rtt_p95_ms": round(bench.quantile(loss.took_ms, 0.95), 2),
                "loss_out": round(loss.out, 4),
                "loss_in": round(loss.into, 4),
            }
        person.tell(Progress("measuring the link", 0.4))
        rates = await _settled(link, lambda: bench.measure_throughput(link))
        if rates is not None:
            stats = link.stats()
            result |= {"mbit_out": round(rates[0] * 8e-6, 2), "mbit_in": round(rates[1] * 8e-6, 2)}
            result |= {"retransmitted": stats.retransmitted, "path": stats.path}
        person.tell(Progress("measuring the link", 1.0))
        await bench.finish(link)
    finally:
        result["replaced"] = link.epoch - begun_epoch


async def _loss(link: Link) -> bench.Loss:
    loss = await bench.measure_loss(link)
    if loss is None:
        raise bench.Replaced
    return loss


async def _settled(link: Link, work: Callable[[], Awaitable[T]]) -> T | None:
    """What `work` measures of one connection from begin to end; None when each of TRIES was replaced."""
    for _ in range(TRIES):
        while link.state is LinkState.SUSPECT:  # noqa: ASYNC110 - the link ends that itself
            await asyncio.sleep(_LOOK_SECONDS)
        try:
            async with asyncio.timeout(MEASURE_SECONDS):
                return await work()
        except bench.Replaced:
            continue
        except TimeoutError:
            raise LinkError("The link came up, and what was sent over it did not come back in time.") from None
    return None


def _hello() -> bytes:
    return cbor.encode(to_map(_Greeting(release=peerllm.__version__)))


def _release(body: bytes) -> str | None:
    """None for one that says nothing of it, `peerllm bench link`, say, or what can be no release."""
    try:
        release = from_map(_Greeting, cbor.decode(body, max_bytes=limits.MAX_HELLO_BYTES)).release
    except ProtocolError:
        return None
    return release if _RELEASE.fullmatch(release) else None


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 1)
