"""`peerllm-signaling`: the command."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import resource
import signal
import ssl
import sys
from pathlib import Path

from peerllm_signaling import log
from peerllm_signaling.proxies import parse_networks
from peerllm_signaling.server import ServerConfig, SignalingServer
from peerllm_signaling.turn import TurnServers


def _port(words: str) -> int:
    value = int(words)
    if not 0 <= value < 65536:
        raise argparse.ArgumentTypeError("a port is from 0 to 65535")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="peerllm-signaling",
        description="Where peerllm's daemons find each other by a room number. It learns nothing else.",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=_port, default=8765, help="TCP port; 0 picks one (default: 8765)")
    parser.add_argument(
        "--stun-port",
        type=_port,
        help="UDP port of the STUN responder; it takes the next too (default: --port)",
    )
    parser.add_argument("--no-stun", action="store_true", help="answer no STUN requests")
    parser.add_argument("--tls-cert", type=Path, help="certificate chain, PEM: serve wss://")
    parser.add_argument("--tls-key", type=Path, help="its private key, PEM (default: in the same file)")
    parser.add_argument(
        "--trusted-proxy", action="append", default=[], metavar="NETWORK",
        help="believe X-Forwarded-For from this address or network; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--turn-url", action="append", default=[], metavar="URL",
        help="turn:HOST:PORT?transport=udp and its like, for pairs without a direct path; may be repeated",
    )  # fmt: skip
    parser.add_argument("--turn-secret-file", type=Path, help="the secret shared with the TURN server")
    parser.add_argument("--log-level", choices=log.LEVELS, default="info")
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(argv)
    if bool(options.turn_url) != bool(options.turn_secret_file):
        parser.error("--turn-url and --turn-secret-file go together")
    if options.tls_key and not options.tls_cert:
        parser.error("--tls-key needs --tls-cert")
    try:
        config = ServerConfig(
            host=options.host,
            port=options.port,
            stun_port=options.stun_port,
            has_stun=not options.no_stun,
            tls=_tls(options.tls_cert, options.tls_key),
            trusted_proxies=parse_networks(options.trusted_proxy),
            turn=TurnServers.from_file(options.turn_url, options.turn_secret_file) if options.turn_url else None,
        )
    except (OSError, ValueError) as error:
        parser.error(str(error))
    log.configure(options.log_level)
    _allow_many_connections()
    try:
        return asyncio.run(_run(config))
    except OSError as error:
        sys.stderr.write(f"peerllm-signaling: cannot listen on {config.host}, port {config.port}: {error}\n")
        return 1


def _tls(cert: Path | None, key: Path | None) -> ssl.SSLContext | None:
    if cert is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(cert, key)
    return context


def _allow_many_connections() -> None:
    """Raises the soft limit of open files to the hard one: each connection takes one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _run(config: ServerConfig) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    server = SignalingServer(config)
    await server.start()
    sys.stdout.write(f"peerllm-signaling listening on {server.address}\n")
    sys.stdout.flush()
    log.get().info("started", stun_ports=server.stun_ports, tls=config.tls is not None, turn=config.turn is not None)
    await stop.wait()
    await server.stop()
    log.get().info("stopped")
    return 0
