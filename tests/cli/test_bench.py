"""`peerllm bench`: what it refuses before it begins."""

from __future__ import annotations

import pytest

from peerllm.cli import bench_e2e
from peerllm.cli import main as cli


@pytest.mark.parametrize("rtt", ["-5", "nan", "inf", "1e9"])
@pytest.mark.parametrize("what", ["link", "e2e"])
def test_a_round_trip_is_a_length_of_time(what: str, rtt: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", what, f"--rtt={rtt}"])
    assert ended.value.code == 2
    assert "argument --rtt: a round trip is a number of milliseconds" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["link", "--tokens", "3,4"], "--tokens is an option of bench e2e, not of bench link"),
        (["--samples=3", "e2e"], "--samples is an option of bench link, not of bench e2e"),
        (["e2e", "--loopback"], "--loopback is an option of bench link, not of bench e2e"),
    ],
)
def test_an_option_of_the_other_bench_is_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", *words]) == 1
    assert said in capsys.readouterr().err


def test_which_bench_has_to_be_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["bench"])
    assert "{link,e2e}" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--dtype", "float16", "--devices", "cpu"],
            "this machine cannot compute in float16; it can in float32, bfloat16",
        ),
        (["--devices", "cpu,cuda:99"], "this machine has no device cuda:99; it has "),
        (["--draft-device", "cuda:99"], "this machine has no device cuda:99; it has "),
        (["--shape", "huge"], "--shape 'huge' is not one of "),
        (["--shape", "smollm2-135m", "--draft-shape", "qwen2.5-tiny"], "--shape smollm2-135m is of the family llama"),
        (["--threads", "0"], "--threads is a number from 1 up"),
        (["--draft-length", "99"], "--draft-length is from 0 to "),
        (["--context", "128"], "--context 128 does not hold the prompt and an answer of 512 tokens"),
    ],
)
def test_what_this_machine_cannot_do_is_one_line_before_anything_is_planted(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_e2e, "stage", None)
    assert cli.main(["bench", "e2e", *words]) == bench_e2e.EXIT_USAGE == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"peerllm: {said}")


@pytest.mark.parametrize("option", ["--devices", "--draft-device"])
@pytest.mark.parametrize("words", ["", "cpu,", "gpu", "cuda:", "cuda:0 "])
def test_a_device_has_a_name(option: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "e2e", f"{option}={words}"])
    assert ended.value.code == 2
    assert f"argument {option}" in (last := capsys.readouterr().err.splitlines()[-1])
    assert "a device is cpu, or cuda:0 and so on; got '" in last


def test_answers_too_short_for_a_speed_have_no_average() -> None:
    assert bench_e2e._mean([None, None]) is None
    assert bench_e2e._mean([None, 3.0, 4.0]) == 3.5
    assert bench_e2e._summary(2, None, 3) == "Answers of 2 tokens: – tokens/s on average of 3."
    assert bench_e2e._summary(64, 3.5, 3) == "Answers of 64 tokens: 3.50 tokens/s on average of 3."
