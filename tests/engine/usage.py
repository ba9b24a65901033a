"""What a command's line of arguments is refused with."""

from __future__ import annotations

from collections.abc import Callable

import pytest


def usage_error(main: Callable[[list[str]], int], arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The last line that `main` prints before it ends as argparse does, with status 2."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]
