"""One peer's engine: its slice of the target, its sessions, its drafter. One method for each operation of the worker.

In-process and without pipes, so that a test can put two of them face to face. The invariants are design.md's: a
sequence of n committed tokens has n - 1 rows in every cache before a round; row 0 of a block is token n - 1; a block is
taken in whole, and the next round's start says how much of it stays.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from peerllm.engine import codec
from peerllm.engine.chain import AnySlice, SliceChain
from peerllm.engine.drafting.ahead import AheadDrafter
from peerllm.engine.drafting.base import Drafter, NoDrafter
from peerllm.engine.drafting.build import build_drafter
from peerllm.engine.drafting.graph import GraphDrafter
from peerllm.engine.drafting.model import ModelDrafter
from peerllm.engine.machine import indexed
from peerllm.engine.memory import plan_load
from peerllm.engine.plans import cache_positions
from peerllm.engine.results import Drafted, Loaded, Prefilled, Stopwatch, Verified
from peerllm.engine.runner import Runner
from peerllm.engine.running import make_runner
from peerllm.engine.slice import ModelSlice, read_config
from peerllm.engine.weights import WEIGHTS, Progress, load_weights
from peerllm.protocol import limits
from peerllm.protocol.errors import BadRequest, ContextTooLong, EngineError, Overloaded, ProtocolError
from peerllm.protocol.identity import LayerRange
from peerllm.protocol.requests import Sampling


@dataclass(slots=True)
class _Session:
    slot: int
    sampling: Sampling
    tokens: list[int] = field(default_factory=list)
    """What is committed, as far as this engine was told; empty beyond the first slice."""


def _silent(stage: str, fraction: float) -> None:
    pass


class Engine:
    """A loaded slice and its sessions. Not thread-safe: one operation at a time.

    Args:
        part: the slice, with its weights.
        context: positions in a sequence.
        wire_codec: how hidden states are encoded on the wire.
        dtype: the dtype's name, of the weights and of `exact` hidden states.
        slots: sessions at once.
        drafter: on the first slice; None drafts nothing.
        path: one of `running.PATHS`.
    """

    def __init__(
        self,
        part: AnySlice,
        *,
        context: int,
        wire_codec: str,
        dtype: str,
        slots: int = limits.MAX_SESSIONS,
        drafter: Drafter | None = None,
        path: str = "auto",
    ) -> None:
        self.part = part
        self.context = context
        self.drafter: Drafter = NoDrafter() if drafter is None else drafter
        self._codec = wire_codec
        self._dtype = dtype
        capacity = cache_positions(context)
        part.prepare(capacity)
        self._cache = part.make_cache(slots=slots, capacity=capacity)
        clock = time.perf_counter()
        self._runner: Runner = make_runner(part, self._cache, path)
        captured = time.perf_counter() - clock
        self._sessions: dict[int, _Session] = {}
        self._free = list(range(slots))
        self.loaded = Loaded(
            context, part.shape.vocabulary, part.shape.width, seconds={"graphs": captured}, bytes=self._bytes()
        )

    @classmethod
    def load(
        cls,
        folder: Path | str,
        layers: LayerRange,
        *,
        dtype: str = "float32",
        devices: Sequence[str] = ("cpu",),
        draft_device: str | None = None,
        threads: int | None = None,
        context: int | None = None,
        wire_codec: str = "exact",
        draft: str = "none",
        weights: str = "unquantised",
        slots: int | None = None,
        path: str = "auto",
        progress: Progress = _silent,
    ) -> Engine:
        """Reads the slice's weights and gets ready.

        Args:
            folder: a Hugging Face folder with safetensors.
            dtype: a name of `codec.DTYPES`.
            devices: torch devices for the slice, whose layers they share by free memory.
            draft_device: for the draft model, which then drafts on while the slice computes; without it, the slice's
                first, and one after the other.
            context: positions wanted; None is what fits. Never more than the model was made for.
            draft: `none`, `ngram` or `model:PATH`; only the first slice drafts.
            weights: one of `weights.WEIGHTS`, for the layers of the target.
            slots: sequences at once; by default as many as `plan_load` says.
            path: one of `running.PATHS`.

        Raises:
            ModelError: the model, the draft or the layers cannot work, or do not fit the memory.
            BadRequest: an argument that is none of the known ones.
        """
        if dtype not in codec.DTYPES:
            raise BadRequest(f"dtype {dtype[:32]!r} is not one of {', '.join(codec.DTYPES)}", param="dtype")
        if weights not in WEIGHTS:
            raise BadRequest(f"weights {weights[:32]!r} are not one of {', '.join(WEIGHTS)}", param="weights")
        if threads is not None:
            torch.set_num_threads(max(1, threads))
        seconds: dict[str, float] = {}
        clock = time.perf_counter()
        config = read_config(folder)
        plan = plan_load(
            folder,
            layers,
            dtype=dtype,
            devices=devices,
            draft_device=draft_device,
            draft=draft,
            weights=weights,
            slots=slots,
            path=path,
            context=context,
        )
        context, slots = plan.context, plan.slots
        places = [torch.device(each) for each in devices]
        parts = [ModelSlice(config, each, is_embedding_apart=plan.is_embedding_apart) for each in plan.ranges]
        seconds["build"] = time.perf_counter() - clock
        clock = time.perf_counter()
        for each_part, place in zip(parts, places, strict=False):
            load_weights(each_part, folder, codec.DTYPES[dtype], place, progress, weights=weights)
        part = SliceChain(parts) if len(parts) > 1 else parts[0]
        seconds["weights"] = time.perf_counter() - clock
        clock = time.perf_counter()
        drafter: Drafter | None = None
        if part.is_first:
            drafter = build_drafter(
                draft,
                folder,
                vocabulary=part.shape.vocabulary,
                slots=slots,
                context=context,
                dtype=codec.DTYPES[dtype],
                device=draft_device or places[0],
                path=path,
                embedding=None if parts[0].embed is None else parts[0].embed.weight.data,
                progress=progress,
            )
            if draft_device is not None and isinstance(drafter, ModelDrafter | GraphDrafter):
                held = {indexed(place) for place in places[: len(parts)]}
                is_beside = indexed(torch.device(draft_device)) in held
                drafter = AheadDrafter(drafter, draft_device, is_beside=is_beside)
        seconds["draft"] = time.perf_counter() - clock
        progress("getting ready", 0.0)
        engine = cls(part, context=context, wire_codec=wire_codec, dtype=dtype, slots=slots, drafter=drafter, path=path)
        progress("getting ready", 1.0)
        engine.loaded.seconds.update(seconds)
        return engine

    # --- Sessions -----------------------------------------------------------------------------------------------

    def open(self, session: int, sampling: Sampling) -> None:
        """Begins a sequence with empty caches; an older session of that number is forgotten.

        Raises:
            Overloaded: every slot is taken.
        """
        self.close(session)
        if not self._free:
            count = self._cache.slots
            raise Overloaded(
                f"all {count} sequences that this peer can hold are in use; a smaller context makes room for more"
            )
        slot = self._free.pop()
        self._cache.rewind(slot, 0)
        self.drafter.forget(slot)
        self._runner.open(slot, sampling)
        self._sessions[session] = _Session(slot, sampling)

    def close(self, session: int) -> None:
        """Forgets a session; unknown ones are none the worse for it."""
        old = self._sessions.pop(session, None)
        if old is not None:
            self._free.append(old.slot)

    def committed_tokens(self, session: int) -> list[int]:
        return list(self._get(session).tokens)

    # --- Rounds ---------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def prefill(
        self, session: int, start: int, *, tokens: Sequence[int] = (), rows: int = 0, payload: bytes = b""
    ) -> Prefilled:
        """Rows of the prompt: token ids on the first slice, `rows` encoded hidden states elsewhere.

        Raises:
            ContextTooLong: the rows do not fit.
            ProtocolError: rows before `start` are missing, or the payload is not `rows` rows.
            NonFinite: the layers gave hidden states that are not finite.
        """
        state = self._get(session)
        watch = Stopwatch()
        inputs = self._tokens_in(tokens) if self.part.is_first else self._rows_in(payload, rows)
        decode_us = watch.lap_us()
        hidden = self._run(state, start, inputs)
        layers_us = watch.lap_us()
        if self.part.is_first:
            state.tokens[start:] = tokens
        encoded = b"" if self.part.is_last else codec.encode(hidden, self._codec)
        return Prefilled(encoded, decode_us, layers_us, watch.lap_us())

    @torch.inference_mode()
    def draft_block(
        self,
        session: int,
        first: int,
        tokens: Sequence[int],
        draft_length: int,
        min_probability: float = 0.0,
    ) -> Drafted:
        """Drafts after the committed tokens, and runs the slice over the last of them and the candidates.

        Args:
            first: the index of `tokens[0]` in the sequence; what this engine knew from there on is replaced.
            tokens: committed tokens, up to the last.

        Raises:
            ProtocolError: tokens or rows before are missing.
            ContextTooLong: the last committed token is at the context's end.
        """
        state = self._get(session)
        self._require(self.part.is_first, "only the peer with layer 0 drafts")
        self._require(0 <= first <= len(state.tokens), f"tokens from {first} on came; {len(state.tokens)} are here")
        self._check_tokens(tokens)
        state.tokens[first:] = tokens
        self._require(len(state.tokens) > 0, "a block needs one committed token at least")
        start = len(state.tokens) - 1
        if start >= self.context:
            raise ContextTooLong(f"token {start} is beyond the context of {self.context}")
        watch = Stopwatch()
        limit = min(draft_length, limits.MAX_CANDIDATES, self.context - start - 1)
        proposal = self.drafter.propose(state.slot, state.tokens, limit, min_probability, state.sampling)
        draft_us = watch.lap_us()
        draft_on = partial(self._draft_on, state, proposal.candidates, draft_length, min_probability)
        draft_on(is_block_done=False)
        inputs = self._tokens_in([state.tokens[start], *proposal.candidates])
        hidden = self._run(state, start, inputs)
        layers_us = watch.lap_us()
        payload = codec.encode(hidden, self._codec)
        encode_us = watch.lap_us()
        draft_on(is_block_done=True)
        return Drafted(start, proposal.candidates, proposal.probabilities, payload, draft_us, layers_us, encode_us)

    @torch.inference_mode()
    def verify(self, session: int, start: int, candidates: Sequence[int], payload: bytes) -> Verified:
        """Judges a block: its rows `[start, start + len(candidates)]` through the last layers and the head.

        Raises:
            ProtocolError: rows before `start` are missing, the payload is not that many rows, or a candidate is no
                token.
            NonFinite: logits that are not finite.
        """
        state = self._get(session)
        self._require(self.part.is_last, "only the peer with the last layer judges")
        self._check_tokens(candidates)
        watch = Stopwatch()
        inputs = self._rows_in(payload, len(candidates) + 1)
        decode_us = watch.lap_us()
        self._rewind(state, start, len(inputs))
        accepted, next_token = self._runner.verify(state.slot, inputs, list(candidates), start, state.sampling)
        self._cache.advance([state.slot], len(inputs))
        verdict_us = self._runner.verdict_us
        return Verified(accepted, next_token, decode_us, watch.lap_us() - verdict_us, verdict_us)

    def forward(self, session: int, start: int, rows: int, payload: bytes) -> Prefilled:
        """A block's rows through a middle slice. Raises as `prefill`."""
        self._require(not self.part.is_first, "the peer with layer 0 takes tokens, not rows")
        return self.prefill(session, start, rows=rows, payload=payload)

    # --- Inside -----------------------------------------------------------------------------------------------------

    def _draft_on(
        self, state: _Session, candidates: list[int], draft_length: int, min_probability: float, *, is_block_done: bool
    ) -> None:
        """A draft with a device of its own goes on after `candidates`: at once, or beside layers when the block is
        done."""
        if not isinstance(self.drafter, AheadDrafter) or self.drafter.is_beside != is_block_done:
            return
        following = [*state.tokens, *candidates]
        more = min(draft_length, limits.MAX_CANDIDATES, self.context - len(following) - 1)
        self.drafter.go_on(state.slot, following, more, min_probability, state.sampling)

    def _run(self, state: _Session, start: int, inputs: torch.Tensor) -> torch.Tensor:
        """Hidden states `[rows, width]` of `inputs` (`[rows]` tokens or `[rows, width]`) at `start`."""
        rows = len(inputs)
        self._rewind(state, start, rows)
        if rows == 0:
            return torch.empty(0, self.part.shape.width, dtype=self.part.dtype, device=self.part.device)
        hidden = self._runner.forward(state.slot, inputs)
        self._cache.advance([state.slot], rows)
        return hidden

    def _rewind(self, state: _Session, start: int, rows: int) -> None:
        """The slot is ready for rows `[start, start + rows)`."""
        held = self._cache.lengths[state.slot]
        self._require(start <= held, f"rows from {start} on came; {held} are here")
        if start + rows > self.context:
            raise ContextTooLong(f"rows up to {start + rows} do not fit the context of {self.context}")
        self._cache.rewind(state.slot, start)

    def _tokens_in(self, tokens: Sequence[int]) -> torch.Tensor:
        self._check_tokens(tokens)
        return self.part.inputs_of(tokens)

    def _rows_in(self, payload: bytes, rows: int) -> torch.Tensor:
        return codec.decode(payload, self._codec, self._dtype, rows, self.part.shape.width, self.part.device)

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        # An id beyond the embedding is a device-side assert on CUDA: it must not get there.
        vocabulary = self.part.shape.vocabulary
        if not all(type(token) is int and 0 <= token < vocabulary for token in tokens):
            raise ProtocolError(f"a token that is not a whole number from 0 to {vocabulary - 1}")

    def _get(self, session: int) -> _Session:
        state = self._sessions.get(session)
        if state is None:
            raise EngineError(f"session {session} is not open here")
        return state

    @staticmethod
    def _require(is_met: bool, words: str) -> None:
        if not is_met:
            raise ProtocolError(words)

    def _bytes(self) -> dict[str, int]:
        return {
            "weights": self.part.byte_count,
            "cache": self._cache.byte_count,
            "draft": self.drafter.byte_count,
        }
