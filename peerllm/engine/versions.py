"""Which releases of torch and transformers this engine is tested with. Imports neither."""

from __future__ import annotations

from importlib import metadata

from peerllm.protocol.errors import EngineError

RANGES = {"torch": ((2, 11), (2, 15)), "transformers": ((5, 17), (6, 0))}
"""From the first release to before the second."""


def check_versions() -> None:
    """Raises EngineError when a package is missing or not within `RANGES`, with what to install."""
    for package, (first, last) in RANGES.items():
        wanted = f"{package}>={_words(first)},<{_words(last)}"
        try:
            found = metadata.version(package)
        except metadata.PackageNotFoundError:
            raise EngineError(f"{package} is not installed; install {wanted!r}") from None
        if not first <= release_of(found) < last:
            raise EngineError(f"{package} {found} is installed; this release works with {wanted!r}")


def release_of(version: str) -> tuple[int, int]:
    """(major, minor) of a version such as `2.11.0+cu130` or `5.24.0.dev0`."""
    major, _, rest = version.partition(".")
    minor = rest.partition(".")[0]
    digits = "".join(character for character in minor if character.isdigit())
    return int(major), int(digits or 0)


def _words(release: tuple[int, int]) -> str:
    return f"{release[0]}.{release[1]}"
