"""The command line as a whole: start-up, usage, errors."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from peerllm import __version__
from peerllm.cli import main as cli
from peerllm.protocol.errors import PeerAway

HEAVY = (
    "torch", "transformers", "aiortc", "aioice", "aiohttp", "asyncio", "structlog", "cbor2", "uvloop", "numpy",
    "huggingface_hub", "cryptography",
)  # fmt: skip


def modules_of(*words: str) -> set[str]:
    """What a process has imported after `peerllm WORDS`."""
    code = (
        "import json, sys\n"
        "from peerllm.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "print('\\n' + json.dumps(sorted(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=20, check=True
    )
    return set(json.loads(result.stdout.splitlines()[-1]))


@pytest.mark.parametrize("words", [["ask", "Hi"], ["chat"], ["status"], ["status", "--json"], ["--help"]], ids=str)
def test_client_commands_import_nothing_heavy(daemon: Any, words: list[str]) -> None:
    more = [] if words == ["--help"] else ["--socket", str(daemon.path)]
    modules = modules_of(*words, *more)
    assert "peerllm.cli.main" in modules
    assert modules.isdisjoint(HEAVY)


def test_only_the_subcommand_that_was_asked_for_is_imported(daemon: Any) -> None:
    modules = modules_of("status", "--socket", str(daemon.path))
    assert "peerllm.cli.status" in modules
    assert not {f"peerllm.cli.{name}" for name in cli.COMMANDS if name != "status"} & modules


@pytest.mark.parametrize("words", [("status",), ("ask", "Hi")], ids=str)
def test_client_commands_start_within_a_fifth_of_a_second(daemon: Any, peerllm: Any, words: tuple[str, ...]) -> None:
    wall, processor = [], []
    for _ in range(5):
        began, used = time.monotonic(), processor_seconds()
        assert peerllm(*words).returncode == 0
        wall.append(time.monotonic() - began)
        processor.append(processor_seconds() - used)
    # Nothing in a start waits for anything, so on a free machine both are the same. What a busy one adds to the wall's
    # clock is not our doing.
    assert min(processor) < 0.2, processor
    assert min(wall) < 1.0, wall


def processor_seconds() -> float:
    """What this process's children have used so far."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_the_version_is_the_packages(peerllm: Any, capsys: Any) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"peerllm {__version__}\n"


@pytest.mark.parametrize("words", [[], ["dance"], ["ask"], ["status", "--dance"], ["ask", "x", "--max-tokens", "y"]])
def test_wrong_usage_exits_with_2(words: list[str], capsys: Any) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == 2
    assert "usage: peerllm" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_every_command_has_its_help(name: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([name, "--help"])
    assert caught.value.code == 0
    assert ("--socket" in capsys.readouterr().out) == (name not in ("bench", "completion", "demo", "distill", "rooms"))


def test_a_prompt_that_is_a_commands_name_is_a_prompt(daemon: Any, peerllm: Any) -> None:
    assert peerllm("ask", "status").stdout == "You said 'status'.\n"


@pytest.mark.parametrize("words", [("ask", "Hi"), ("chat",), ("status",)], ids=str)
def test_without_a_daemon_the_message_says_what_to_do(peerllm: Any, words: tuple[str, ...]) -> None:
    result = peerllm(*words, stdin=subprocess.DEVNULL)
    assert result.returncode == 1
    assert str(peerllm.path) in result.stderr
    assert "peerllm up" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_stale_socket_is_no_daemon(peerllm: Any, tmp_path: Path) -> None:
    import socket

    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(tmp_path / "s"))
    result = peerllm("status")
    assert result.returncode == 1
    assert "No peerllm daemon" in result.stderr


def test_an_error_is_one_line_without_control_characters(monkeypatch: Any, capsys: Any) -> None:
    def fail(words: list[str]) -> int:
        raise PeerAway("the peer said \x1b[2J")

    monkeypatch.setattr(cli, "_run", fail)
    assert cli.main(["status"]) == 1
    assert capsys.readouterr().err == "peerllm: the peer said \N{REPLACEMENT CHARACTER}[2J\n"
