"""STUN and TURN on the lab's public host: the signaling server, and Debian's coturn with docs/turnserver.conf."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peerllm_signaling.turn import TurnServers

from tests.lab.authority import Certificate
from tests.lab.net import PUBLIC, ROOT, Lab

SECRET = "a secret of the lab's"
STUN = [[PUBLIC, 8080], [PUBLIC, 8081]]
_TURN_PORT = 3478
_TURNS_PORT = 5349


def start_signaling(
    lab: Lab, *options: str, certificate: Certificate | None = None, turn_seconds: float | None = None
) -> subprocess.Popen[Any]:
    """On the public host; STUN on 8080 and 8081.

    Args:
        certificate: serve wss with it.
        turn_seconds: the life of the TURN credentials that it hands out.
    """
    command = ["-m", "peerllm_signaling"]
    if turn_seconds is not None:
        script = f"import sys; from peerllm_signaling import limits, main; limits.TURN_SECONDS = {turn_seconds}; "
        command = ["-c", script + "sys.exit(main.main())"]
    if certificate is not None:
        options += ("--tls-cert", str(certificate.chain), "--tls-key", str(certificate.key))
    process = lab.start(
        "p", sys.executable, *command, "--host", PUBLIC, "--port", "8080", *options, stderr=-3, stdout=-3
    )
    _wait_for_port(lab, 8080)
    return process


@contextlib.contextmanager
def relay(lab: Lab, folder: Path, *, certificate: Certificate | None = None) -> Iterator[list[dict[str, Any]]]:
    """coturn; gives the `turn` of a peer's options, over UDP and over TCP, and over TLS where it has a certificate."""
    if shutil.which("turnserver") is None:
        raise RuntimeError("the lab's relay is Debian's coturn, which is not installed")
    configuration = folder / "turnserver.conf"
    ours = f"\nstatic-auth-secret={SECRET}\nlistening-ip={PUBLIC}\nrelay-ip={PUBLIC}\n"
    ours += f"pidfile={folder / 'pid'}\nuserdb={folder / 'db'}\n"
    if certificate is not None:
        ours += f"tls-listening-port={_TURNS_PORT}\ncert={certificate.chain}\npkey={certificate.key}\n"
    configuration.write_text((ROOT / "docs" / "turnserver.conf").read_text() + ours)
    lab.start("p", "turnserver", "-c", str(configuration), stderr=-3, stdout=-3)
    _wait_for_port(lab, _TURN_PORT)
    given = TurnServers((), SECRET.encode()).credentials(time.time())
    ways = [("udp", _TURN_PORT), ("tcp", _TURN_PORT)]
    if certificate is not None:
        _wait_for_port(lab, _TURNS_PORT)
        ways.append(("tls", _TURNS_PORT))
    yield [
        {
            "host": PUBLIC,
            "port": port,
            "username": given["username"],
            "credential": given["credential"],
            "transport": transport,
        }
        for transport, port in ways
    ]


def turn_options(folder: Path, *urls: str) -> tuple[str, ...]:
    """The signaling server's, with the relay's secret in a file."""
    secret = folder / "turn-secret"
    secret.write_text(f"{SECRET}\n")
    return (*(word for url in urls for word in ("--turn-url", url)), "--turn-secret-file", str(secret))


def _wait_for_port(lab: Lab, port: int) -> None:
    """Until something listens on the public host's TCP port."""
    script = (
        "import socket,sys,time\n"
        "for _ in range(200):\n"
        "    try: socket.create_connection((sys.argv[1], int(sys.argv[2])), 1).close(); break\n"
        "    except OSError: time.sleep(0.05)\n"
        "else: sys.exit(1)"
    )
    process = lab.start("p", sys.executable, "-c", script, PUBLIC, str(port))
    if process.wait(timeout=20) != 0:
        raise RuntimeError(f"nothing listens on port {port} of the public host")
