"""How fast answers are made and learnt from: `python3 -m peerllm.engine.distill.bench`. Under a minute on a GPU.

Random weights of a named shape, so no model is needed. Answers end at random lengths and slots are filled again, as in
a distillation; the parts of a step are timed by the device's own clock. Needs torch and transformers alone.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch

from peerllm.engine.batch import MOST_SLOTS, BatchDecoder
from peerllm.engine.bench import Timer
from peerllm.engine.benching import profile
from peerllm.engine.codec import DTYPES
from peerllm.engine.distill.answers import Sample
from peerllm.engine.distill.options import MOST_COST, Recipe, default_init
from peerllm.engine.distill.student import make_student
from peerllm.engine.distill.training import Trainer
from peerllm.engine.runner import GraphPool
from peerllm.engine.shapes import NAMES, named_config, random_slice
from peerllm.engine.slice import ModelSlice
from peerllm.protocol.identity import LayerRange

_SHARED = 31
"""Tokens that every prompt begins with: SmolLM2's system prompt."""
_PROMPT = 24
"""Tokens of a prompt's own."""


def generate(decoder: BatchDecoder, seconds: float, answer: int, chance: random.Random) -> dict[str, float]:
    """Answers of random lengths up to `answer` for so many seconds, every slot filled again when it is idle."""
    vocabulary = decoder.part.shape.vocabulary
    number, drawn, windows = 0, 0, 0
    began: float | None = None
    while began is None or time.perf_counter() - began < seconds:
        slots = decoder.idle()
        prompts = [[*decoder.shared, *(chance.randrange(vocabulary) for _ in range(_PROMPT))] for _ in slots]
        lengths = [len(prompt) + chance.randint(max(1, answer // 8), answer) for prompt in prompts]
        decoder.begin(
            slots,
            prompts,
            temperatures=[(0.0, 0.0, 0.8, 1.0)[(number + index) % 4] for index in range(len(slots))],
            seeds=[number + index for index in range(len(slots))],
            lengths=lengths,
        )
        number += len(slots)
        if began is None:
            # The first answers all begin together; the count starts when the slots are spread out.
            for _ in range(max(1, answer // 16)):
                decoder.run()
            began = time.perf_counter()
            continue
        before = int(decoder._lengths[decoder._is_running].sum())
        running = decoder._is_running.copy()
        ended = decoder.run()
        drawn += int(decoder._lengths[running].sum()) - before
        # A prompt's own tokens take a step each and are none of the answer.
        drawn -= _PROMPT * len(ended)
        windows += 1
    elapsed = time.perf_counter() - began
    return {"tokens_per_second": drawn / elapsed, "seconds": elapsed, "windows": windows}


def parts(decoder: BatchDecoder, timer: Timer, context: int) -> dict[str, float]:
    """Milliseconds of a step's parts, all slots `context` rows long."""
    pool = GraphPool(decoder.part.device)
    decoder._cache.positions.fill_(context)
    decoder._state.temperatures.fill_(0.8)
    static, slots = decoder.static, decoder.slots
    works: dict[str, Callable[[], Any]] = {
        "layers": partial(static.forward, 1, slots),
        "head": partial(static.logits, slots, decoder._logits),
        "choice, all sampling": partial(decoder._chooser.choose, decoder._logits, static.slots[:slots], decoder._state),
        "whole step": decoder._advance,
    }
    return {name: timer.device_milliseconds(pool.capture(work).replay) for name, work in works.items()}


def train(part: ModelSlice, timer: Timer, options: argparse.Namespace, chance: random.Random) -> dict[str, float]:
    """Tokens a second of training steps on random answers."""
    shape = part.shape
    layers = max(1, min(4, int(MOST_COST * shape.layers)))
    recipe = Recipe(
        layers=layers,
        init_from=default_init(layers, shape.layers),
        vocab_top=min(16384, shape.vocabulary),
        step_tokens=options.step_tokens,
    )
    length = _SHARED + _PROMPT + options.answer
    with torch.inference_mode(False):
        student = make_student(part, recipe, list(range(recipe.vocab_top)))
        trainer = Trainer(student, part, recipe, length=length, micro_tokens=options.step_tokens)
        part.prepare(length)
        values = numpy.array([chance.randrange(shape.vocabulary) for _ in range(length)], dtype=numpy.int32)
        samples = [Sample(values, _SHARED + _PROMPT, 0.0, 0) for _ in range(max(1, options.step_tokens // length))]
        milliseconds = timer.milliseconds(lambda: trainer.step(samples, 0.5))
    answered = sum(sample.answer_tokens for sample in samples)
    return {"ms_per_step": milliseconds, "answer_tokens_per_second": answered / milliseconds * 1e3}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python3 -m peerllm.engine.distill.bench", description=__doc__.splitlines()[0]
    )
    has_gpu = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if has_gpu else "cpu")
    parser.add_argument("--dtype", default="float16" if has_gpu else "float32", choices=tuple(DTYPES))
    parser.add_argument("--shape", default="smollm2-135m" if has_gpu else "qwen2.5-tiny", choices=NAMES)
    parser.add_argument("--slots", type=int, default=MOST_SLOTS if has_gpu else 16)
    parser.add_argument("--answer", type=int, default=256, help="tokens of the longest answer")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--step-tokens", type=int, default=32768 if has_gpu else 1024)
    parser.add_argument("--path", default="auto", choices=("auto", "graph", "fused"))
    parser.add_argument("--json", action="store_true", help="figures as one object")
    parser.add_argument(
        "--profile", type=Path, metavar="FILE", help="write a trace of steps; prints the ten largest kernels"
    )
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    chance = random.Random(0)
    config = named_config(options.shape)
    part = random_slice(config, LayerRange(0, config.num_hidden_layers), dtype=DTYPES[options.dtype], device=device)
    began = time.perf_counter()
    decoder = BatchDecoder.fitting(
        part,
        slots=options.slots,
        capacity=_SHARED + _PROMPT + options.answer + 1,
        stops=[],
        shared=[7 * index % config.vocab_size for index in range(_SHARED)],
        path=options.path,
    )
    captured = time.perf_counter() - began
    timer = Timer(device, 5)
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "shape": options.shape,
        "dtype": options.dtype,
        "slots": decoder.slots,
        "path": type(decoder.static).__name__,
        "compile_and_capture_seconds": captured,
        "generating": generate(decoder, options.seconds, options.answer, chance),
    }
    with torch.inference_mode():
        found["step_ms"] = parts(decoder, timer, _SHARED + _PROMPT + options.answer // 2)
    if options.profile is not None:
        for line in profile(options.profile, device, decoder.run):
            # JSON has standard output to itself.
            print(line, file=sys.stderr if options.json else sys.stdout)
    del decoder
    found["training"] = train(part, timer, options, chance)
    if options.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        if isinstance(value, dict):
            print(f"{name}: " + ", ".join(f"{key} {number:,.3f}" for key, number in value.items()))
        else:
            print(f"{name}: {value:.2f}" if isinstance(value, float) else f"{name}: {value}")


if __name__ == "__main__":
    main()
