from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

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


def test_folders_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(VocabularyError, match=r"has no tokenizer\.json"):
        Vocabulary.read(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(VocabularyError, match="is not a tokenizer"):
        Vocabulary.read(tmp_path)


def test_read_from_a_folder(tmp_path: Path, tokenizer: Tokenizer) -> None:
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert Vocabulary.read(tmp_path).count("Hello") > 0


def test_special_tokens_are_known(tokenizer: Tokenizer) -> None:
    tokenizer.add_special_tokens(["[TOOL_CALLS]"])
    tokenizer.add_tokens(["<think>"])
    special = Vocabulary(tokenizer).special()
    assert "[TOOL_CALLS]" in special
    assert "<think>" not in special


def test_other_threads_run_while_a_long_text_is_encoded(vocabulary: Vocabulary) -> None:
    text = TEXT * 20_000
    assert turns_during(lambda: vocabulary.encode(text, rendered=True)) > 10
    assert turns_during(lambda: vocabulary.count(text)) > 10
    assert turns_during(lambda: vocabulary.count_prompt(text)) > 10
