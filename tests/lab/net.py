"""A wide-area network on one machine: host a – NAT a – wire – NAT b – host b, and a public host on the wire.

Everything lives in network namespaces that the lab makes and removes; addresses are 203.0.113.0/24 and
2001:db8::/64 outside the NATs and 10/8 inside.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).parents[2]
PUBLIC = "203.0.113.1"
PUBLIC_OTHER = "203.0.113.2"
"""A second address of the public host, for whoever asks which kind a NAT is."""
TOOLS = ("ip", "nft", "ethtool")
PING_SECONDS = 0.05
NATS = ("none", "port-preserving", "symmetric", "udp-blocked")

_counter = itertools.count()

_MASQUERADE = 'oifname "out" masquerade;'
_SYMMETRIC = f"""
    oifname "out" ip daddr {PUBLIC} udp dport 8080 masquerade to :1024-21999 fully-random;
    oifname "out" ip daddr {PUBLIC} meta l4proto {{ tcp, udp }} masquerade to :22000-43999 fully-random;
    oifname "out" meta l4proto {{ tcp, udp }} masquerade to :44000-65535 fully-random;
    {_MASQUERADE}"""
"""Ports by chance, and never one for two of: a STUN server, the public host's other ports, another peer. Without that
a peer meets, once in 32,000 pairs, the port that STUN saw, and the pair is direct."""


def missing() -> str | None:
    """Why there can be no lab here, in words; None when there can."""
    if os.geteuid() != 0:
        return "the lab makes network namespaces, which needs root"
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    return f"the lab needs {', '.join(absent)} (Debian: iproute2, nftables, ethtool)" if absent else None


@dataclass
class Host:
    """A namespace with one address (and one of IPv6, outside NATs)."""

    name: str
    namespace: str
    device: str
    address: str
    gateway: str | None


class Lab:
    """
    Args:
        nat: of host a and of host b; one of NATS.
        rtt_ms: between a and b; each of them is half as far from the public host.
        loss, jitter_ms, rate_mbit, buffer_ms: of what a and b send; see `wire.Shape`.
        ipv6: hosts without a NAT get an address of IPv6 too; "only" leaves out that of IPv4.
    """

    def __init__(
        self,
        *,
        nat: tuple[str, str] = ("none", "none"),
        rtt_ms: float = 80.0,
        loss: float = 0.0,
        jitter_ms: float = 0.0,
        rate_mbit: float = 0.0,
        buffer_ms: float = 100.0,
        ipv6: str = "",
    ) -> None:
        self._prefix = f"plab{os.getpid()}x{next(_counter)}"
        self._nat = nat
        self._ipv6 = ipv6
        self._shape = {
            "delay": rtt_ms / 4000,
            "loss": loss,
            "jitter": jitter_ms / 1000,
            "rate": rate_mbit * 1e6,
            "buffer": buffer_ms / 1000,
        }
        self._namespaces: list[str] = []
        self._processes: list[subprocess.Popen[Any]] = []
        self._wire: subprocess.Popen[str] | None = None
        self.hosts: dict[str, Host] = {}

    # --- Making and removing ------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        _remove_orphans()
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _make(self) -> None:
        wire = self._namespace("w")
        ports = []
        for index, (name, nat) in enumerate(zip("ab", self._nat, strict=True), start=1):
            outside = f"203.0.113.{10 + index}"
            host = self._namespace(name)
            if nat == "none":
                self._pair(host, "eth0", wire, f"w{name}")
                self._address(host, "eth0", outside, index + 10)
                self.hosts[name] = Host(name, host, "eth0", outside, None)
            else:
                box = self._namespace(f"n{name}")
                self._pair(host, "eth0", box, "in")
                self._pair(box, "out", wire, f"w{name}")
                inside, gateway = f"10.{index}.0.2", f"10.{index}.0.1"
                self._ip(host, f"addr add {inside}/24 dev eth0", f"route add default via {gateway}")
                self._ip(box, f"addr add {gateway}/24 dev in", f"addr add {outside}/24 dev out")
                self._make_nat(box, nat)
                self.hosts[name] = Host(name, host, "eth0", inside, gateway)
            ports.append(f"{name}=w{name}")
        public = self._namespace("p")
        self._pair(public, "eth0", wire, "wp")
        self._address(public, "eth0", PUBLIC, 1)
        self._ip(public, f"addr add {PUBLIC_OTHER}/24 dev eth0")
        self.hosts["p"] = Host("p", public, "eth0", PUBLIC, None)
        ports.append("p=wp")
        self._wire = subprocess.Popen(
            ["ip", "netns", "exec", wire, sys.executable, "-m", "tests.lab.wire", *ports],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in "ab":
            self.shape(name, **self._shape)

    def _namespace(self, name: str) -> str:
        full = f"{self._prefix}{name}"
        _run("ip", "netns", "add", full)
        self._namespaces.append(full)
        self._ip(full, "link set lo up")
        # Frames arrive when the wire says so; duplicate address detection would hold IPv6 back for seconds.
        self.sysctl(full, "net.ipv6.conf.all.accept_dad=0", "net.ipv6.conf.default.accept_dad=0")
        return full

    def sysctl(self, namespace: str, *settings: str) -> None:
        for setting in settings:
            _run("ip", "netns", "exec", namespace, "sysctl", "-qw", setting)

    def _ip(self, namespace: str, *commands: str) -> None:
        _run("ip", "-n", namespace, "-batch", "-", stdin="\n".join(commands))

    def _pair(self, one: str, one_device: str, other: str, other_device: str) -> None:
        _run("ip", "link", "add", one_device, "netns", one, "type", "veth", "peer", other_device, "netns", other)
        for namespace, device in ((one, one_device), (other, other_device)):
            self._ip(namespace, f"link set {device} up")
            # A raw socket would see segments of 64 KB, and checksums that nobody has filled in.
            _run(
                *("ip", "netns", "exec", namespace, "ethtool", "-K", device),
                *("rx", "off", "tx", "off", "tso", "off", "gso", "off", "gro", "off"),
            )

    def _address(self, namespace: str, device: str, ipv4: str, number: int) -> None:
        if self._ipv6 != "only":
            self._ip(namespace, f"addr add {ipv4}/24 dev {device}")
        if self._ipv6:
            self._ip(namespace, f"addr add 2001:db8::{number:x}/64 dev {device} nodad")

    def _make_nat(self, box: str, kind: str) -> None:
        self.sysctl(box, "net.ipv4.ip_forward=1")
        blocked = "meta l4proto udp drop" if kind == "udp-blocked" else ""
        rules = f"""
        table ip lab {{
          chain nat {{
            type nat hook postrouting priority 100;
            {_SYMMETRIC if kind == "symmetric" else _MASQUERADE}
          }}
          chain pass {{
            type filter hook forward priority 0; policy drop;
            {blocked}
            iifname "in" accept
            ct state established,related accept
          }}
        }}"""
        _run("ip", "netns", "exec", box, "nft", "-f", "-", stdin=rules)

    def close(self) -> None:
        """Ends every process of the lab's and removes its namespaces."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    with contextlib.suppress(BrokenPipeError):  # the process ended before it had read all
                        stream.close()
        if self._wire is not None:
            if self._wire.stdin is not None:
                self._wire.stdin.close()
            try:
                self._wire.wait(timeout=2)
            except subprocess.TimeoutExpired:
                self._wire.kill()
                self._wire.wait()
            if self._wire.stdout is not None:
                self._wire.stdout.close()
            self._wire = None
        for namespace in self._namespaces:
            subprocess.run(["ip", "netns", "del", namespace], check=False, capture_output=True)
        self._namespaces.clear()

    # --- While it runs ------------------------------------------------------------------------------------------------

    def argv(self, host: str, *command: str) -> list[str]:
        """The command line that runs `command` on a host."""
        return ["ip", "netns", "exec", self.hosts[host].namespace, *command]

    def start(self, host: str, *command: str, **options: Any) -> subprocess.Popen[Any]:
        """A process on a host, which the lab ends."""
        process: subprocess.Popen[Any] = subprocess.Popen(self.argv(host, *command), cwd=ROOT, **options)
        self._processes.append(process)
        return process

    def shape(self, port: str, **changes: Any) -> None:
        """Changes what the wire does with a host's frames: see `wire.Shape`."""
        self._tell({"port": port, **changes})

    def report(self, port: str) -> dict[str, Any]:
        """`p95_wait` in the port's queue, frames and drops since the last report."""
        return self._tell({"port": port, "report": True})

    def _tell(self, command: dict[str, Any]) -> dict[str, Any]:
        if self._wire is None or self._wire.stdin is None or self._wire.stdout is None:
            raise RuntimeError("the lab is not up")
        self._wire.stdin.write(json.dumps(command) + "\n")
        self._wire.stdin.flush()
        answer: dict[str, Any] = json.loads(self._wire.stdout.readline())
        return answer

    def cut(self, port: str) -> None:
        self.shape(port, is_cut=True)

    def restore(self, port: str) -> None:
        self.shape(port, is_cut=False)

    def change_address(self, name: str, step: int = 40) -> None:
        """The host gets another address, as from one Wi-Fi to the next."""
        host = self.hosts[name]
        front, last = host.address.rsplit(".", 1)
        new = f"{front}.{int(last) + step}"
        commands = [f"addr del {host.address}/24 dev {host.device}", f"addr add {new}/24 dev {host.device}"]
        if host.gateway is not None:
            commands.append(f"route add default via {host.gateway}")
        self._ip(host.namespace, *commands)
        host.address = new

    def block_udp(self, name: str, address: str) -> None:
        """The host's NAT lets no UDP through to an address, until `unblock_udp`."""
        rules = f"""
        table ip blocked {{
          chain pass {{ type filter hook forward priority -10; ip daddr {address} meta l4proto udp drop; }}
        }}"""
        _run("ip", "netns", "exec", f"{self._prefix}n{name}", "nft", "-f", "-", stdin=rules)

    def unblock_udp(self, name: str) -> None:
        _run("ip", "netns", "exec", f"{self._prefix}n{name}", "nft", "delete", "table", "ip", "blocked")

    def outside(self, name: str) -> str:
        """The address that the world sees of a host."""
        return f"203.0.113.{11 if name == 'a' else 12}"

    def ping_ms(self, count: int = 5) -> float:
        """The lab's own round trip: the least of `count`."""
        return min(self.pings_ms(count))

    def pings_ms(self, count: int) -> list[float]:
        """The round trip of each of `count` pings from a to b, one every PING_SECONDS; those that are lost are left
        out. Where a NAT hides b it is that to the public host, doubled."""
        target, factor = (self.hosts["b"].address, 1.0) if self._nat[1] == "none" else (PUBLIC, 2.0)
        command = self.argv("a", "ping", "-i", str(PING_SECONDS), "-c", str(count), target)
        words = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return [factor * float(found) for found in re.findall(r" time=([0-9.]+) ms", words)]


def _remove_orphans() -> None:
    """Namespaces of labs whose process was killed before it could remove them."""
    listed = subprocess.run(["ip", "netns", "list"], check=False, capture_output=True, text=True).stdout
    for name in listed.split():
        found = re.fullmatch(r"plab(\d+)x\d+[a-z]+", name)
        if found is not None and not Path(f"/proc/{found[1]}").exists():
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _run(*command: str, stdin: str | None = None) -> None:
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
