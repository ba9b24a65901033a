"""The one rule of the layout: imports run one way (docs/architecture.md)."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "peerllm"

ALLOWED = {
    "cli": {"daemon", "api", "rooms", "link", "decoding", "protocol", "telemetry", "engine", "models"},
    "daemon": {"api", "rooms", "link", "decoding", "protocol", "telemetry"},
    "api": {"protocol", "telemetry"},
    "rooms": {"protocol", "telemetry"},
    "link": {"protocol", "telemetry"},
    "decoding": {"protocol"},
    "protocol": set(),
    "telemetry": {"protocol"},
    "engine": {"models", "protocol"},
    "models": {"protocol"},
}
PLAIN_PROTOCOL = {"errors", "limits", "requests", "identity", "tensors", "pipe", "fields"}
"""The modules of protocol that need nothing but the standard library: all that engine and models may import."""
TORCH = {"torch", "transformers", "tokenizers", "safetensors", "triton", "gguf"}
DAEMON_ONLY = {"aiortc", "aioice", "aiohttp", "uvloop", "cbor2", "structlog", "spake2"}
IO_MODULES = {"asyncio", "socket", "time", "random", "secrets", "os", "pathlib", "threading", "subprocess", "select"}


def files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imports(path: Path, *, is_top_level_only: bool = False) -> Iterator[tuple[str, int]]:
    """(dotted name, line) of every import; with its members for `from peerllm.x import y`."""
    tree = ast.parse(path.read_text())
    nodes = tree.body if is_top_level_only else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            module = node.module or ""
            if module.count(".") < 2 and module.startswith("peerllm"):
                yield from ((f"{module}.{alias.name}", node.lineno) for alias in node.names)
            else:
                yield module, node.lineno


def imports_of(package: str, libraries: set[str]) -> list[str]:
    """Where `package` imports one of `libraries`, in words."""
    return [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in files(package)
        for name, line in imports(path)
        if name.split(".")[0] in libraries
    ]


def test_every_package_has_its_place_in_the_rule() -> None:
    packages = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert packages == set(ALLOWED)


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_imports_run_one_way(package: str) -> None:
    wrong = []
    for path in files(package):
        for name, line in imports(path):
            parts = name.split(".")
            if parts[0] != "peerllm" or len(parts) < 2 or parts[1] in ("__version__", package):
                continue
            if parts[1] not in ALLOWED[package]:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
            elif package in ("engine", "models") and parts[1] == "protocol" and parts[2] not in PLAIN_PROTOCOL:
                wrong.append(
                    f"{path.relative_to(ROOT)}:{line} imports {name}, which needs more than torch's machine has"
                )
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", sorted(set(ALLOWED) - {"engine", "models"}))
def test_only_engine_and_models_import_torch(package: str) -> None:
    assert not (wrong := imports_of(package, TORCH)), "\n".join(wrong)


@pytest.mark.parametrize("package", ["engine", "models"])
def test_engine_and_models_need_nothing_of_the_daemons(package: str) -> None:
    assert not (wrong := imports_of(package, DAEMON_ONLY)), "\n".join(wrong)


@pytest.mark.parametrize("package", ["decoding", "protocol"])
def test_decoding_and_protocol_do_no_io_and_know_no_clock(package: str) -> None:
    assert not (wrong := imports_of(package, IO_MODULES)), "\n".join(wrong)


def test_no_file_has_grown_beyond_one_sitting() -> None:
    long = [
        f"{path.relative_to(ROOT)}: {count} lines"
        for path in sorted(ROOT.rglob("*.py"))
        if (count := len(path.read_text().splitlines())) > 450
    ]
    assert not long, "\n".join(long)


def test_the_daemon_runs_without_torch_in_its_process() -> None:
    code = (
        "import sys, peerllm.daemon.main\n"
        "sys.exit(', '.join(name for name in ('torch', 'transformers') if name in sys.modules) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr


def test_the_engine_imports_where_only_torch_and_transformers_are() -> None:
    blocked = sorted(DAEMON_ONLY)
    code = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({blocked!r}))\n"
        "import peerllm.engine.worker, peerllm.engine.engine"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
