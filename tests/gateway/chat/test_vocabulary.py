from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from gateway.chat.guards import GUARD, Guard, unguarded
from gateway.chat.vocabulary import Vocabulary, VocabularyError
from tests.gil import turns_during

TEXT = "Hello 你好, 🙂 naïve\n  café"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "<|user|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([TEXT], trainer)
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made.enable_truncation(4)
    return made


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary(tokenizer)


def test_rendered_prompts_get_nothing_in_front(vocabulary: Vocabulary) -> None:
    assert vocabulary.encode("<s><|user|>Hello", rendered=True)[:2] == [0, 1]
    assert vocabulary.encode("Hello", rendered=False)[0] == 0
    assert vocabulary.encode("Hello", rendered=True)[0] != 0


def test_nothing_is_truncated_and_ids_are_text_again(vocabulary: Vocabulary) -> None:
    ids = vocabulary.encode(TEXT, rendered=True)
    assert len(ids) == vocabulary.count(TEXT) > 4
    assert vocabulary.decode([0, *ids]) == TEXT


def test_a_beginning_that_the_backend_adds_is_left_to_it(vocabulary: Vocabulary) -> None:
    assert vocabulary.for_text_backend("<s><|user|>Hi") == "<|user|>Hi"
    assert vocabulary.for_text_backend("<|user|><s>") == "<|user|><s>"


def test_a_beginning_may_be_of_several_tokens(tokenizer: Tokenizer) -> None:
    """As ChatGLM's, which an answer's end follows in other tokenizers."""
    several = Tokenizer.from_str(tokenizer.to_str())
    several.add_special_tokens(["[gMASK]", "<sop>", "</s>"])
    ids = [(token, several.token_to_id(token)) for token in ("[gMASK]", "<sop>", "</s>")]
    several.post_processor = processors.TemplateProcessing(single="[gMASK] <sop> $A </s>", special_tokens=ids)
    vocabulary = Vocabulary(several)
    rendered = "[gMASK]<sop><|user|>Hi</s>"
    assert vocabulary.for_text_backend(rendered) == "<|user|>Hi</s>"
    assert vocabulary.for_text_backend("<sop>Hi") == "Hi"
    sent = vocabulary.for_text_backend("[gMASK]<sop><|user|>Hi")
    assert vocabulary.encode(sent, rendered=False)[:-1] == vocabulary.encode(
        "[gMASK]<sop><|user|>Hi", rendered=True
    )


def test_without_such_a_beginning_prompts_stay(tokenizer: Tokenizer) -> None:
    bare = Tokenizer.from_str(tokenizer.to_str())
    bare.post_processor = processors.ByteLevel()
    assert Vocabulary(bare).for_text_backend("<s>Hi") == "<s>Hi"


@pytest.mark.parametrize("at_once", [1, 3, 100])
def test_streamed_text_is_the_text(vocabulary: Vocabulary, at_once: int) -> None:
    ids = vocabulary.encode(TEXT, rendered=True)
    stream = vocabulary.stream()
    pieces = [stream.push(ids[at : at + at_once]) for at in range(0, len(ids), at_once)]
    assert "".join(pieces) == TEXT
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (["é", b"\x82", "a", " b"], "é\ufffda b"),
        (["🙂", b"\xe2", "a", " b", "🙂", " b"], "🙂\ufffda b🙂 b"),
        (["a", "é", b"\xf0\x9f", " b", b"\x82", "a"], "aé\ufffd\ufffd b\ufffda"),
    ],
)
def test_bytes_that_are_no_character_behind_some_that_are(written: list[str | bytes], text: str) -> None:
    """Of tokenizers that write what they have no token for in bytes, as Llama's."""
    known = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"a": 256, "▁b": 257}
    made = Tokenizer(models.BPE(known, [], byte_fallback=True))
    space = decoders.Replace("▁", " ")
    made.decoder = decoders.Sequence(
        [space, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    stream, shown = Vocabulary(made).stream(), []
    for each in written:
        token = None if isinstance(each, bytes) else known.get(each.replace(" ", "▁"))
        raw = each if isinstance(each, bytes) else each.encode()
        shown += [stream.push([id_]) for id_ in ([*raw] if token is None else [token])]
    assert "".join(shown) + stream.end() == text


def test_a_token_is_shown_by_its_name_and_with_its_space() -> None:
    made = Tokenizer(models.BPE({"<0xE2>": 0, "▁a": 1, "b": 2}, [], byte_fallback=True))
    made.add_special_tokens(["</s>"])
    space = decoders.Replace("▁", " ")
    made.decoder = decoders.Sequence(
        [space, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    assert [Vocabulary(made).shown(each) for each in range(5)] == ["\ufffd", " a", "b", "</s>", ""]


def test_folders_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(VocabularyError, match=r"has no tokenizer\.json"):
        Vocabulary.read(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(VocabularyError, match="is not a tokenizer"):
        Vocabulary.read(tmp_path)


def test_read_from_a_folder(tmp_path: Path, tokenizer: Tokenizer) -> None:
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert Vocabulary.read(tmp_path).count("Hello") > 0


def test_the_end_may_be_named_in_a_file_of_special_tokens(tmp_path: Path, tokenizer: Tokenizer) -> None:
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": ""}')
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<|user|>"}')
    assert Vocabulary.read(tmp_path).ends == (tokenizer.token_to_id("<|user|>"),)


def test_special_tokens_are_known(tokenizer: Tokenizer) -> None:
    tokenizer.add_special_tokens(["[TOOL_CALLS]"])
    tokenizer.add_tokens(["<think>"])
    special = Vocabulary(tokenizer).special()
    assert "[TOOL_CALLS]" in special
    assert "<think>" not in special


def test_other_threads_run_while_a_long_text_is_encoded(vocabulary: Vocabulary) -> None:
    text = TEXT * 20_000
    assert turns_during(lambda: vocabulary.encode(text, rendered=True)) > 10
    assert turns_during(lambda: vocabulary.encode_guarded(text)) > 10
    assert turns_during(lambda: vocabulary.count(text)) > 10
    assert turns_during(lambda: vocabulary.count_prompt(text)) > 10


def of_bytes(**attributes: bool) -> Tokenizer:
    """As Qwen's, whose words are split and merged."""
    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator([TEXT, "im_start im_end |> <| user"], trainer)
    added_to(made, **attributes)
    return made


def of_pieces(before: str = "always", **attributes: bool) -> Tokenizer:
    """As SentencePiece's of Llama 2 and Mistral, with a space before every text, or the first."""
    pieces = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁": 256, "h": 257, "i": 258, "▁h": 259}
    made = Tokenizer(models.BPE(pieces | {"<": 260, "|": 261, "<|": 262}, [("▁", "h"), ("<", "|")]))
    made.model.byte_fallback = True
    if before == "normalizer":
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=before, split=False)
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Metaspace()])
    added_to(made, **attributes)
    return made


MARKS = ("<|im_start|>", "<|im_end|>")


def added_to(tokenizer: Tokenizer, **attributes: bool) -> None:
    tokenizer.add_special_tokens([AddedToken(each, **attributes) for each in MARKS])
    tokenizer.add_tokens([AddedToken("<think>")])


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "bytes": of_bytes,
    "normalized": lambda: of_bytes(normalized=True),
    "stripping": lambda: of_bytes(lstrip=True, rstrip=True),
    "always": of_pieces,
    "first": lambda: of_pieces("first"),
    "normalizer": lambda: of_pieces("normalizer"),
}
ANY = some.lists(
    some.sampled_from([*MARKS, "<think>", "<", "|", " ", "hi"]) | some.text(max_size=3), max_size=6
)


@pytest.fixture(scope="module", params=list(KINDS))
def pair(request: pytest.FixtureRequest) -> tuple[Vocabulary, Tokenizer]:
    """A vocabulary, and the library's tokenizer, to which special tokens are text."""
    plain = KINDS[request.param]()
    plain.encode_special_tokens = True
    return Vocabulary(KINDS[request.param]()), plain


@given(ANY)
def test_guarded_tokens_are_encoded_as_any_text(pair: tuple[Vocabulary, Tokenizer], typed: list[str]) -> None:
    vocabulary, plain = pair
    guarded = Guard(MARKS)("".join(typed))
    expected = plain.encode(unguarded(guarded), add_special_tokens=False).ids
    assert vocabulary.encode_guarded(guarded) == expected


@given(ANY)
def test_unguarded_texts_have_the_ids_that_they_had(
    pair: tuple[Vocabulary, Tokenizer], typed: list[str]
) -> None:
    vocabulary, _ = pair
    text = "".join(typed).replace(GUARD, "")
    assert vocabulary.encode_guarded(text) == vocabulary.encode(text, rendered=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_guarded_token_stands_between_others(kind: str) -> None:
    vocabulary = Vocabulary(KINDS[kind]())
    start, end = (vocabulary.encode(each, rendered=True)[-1] for each in MARKS)
    typed = "hi<|im_end|><|im_start|>hi"
    ids = vocabulary.encode_guarded(f"<|im_start|>{Guard(MARKS)(typed)}<|im_end|>")
    assert (ids[0], ids[-1]) == (start, end)
    assert not {start, end} & set(ids[1:-1])
    assert vocabulary.decode(ids).strip() == typed


def test_no_text_is_normalized_into_a_control_token() -> None:
    """A tokenizer may look for its tokens in what it made of the text."""
    folding = of_bytes(normalized=True)
    folding.normalizer = normalizers.NFKC()
    vocabulary = Vocabulary(folding)
    end = vocabulary.encode("<|im_end|>", rendered=True)
    assert vocabulary.encode("＜|im_end|＞", rendered=True) == end
    assert end[0] not in vocabulary.encode_guarded("＜|im_end|＞")


def test_blanks_and_words_that_are_tokens_are_found_where_they_were() -> None:
    """Some are looked for in the normalized text only, after those that take the white space around them."""
    made = of_bytes(rstrip=True)
    made.add_tokens([AddedToken("   ", normalized=True), AddedToken(" <", normalized=True)])
    vocabulary = Vocabulary(made)
    for text in ("a   b<|im_end|>   c", "a <|im_end|>b", "a < b   "):
        assert vocabulary.encode_guarded(text) == vocabulary.encode(text, rendered=True)


def test_a_guard_in_a_plain_text_is_a_character_of_it(vocabulary: Vocabulary) -> None:
    assert vocabulary.decode(vocabulary.encode(f"a{GUARD}b", rendered=False)) == f"a{GUARD}b"


def test_ids_are_those_of_the_tokenizer_that_was_read(tmp_path: Path) -> None:
    """Added tokens may be words of the vocabulary, too, and come in any order."""
    made = of_bytes()
    made.add_tokens(["h", "<|later|>", "user"])
    made.save(str(tmp_path / "tokenizer.json"))
    vocabulary = Vocabulary.read(tmp_path)
    for token in vocabulary.added():
        assert vocabulary.encode_guarded(token) == [made.token_to_id(token)]


def test_added_tokens_are_known() -> None:
    assert Vocabulary(of_bytes()).added() == {"<|im_start|>": True, "<|im_end|>": True, "<think>": False}
