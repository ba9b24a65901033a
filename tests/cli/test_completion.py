from __future__ import annotations

import subprocess
import sys

import pytest

from peerllm.cli import main as cli
from peerllm.cli.completion import SCRIPTS


def complete(words: list[str]) -> list[str]:
    """What bash offers for the last of `words`, with the script that we print."""
    peerllm = f'peerllm() {{ {sys.executable} -m peerllm "$@"; }}'
    array = " ".join(f"'{word}'" for word in words)
    script = (
        f'{peerllm}\neval "$(peerllm completion bash)"\nCOMP_WORDS=({array}); COMP_CWORD={len(words) - 1}\n'
        '_peerllm\nprintf "%s\\n" "${COMPREPLY[@]}"'
    )
    run = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=30, check=True)
    return run.stdout.split()


def test_bash_completes_commands() -> None:
    assert complete(["peerllm", "sta"]) == ["status"]


@pytest.mark.parametrize("command", ["join", "doctor"])
def test_bash_completes_the_words_of_a_room_code(command: str) -> None:
    found = complete(["peerllm", command, "4127-wal"])
    assert "4127-walnut" in [code.rstrip("-") for code in found]
    assert all(code.startswith("4127-wal") for code in found)


def test_completing_a_code_needs_neither_keys_nor_network() -> None:
    code = (
        "import sys\nfrom peerllm.cli.main import main\nmain(['completion', '--code', '1-z'])\n"
        "sys.exit(', '.join(n for n in ('aiohttp', 'cryptography', 'torch') if n in sys.modules) or 0)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("shell", sorted(SCRIPTS))
def test_every_shell_gets_its_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "join" in script
    assert "@" not in script.replace('"${COMPREPLY[@]}"', "")
