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

from tests.lab.net import PUBLIC, ROOT, Lab

SECRET = "a secret of the lab's"
STUN = [[PUBLIC, 8080], [PUBLIC, 8081]]
_TURN_PORT = 3478


def start_signaling(lab: Lab) -> subprocess.Popen[Any]:
    """On the public host; STUN on 8080 and 8081."""
    command = ("-m", "peerllm_signaling", "--host", PUBLIC, "--port", "8080")
    process = lab.start("p", sys.executable, *command, stderr=-3, stdout=-3)
    _wait_for_port(lab, 8080)
    return process


@contextlib.contextmanager
def relay(lab: Lab, folder: Path) -> Iterator[list[dict[str, Any]]]:
    """coturn; gives the `turn` of a peer's options, over UDP and over TCP."""
    if shutil.which("turnserver") is None:
        raise RuntimeError("the lab's relay is Debian's coturn, which is not installed")
    configuration = folder / "turnserver.conf"
    ours = f"\nstatic-auth-secret={SECRET}\nlistening-ip={PUBLIC}\nrelay-ip={PUBLIC}\n"
    ours += f"pidfile={folder / 'pid'}\nuserdb={folder / 'db'}\n"
    configuration.write_text((ROOT / "docs" / "turnserver.conf").read_text() + ours)
    lab.start("p", "turnserver", "-c", str(configuration), stderr=-3, stdout=-3)
    _wait_for_port(lab, _TURN_PORT)
    given = TurnServers((), SECRET.encode()).credentials(time.time())
    yield [
        {
            "host": PUBLIC,
            "port": _TURN_PORT,
            "username": given["username"],
            "credential": given["credential"],
            "transport": transport,
        }
        for transport in ("udp", "tcp")
    ]


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
