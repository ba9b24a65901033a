"""TURN credentials that end by themselves: coturn's `use-auth-secret` scheme (draft-uberti-behave-turn-rest-00)."""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peerllm_signaling import limits


@dataclass(frozen=True)
class TurnServers:
    """`urls` as browsers write them (`turn:host:port?transport=udp`); `secret` is shared with the TURN server."""

    urls: tuple[str, ...]
    secret: bytes

    @classmethod
    def from_file(cls, urls: list[str], path: Path) -> TurnServers:
        """The secret is the file's first line.

        Raises:
            OSError, ValueError: the file cannot be read, or it is empty.
        """
        lines = path.read_bytes().splitlines()
        if not lines or not lines[0].strip():
            raise ValueError(f"{path} holds no secret")
        return cls(tuple(urls), lines[0].strip())

    def credentials(self, unix_time: float) -> dict[str, Any]:
        """For one pair. The user name is a time and a random number: it says nothing of who uses it."""
        username = f"{int(unix_time + limits.TURN_SECONDS)}:{secrets.token_hex(8)}"
        # SHA-1 is what coturn's scheme has; as a MAC it is not known to be broken.
        mac = hmac.new(self.secret, username.encode(), hashlib.sha1).digest()
        return {
            "urls": list(self.urls),
            "username": username,
            "credential": base64.b64encode(mac).decode(),
            "seconds": int(limits.TURN_SECONDS),
        }
