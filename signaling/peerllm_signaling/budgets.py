"""Token buckets, and a bounded table of them by address."""

from __future__ import annotations

import ipaddress
from collections import OrderedDict
from collections.abc import Hashable


class Bucket:
    """`burst` at once, refilled at `per_minute`."""

    __slots__ = ("_burst", "_left", "_rate", "_when")

    def __init__(self, per_minute: float, burst: float, now: float) -> None:
        self._rate = per_minute / 60
        self._burst = burst
        self._left = burst
        self._when = now

    def take(self, now: float) -> bool:
        """Whether one more is allowed."""
        self._left = min(self._burst, self._left + (now - self._when) * self._rate)
        self._when = now
        if self._left < 1:
            return False
        self._left -= 1
        return True

    def is_full(self, now: float) -> bool:
        """Whether it says no more than a new one would."""
        return self._left + (now - self._when) * self._rate >= self._burst


class Buckets:
    """One bucket for each key; the oldest go first when there are more than `most`."""

    def __init__(self, per_minute: float, burst: float, most: int) -> None:
        self._per_minute = per_minute
        self._burst = burst
        self._most = most
        self._table: OrderedDict[Hashable, Bucket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._table)

    def take(self, key: Hashable, now: float) -> bool:
        bucket = self._table.get(key)
        if bucket is None:
            if len(self._table) >= self._most:
                self._table.popitem(last=False)
            bucket = self._table[key] = Bucket(self._per_minute, self._burst, now)
        else:
            self._table.move_to_end(key)
        return bucket.take(now)

    def forget_full(self, now: float, most: int = 1000) -> None:
        """Drops buckets that are full again, oldest first, at most `most` in one go."""
        for _ in range(most):
            key = next(iter(self._table), None)
            if key is None or not self._table[key].is_full(now):
                return
            del self._table[key]


def address_group(address: str) -> str:
    """What counts as one address: an IPv4 address, or an IPv6 /56 (what one household is given)."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return "unknown"
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            return str(ip.ipv4_mapped)
        return str(ipaddress.ip_network((ip, 56), strict=False))
    return str(ip)
