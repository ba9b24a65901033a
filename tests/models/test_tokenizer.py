from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Inner
from transformers import PreTrainedTokenizerFast

from peerllm.models.tokenizer import Tokenizer
from peerllm.protocol.errors import BadRequest, ModelError
from peerllm.protocol.requests import ChatMessage

BOS, EOS, TOOL = "<s>", "</s>", "<tool>"
WORDS = ["hello", "world", "ä", "日本", "the", "a", "b", ",", ".", "\n", "x"]


def byte_level() -> Inner:
    """As Llama 3, Qwen and SmolLM have it: every byte is a token of its own, and characters span tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Inner(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return inner


def sentencepiece(*, metaspace: bool = False) -> Inner:
    """As Llama 2 and Mistral have it: a leading space that is taken away again, and byte tokens for the rest."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    pieces += [prefix + word for word in WORDS for prefix in ("", "▁")]
    inner = Inner(models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], 0, byte_fallback=True))
    if metaspace:
        inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        parts = [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")]
        inner.decoder = decoders.Sequence(parts)
    else:
        inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        strip = decoders.Strip(" ", 1, 0)
        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
        inner.decoder = decoders.Sequence(parts)
    return inner


KINDS: dict[str, Callable[[], Inner]] = {
    "byte level": byte_level,
    "sentencepiece": sentencepiece,
    "metaspace": lambda: sentencepiece(metaspace=True),
}


def save(folder: Path, inner: Inner, *, template: str | None = None, adds_bos: bool = True, **configs: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    inner.add_special_tokens([AddedToken(BOS, special=True), AddedToken(EOS, special=True)])
    inner.add_tokens([AddedToken(TOOL, special=False)])
    if adds_bos:
        bos = inner.token_to_id(BOS)
        inner.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, bos)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token=BOS, eos_token=EOS, chat_template=template)
    tokenizer.save_pretrained(str(folder))
    for name in ("config", "generation_config"):
        (folder / f"{name}.json").write_text(json.dumps(configs.get(name, {})))
    return folder


@pytest.fixture(scope="module", params=list(KINDS))
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(save(tmp_path_factory.mktemp("tokenizer"), KINDS[request.param]()))


@pytest.fixture(scope="module")
def bytes_only(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(save(tmp_path_factory.mktemp("tokenizer"), byte_level(), adds_bos=False))


def streamed(tokenizer: Tokenizer, tokens: list[int], cuts: random.Random | None = None) -> list[str]:
    stream, pieces, at = tokenizer.stream(), [], 0
    while at < len(tokens):
        step = cuts.randint(1, 5) if cuts else 1
        pieces.append(stream.push(tokens[at : at + step]))
        at += step
    return [*pieces, stream.finish()]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_what_is_streamed_is_what_is_decoded_for_any_tokens(tokenizer: Tokenizer, data: st.DataObject) -> None:
    tokens = data.draw(st.lists(st.integers(0, tokenizer.vocabulary + 3), max_size=60))
    expected = tokenizer.decode(tokens)
    assert "".join(streamed(tokenizer, tokens)) == expected
    assert "".join(streamed(tokenizer, tokens, random.Random(data.draw(st.integers(0, 99))))) == expected


@pytest.mark.parametrize(
    "text", ["héllo 😀 日本語!", "👩‍👩‍👧 x\n\n  y", "a  spaced  the", "a\ufffdb\ufffd", "ä" * 50, "\n\n", "the world"]
)
def test_no_character_is_cut_and_none_is_late(tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.encode_prompt(text)
    pieces = streamed(tokenizer, tokens)
    assert "".join(pieces) == tokenizer.decode(tokens) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)
    for count in range(len(tokens)):
        whole = tokenizer.decode(tokens[: count + 1])
        if not whole.endswith("\ufffd") and tokens[count] not in tokenizer._bytes:
            assert "".join(pieces[: count + 1]) == whole


def test_special_tokens_are_left_out_and_added_words_are_not(tokenizer: Tokenizer) -> None:
    ids = tokenizer.token_map()
    e_acute = tokenizer.encode_prompt("é")[-2:]
    tokens = [ids[BOS], e_acute[0], ids[EOS], e_acute[1], ids[TOOL], ids[EOS]]
    pieces = streamed(tokenizer, tokens)
    assert "".join(pieces) == tokenizer.decode(tokens)
    assert "é" in "".join(pieces) and TOOL in "".join(pieces) and BOS not in "".join(pieces)


def test_a_half_character_at_the_end_comes_out_as_a_replacement(bytes_only: Tokenizer) -> None:
    tokens = bytes_only.encode_prompt("a😀")[:-1]
    assert streamed(bytes_only, tokens) == ["a", "", "", "", "\ufffd"]


def test_a_stream_can_be_used_again_after_it_was_finished(tokenizer: Tokenizer) -> None:
    stream = tokenizer.stream()
    for _ in range(2):
        tokens = tokenizer.encode_prompt("the world")
        assert stream.push(tokens) + stream.finish() == "the world"


@pytest.mark.parametrize("byte", ["a", "ÿ"])
def test_a_token_costs_the_same_early_and_late(bytes_only: Tokenizer, byte: str) -> None:
    token = bytes_only.token_map()[byte]
    stream, counts = bytes_only.stream(), []
    decode = bytes_only._backend.decode
    bytes_only._backend.decode = lambda tokens, **options: counts.append(len(tokens)) or decode(tokens, **options)
    try:
        started = time.perf_counter()
        text = "".join(stream.push([token]) for _ in range(2000)) + stream.finish()
        seconds = time.perf_counter() - started
    finally:
        del bytes_only._backend.decode
    assert text == bytes_only.decode([token] * 2000)
    assert max(counts) <= 40
    print(f"{seconds / 2000 * 1e6:.1f} us a token")


def test_a_prompt_begins_with_one_bos(tokenizer: Tokenizer) -> None:
    bos = tokenizer.bos_token_id
    for prompt in ("hello", f"{BOS}hello", f"{BOS} hello"):
        tokens = tokenizer.encode_prompt(prompt)
        assert tokens[0] == bos and bos not in tokens[1:]


def test_a_bos_that_the_user_wrote_twice_stays_where_the_tokenizer_adds_none(bytes_only: Tokenizer) -> None:
    bos = bytes_only.bos_token_id
    assert bytes_only.encode_prompt(f"{BOS}{BOS}a")[:2] == [bos, bos]
    assert bos not in bytes_only.encode_prompt("a")


def test_an_empty_prompt_is_bos_or_an_error(tokenizer: Tokenizer, bytes_only: Tokenizer, tmp_path: Path) -> None:
    for each in (tokenizer, bytes_only):
        assert each.encode_prompt("") == [each.bos_token_id]
    folder = save(tmp_path, byte_level(), adds_bos=False)
    settings_file = folder / "tokenizer_config.json"
    settings_file.write_text(json.dumps(json.loads(settings_file.read_text()) | {"bos_token": None}))
    without = Tokenizer.load(folder)
    assert without.bos_token_id is None
    with pytest.raises(BadRequest, match="empty") as caught:
        without.encode_prompt("")
    assert caught.value.param == "prompt"


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('system comes first') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[go]{% endif %}"
)


def chat(*turns: tuple[str, str]) -> list[ChatMessage]:
    return [ChatMessage(role=role, content=content) for role, content in turns]


def test_a_conversation_goes_through_the_template_with_one_bos(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(save(tmp_path, byte_level(), template=TEMPLATE))
    assert tokenizer.has_chat_template
    tokens = tokenizer.encode_chat(chat(("user", "hé")))
    assert tokens.count(tokenizer.bos_token_id or -1) == 1
    assert tokenizer.decode(tokens) == "[user]hé[go]"


def test_a_developer_is_the_system_where_the_template_does_not_know_the_role(tmp_path: Path) -> None:
    plain = Tokenizer.load(save(tmp_path / "plain", byte_level(), template=TEMPLATE))
    assert plain.decode(plain.encode_chat(chat(("developer", "x")))) == "[system]x[go]"
    knows = TEMPLATE.replace("[go]", "[go]{# developer #}")
    aware = Tokenizer.load(save(tmp_path / "aware", byte_level(), template=knows))
    assert aware.decode(aware.encode_chat(chat(("developer", "x")))) == "[developer]x[go]"


def test_what_the_template_cannot_take_is_the_requests_fault(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(save(tmp_path / "with", byte_level(), template=TEMPLATE))
    bare = Tokenizer.load(save(tmp_path / "without", byte_level()))
    broken = Tokenizer.load(save(tmp_path / "broken", byte_level(), template="{{ messages[9].content }}{% for %}"))
    silent = Tokenizer.load(save(tmp_path / "silent", byte_level(), template="{% set x = 1 %}"))
    cases = [
        (tokenizer, chat(), "no messages"),
        (tokenizer, chat(("user", "a"), ("system", "b")), "system comes first"),
        (bare, chat(("user", "a")), "no chat template"),
        (broken, chat(("user", "a")), "refuses"),
        (silent, chat(("user", "a")), "makes nothing"),
    ]
    for each, messages, reason in cases:
        with pytest.raises(BadRequest, match=reason) as caught:
            each.encode_chat(messages)
        assert caught.value.param == "messages"
    assert not bare.has_chat_template


def test_the_end_of_an_answer_is_what_any_of_the_three_files_says(tmp_path: Path) -> None:
    configs = {"config": {"eos_token_id": 5}, "generation_config": {"eos_token_id": [6, 7]}}
    tokenizer = Tokenizer.load(save(tmp_path, byte_level(), **configs))
    assert tokenizer.eos_token_ids == {5, 6, 7, tokenizer.token_map()[EOS]}
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": None}))
    assert Tokenizer.load(tmp_path).eos_token_ids == {tokenizer.token_map()[EOS]}


def test_the_beginning_is_the_tokenizers_then_the_configs(tmp_path: Path) -> None:
    folder = save(tmp_path, byte_level(), adds_bos=False, config={"bos_token_id": 9})
    assert Tokenizer.load(folder).bos_token_id != 9
    settings_file = folder / "tokenizer_config.json"
    settings_file.write_text(json.dumps(json.loads(settings_file.read_text()) | {"bos_token": None}))
    assert Tokenizer.load(folder).bos_token_id == 9


def test_a_folder_without_a_tokenizer_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ModelError, match="tokenizer cannot be loaded"):
        Tokenizer.load(tmp_path)
    with pytest.raises(ModelError, match="no folder"):
        Tokenizer.load(tmp_path / "absent")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError):
        Tokenizer.load(tmp_path)


def test_a_long_prompt_is_encoded_whole_and_without_a_warning(bytes_only: Tokenizer) -> None:
    assert len(bytes_only.encode_prompt("a" * 100_000)) == 100_000
