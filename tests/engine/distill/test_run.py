"""Whole runs of a tiny target on the CPU."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from peerllm.engine.distill import checkpoint
from peerllm.engine.distill.folder import export_hf
from peerllm.engine.distill.options import Settings
from peerllm.engine.distill.prompts import encode, is_held_out
from peerllm.engine.distill.run import Distillation
from peerllm.engine.distill.student import trained_parameters
from peerllm.engine.distill.training import Trainer
from peerllm.engine.engine import Engine
from peerllm.models.drafts import check_draft, read_draft
from peerllm.models.tokenizer import Tokenizer
from peerllm.protocol.errors import BadRequest, ModelError, ModelMismatch
from peerllm.protocol.identity import LayerRange
from tests.engine.distill.conftest import QUICK, make_target
from tests.engine.pairs import GREEDY, Pair


@pytest.fixture(scope="module")
def finished(target, tmp_path_factory):
    """A run that is done, and its folder, for tests that look at it or copy it."""
    out = tmp_path_factory.mktemp("finished") / "out"
    settings = Settings(target=str(target), out=out, slots=32, evaluation_prompts=1, device="cpu")
    run = Distillation(settings, {**QUICK, "tokens": 300}, say=lambda _: None, progress=lambda *_: None)
    assert run.run()
    return run, out


def figures(state, name: str, at: int) -> dict:
    return state.reports[at]["evaluations"][name]


def test_a_draft_of_a_minute_is_better_than_it_began_and_drafts_for_its_target(distil, target, tmp_path):
    """The distillation that CI runs: a tiny target, the whole way from the command's options to tokens per round."""
    plot, exported = tmp_path / "run.svg", tmp_path / "hf"
    wishes = {"tokens": 10_000, "learning_rate": 4e-3}
    run, lines = distil(wishes=wishes, slots=64, evaluation_prompts=30, plot=plot, export_hf=exported)
    assert run.run()
    state = checkpoint.load_state(tmp_path / "out")
    assert state.is_done and state.made >= 10_000 and state.trained >= 2.5 * state.made
    divergences = [report["divergence"] for report in state.reports if report["divergence"]]
    before, after = figures(state, "held out, greedy", 0), figures(state, "held out, greedy", -1)
    assert after["agreement"] > before["agreement"] + 0.05
    assert after["per_round"]["8"] > before["per_round"]["8"] + 0.05
    assert divergences[-1] < 2.0, "of 4.5 at the beginning"
    text = "\n".join(lines)
    for words in ("tokens of answers made", "agreement", "K=8", "own stop", "160 ms round trip", "Cost on a CPU"):
        assert words in text
    # What it promised is what rounds with it give, on answers that it was not trained on.
    out = tmp_path / "out"
    check_draft(out)
    answers = [sample for sample in state.held_out if sample.temperature == 0][:10]
    pair = Pair.load(target, 1, layers=3, context=128, draft=f"model:{out}")
    rounds = tokens = 0
    for sample in answers:
        made = pair.generate(sample.prompt(), sample.answer_tokens, 8, GREEDY)
        assert made.tokens == sample.tokens[sample.start :].tolist()
        rounds, tokens = rounds + made.rounds, tokens + sample.answer_tokens
    assert tokens / rounds > before["per_round"]["8"]
    # A card, a picture, and a model that transformers loads.
    card = (out / "README.md").read_text()
    assert "begun from its layers 0, 2" in card and state.identity.config in card
    assert plot.read_text().startswith("<svg") and "agreement" in plot.read_text()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    whole = AutoModelForCausalLM.from_pretrained(str(exported), dtype=torch.float32)
    assert whole.config.num_hidden_layers == 2
    prompt = answers[0].prompt()
    assert AutoTokenizer.from_pretrained(str(exported)).decode(prompt)
    with torch.inference_mode():
        logits = whole(torch.tensor([prompt])).logits[0, -1][torch.tensor(state.tokens)]
        drafter = Engine.load(target, LayerRange(0, 1), context=128, draft=f"model:{out}").drafter
        ours = drafter.propose(0, prompt, 1, 0.0, GREEDY).candidates[0]
    assert state.tokens[int(logits.argmax())] == ours


def test_a_stretch_that_is_stopped_leaves_a_usable_draft_and_the_next_goes_on_from_it(distil, target, tmp_path):
    stopping: list[int] = []
    run, _ = distil(is_stopping=lambda: bool(stopping))
    step = run.run.__self__._train

    def train(wave):
        if run.state.steps > 1:
            stopping.append(1)
        step(wave)

    run._train = train
    assert not run.run()
    out = tmp_path / "out"
    first = checkpoint.load_state(out)
    assert not first.is_done and 0 < first.made < 2000 and 0 < first.progress() < 1
    check_draft(out)
    Engine.load(target, LayerRange(0, 1), context=64, draft=f"model:{out}")
    again, lines = distil(resume=True)
    assert "stretch 2" in (again.run() and lines[0])
    second = checkpoint.load_state(out)
    assert second.is_done and second.stretches == 2
    assert second.steps > first.steps and second.made > first.made and second.seconds > first.seconds
    assert second.tokens == first.tokens and second.next_number > first.next_number
    # The prompts that judge are the same in both stretches.
    assert [s.tokens.tolist() for s in second.unseen] == [s.tokens.tolist() for s in first.unseen]
    assert len(list((out / checkpoint.FOLDER).glob("*.safetensors"))) == 1


def test_weights_and_moments_come_back_from_a_checkpoint(distil, finished, tmp_path):
    run, out = finished
    shutil.copytree(out, tmp_path / "out")
    again, _ = distil(wishes={"tokens": 300}, resume=True)
    again._prepare()
    ours, theirs = trained_parameters(run._trainer.student), trained_parameters(again._trainer.student)
    for name, parameter in ours.items():
        assert torch.equal(parameter, theirs[name])
        old = run._trainer.optimiser.state[parameter]
        new = again._trainer.optimiser.state[theirs[name]]
        for moment in ("exp_avg", "exp_avg_sq"):
            assert torch.allclose(old[moment], new[moment], rtol=0.01, atol=1e-12)
        assert float(old["step"]) == float(new["step"]) == run.state.steps


def test_a_run_keeps_its_recipe_its_target_and_its_folder(distil, finished, tmp_path):
    shutil.copytree(finished[1], tmp_path / "out")
    with pytest.raises(BadRequest, match="--resume"):
        distil()
    with pytest.raises(BadRequest, match="begun with layers 2"):
        distil(wishes={"tokens": 300, "layers": 1, "init_from": None}, resume=True)
    other = make_target(tmp_path / "other", seed=4)
    with pytest.raises(ModelMismatch, match="another target"):
        distil(wishes={"tokens": 300}, target=str(other), resume=True)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").touch()
    with pytest.raises(BadRequest, match="not empty"):
        distil(out=tmp_path / "full")


def test_prompts_of_a_file_are_asked_and_some_of_them_are_held_out(distil, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(f"{word} {place}" for word in ("the", "a", "one") for place in range(20)))
    run, _ = distil(prompts=file, wishes={"tokens": 600})
    assert run.run()
    asked = {run.target.tokenizer.decode(sample.prompt()) for sample in run._pool}
    assert any("the 1" in words for words in asked)
    held = {tuple(sample.prompt()) for sample in run.state.held_out}
    assert held and not held & {tuple(sample.prompt()) for sample in run._pool}
    file.write_text("another prompt")
    with pytest.raises(BadRequest, match="other prompts"):
        distil(prompts=file, wishes={"tokens": 600}, resume=True)


def test_a_disk_that_fills_while_it_runs_costs_no_draft_that_was_there(distil, tmp_path, monkeypatch):
    import safetensors.torch

    run, lines = distil(wishes={"tokens": 600})
    real = run._report
    reports = []

    def report(**options):
        if reports:

            def full(tensors, path, metadata=None):
                Path(path).write_bytes(b"half a file")
                raise OSError(28, "No space left on device")

            monkeypatch.setattr(safetensors.torch, "save_file", full)
        reports.append(1)
        real(**options)

    run._report = report
    with pytest.raises(ModelError, match="No space left on device"):
        run.run()
    out = tmp_path / "out"
    assert any("WARNING" in line for line in lines)
    check_draft(out)
    assert checkpoint.load_state(out).steps == 0, "the checkpoint before is whole"
    assert not [path for path in out.rglob("*") if path.name.endswith(".half")]


def test_a_disk_without_room_is_said_before_anything_is_loaded(distil, monkeypatch):
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1 << 20))
    with pytest.raises(ModelError, match="MiB are needed"):
        distil()


@pytest.mark.parametrize(
    ("options", "wishes", "words"),
    [
        ({}, {"layers": 9, "init_from": None}, "--layers is from 1 to 3"),
        ({}, {"init_from": (0, 7)}, "from 0 to 2"),
        ({}, {"init_from": (0, 1, 2)}, "names 3 layers"),
        ({}, {"vocab_top": 0}, "--vocab-top"),
        ({}, {"temperatures": (3.0,)}, "--temperatures"),
        ({}, {"prompt_tokens": 4}, "leaves no words"),
        ({}, {"answer_tokens": 5000}, "do not fit the target's context"),
        ({"device": "cuda:99"}, {}, "--device"),
        ({"dtype": "float8"}, {}, "--dtype"),
        ({"prompts": Path("/nowhere.txt")}, {}, "cannot be read"),
    ],
)
def test_what_cannot_work_is_said_at_once(distil, options, wishes, words):
    with pytest.raises((BadRequest, ModelError), match=words):
        distil(wishes=wishes, **options)


def test_a_target_without_a_chat_template_needs_a_file_of_prompts(distil, tmp_path):
    bare = make_target(tmp_path / "bare", has_chat_template=False)
    with pytest.raises(ModelError, match="--prompts"):
        distil(target=str(bare))
    file = tmp_path / "prompts.txt"
    file.write_text("the tide\nthe moon\n" * 5)
    run, _ = distil(target=str(bare), prompts=file, wishes={"tokens": 200})
    assert run.run()


def test_a_target_whose_answers_never_end_is_refused(distil, tmp_path):
    endless = make_target(tmp_path / "endless")
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        values = json.loads((endless / name).read_text())
        for key in ("eos_token_id", "eos_token"):
            values.pop(key, None)
        (endless / name).write_text(json.dumps(values))
    with pytest.raises(ModelError, match="eos_token_id"):
        distil(target=str(endless))


def test_an_export_into_a_folder_with_something_in_it_is_refused(finished, target, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "something").touch()
    with pytest.raises(ModelError, match="not empty"):
        export_hf(finished[1], target, tmp_path / "there")


def test_a_tied_target_stores_no_head_and_an_untied_one_its_rows(distil, finished, tmp_path):
    from peerllm.models.checkpoint import Checkpoint

    assert read_draft(finished[1]).is_head_stored
    assert Checkpoint.open(finished[1]).shape("draft.head.weight") == (200, 64)
    tied = make_target(tmp_path / "tied", is_tied=True)
    run, _ = distil(target=str(tied), out=tmp_path / "tied-out", wishes={"tokens": 200})
    run.run()
    assert not read_draft(tmp_path / "tied-out").is_head_stored
    names = Checkpoint.open(tmp_path / "tied-out").names()
    assert not {name for name in names if "head" in name or "embed" in name}
    Engine.load(tied, LayerRange(0, 1), context=64, draft=f"model:{tmp_path / 'tied-out'}")


def test_ctrl_c_ends_the_command_with_a_draft_and_resume_ends_it_well(target, tmp_path):
    out = tmp_path / "out"
    options = [f"--{name.replace('_', '-')}={value}" for name, value in QUICK.items() if name != "tokens"]
    command = [
        *(
            sys.executable,
            "-m",
            "peerllm",
            "distill",
            "--target",
            str(target),
            "--out",
            str(out),
            "--slots",
            "32",
            "--device",
            "cpu",
        ),
        *("--evaluation-prompts", "4", "--threads", "1", "--resume", *options),
    ]
    with subprocess.Popen(
        [*command, "--tokens", "100k"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            deadline = time.monotonic() + 90
            while not (out / "training" / "state.json").exists():
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
            os.kill(process.pid, signal.SIGINT)
            said = process.communicate(timeout=60)[0]
        finally:
            process.kill()
    assert process.returncode == 3, said
    assert "Stopping here." in said and "--resume goes on" in said
    check_draft(out)


def test_hours_are_kept_and_nothing_is_trained_once_they_are_over(distil, tmp_path, monkeypatch):
    seen = []
    step = Trainer.step

    def watched(self, samples, progress, number=0):
        seen.append(progress)
        return step(self, samples, progress, number)

    monkeypatch.setattr(Trainer, "step", watched)
    run, _ = distil(wishes={"tokens": None, "hours": 20 / 3600}, clock=lambda: float(len(seen)))
    assert run.run()
    assert checkpoint.load_state(tmp_path / "out").is_done
    assert seen == [number / 20 for number in range(20)], "a second a step"


def test_hours_that_are_over_before_the_first_step_are_an_error(distil):
    ticks = itertools.count(step=100)
    run, _ = distil(wishes={"tokens": None, "hours": 60 / 3600}, clock=lambda: float(next(ticks)))
    with pytest.raises(BadRequest, match="before the first step"):
        run.run()


def test_what_was_trained_is_safe_before_it_is_measured(distil, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("peerllm.engine.distill.gain.measure_times", interrupted)
    run, _ = distil()
    with pytest.raises(KeyboardInterrupt):
        run.run()
    state = checkpoint.load_state(tmp_path / "out")
    assert state.steps > 0 and state.is_done


def test_a_second_process_is_refused_the_folder(distil, tmp_path):
    code = (
        "import sys, pathlib; from peerllm.engine.distill import checkpoint; checkpoint.lock(pathlib.Path(sys.argv[1]))"
    )
    code += "; print('held', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "out")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(ModelError, match="another process"):
            distil()
        other.stdin.close()
    distil()


def test_what_a_killed_run_left_before_its_first_checkpoint_is_in_nobodys_way(distil, tmp_path):
    (tmp_path / "out" / "training").mkdir(parents=True)
    for name in (".model.safetensors.half", ".writable", "training/.step-0.safetensors.half"):
        (tmp_path / "out" / name).touch()
    distil()


def test_prompts_that_are_all_held_out_are_an_error_before_the_run(distil, tmp_path, target):
    tokenizer = Tokenizer.load(target)
    words = next(each for each in ("moon", "tide", "a", "hi", "b", "c") if is_held_out(encode(tokenizer, each), 2))
    (tmp_path / "prompts.txt").write_text(words)
    run, _ = distil(wishes={"held_out_every": 2}, prompts=tmp_path / "prompts.txt")
    with pytest.raises(ModelError, match="held out to judge"):
        run.run()


def test_a_run_that_is_done_is_only_measured_again(distil, tmp_path):
    run, _ = distil(wishes={"tokens": 300})
    assert run.run()
    before = checkpoint.load_state(tmp_path / "out")
    again, lines = distil(wishes={"tokens": 300}, resume=True)
    assert again.run() and any("run is done" in line for line in lines)
    after = checkpoint.load_state(tmp_path / "out")
    assert (after.made, after.steps, after.trained) == (before.made, before.steps, before.trained)


@pytest.mark.parametrize(
    ("field", "value"),
    [("tokens", []), ("tokens", "x"), ("recipe", None), ("made", "x"), ("steps", None), ("reports", 7), ("seconds", -1),
     ("held_out", [[[1, 2], -5, 0.0, 1]]), ("file", "step-99999.safetensors")],
)  # fmt: skip
def test_a_damaged_state_is_an_error_at_once(finished, distil, tmp_path, field, value):
    shutil.copytree(finished[1], tmp_path / "out")
    path = tmp_path / "out" / "training" / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    with pytest.raises(ModelError):
        distil(wishes={"tokens": 300}, resume=True)
