import io
import json
import zipfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from tokenizers import AddedToken, Regex, Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.normalizers import Prepend, Replace, Sequence
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from gateway.chat.vocabulary import Vocabulary
from tests.gil import turns_during
from tests.template_checkpoint import ANSWER, SPECIAL, write_tokenizer
from triton_models.errors import CheckpointError, LibraryPanicError, TextError
from triton_models.serving.chat_text import archive_of
from triton_models.text.answer import Detokenizer
from triton_models.text.formats import TemplateFormat
from triton_models.text.grammars import Grammars
from triton_models.text.json_tokenizer import JsonTokenizer
from wire.grammar import Grammar


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> JsonTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return JsonTokenizer(folder)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(some.text(alphabet=some.characters(exclude_categories=["Cs"]), max_size=40))
def test_text_comes_back(tokenizer: JsonTokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    detokenizer = Detokenizer(tokenizer, continues=True)
    assert "".join(detokenizer.push(each) for each in ids) == text


def test_other_threads_run_while_a_long_text_is_encoded(tokenizer: JsonTokenizer) -> None:
    assert turns_during(lambda: tokenizer.encode("Hello 你好, naïve " * 30_000)) > 60


def test_no_text_becomes_a_special_token(tokenizer: JsonTokenizer) -> None:
    special = set(tokenizer.special_ids.values())
    assert set(tokenizer.special_ids) == set(SPECIAL)
    for name in SPECIAL:
        ids = tokenizer.encode(f"a{name}b")
        assert special.isdisjoint(ids)
        assert tokenizer.decode(ids) == f"a{name}b"


def test_special_tokens_are_no_text_and_other_added_ones_are(tokenizer: JsonTokenizer) -> None:
    end = tokenizer.special_ids["<|im_end|>"]
    assert (tokenizer.end_ids, tokenizer.eos_id) == ([end], end)
    assert tokenizer.piece(end) == ""
    assert tokenizer.display(end) == ("<|im_end|>", b"")
    assert tokenizer.encode(ANSWER[0]) == [end + 1]
    assert tokenizer.piece(end + 1) == b"<think>"


def test_what_ends_an_answer_is_what_the_generation_says(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}), encoding="utf-8")
    assert JsonTokenizer(tmp_path).end_ids[1:] == [7]
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": [8, 9]}), encoding="utf-8")
    assert JsonTokenizer(tmp_path).end_ids[1:] == [8, 9]


def test_the_end_may_be_named_in_a_file_of_special_tokens(tmp_path: Path) -> None:
    """As in older checkpoints, and the gateway reads it, too."""
    made = write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": ""}', encoding="utf-8")
    file = tmp_path / "special_tokens_map.json"
    file.write_text('{"eos_token": {"content": "<|im_end|>"}}', encoding="utf-8")
    assert JsonTokenizer(tmp_path).end_ids == [made.token_to_id("<|im_end|>")]
    with zipfile.ZipFile(io.BytesIO(archive_of(tmp_path))) as files:
        assert files.read(file.name) == file.read_bytes()


def test_ids_that_the_model_has_not_end_nothing(tmp_path: Path) -> None:
    """What the model has beyond the tokenizer's own does, in grammars too."""
    write_tokenizer(tmp_path)
    own = JsonTokenizer(tmp_path)
    config = {"vocab_size": own.size + 40, "eos_token_id": [own.size + 33, own.size + 40, 2**40, -1]}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer = JsonTokenizer(tmp_path)
    assert tokenizer.end_ids == [own.eos_id, own.size + 33]
    assert tokenizer.size == own.size + 34
    assert tokenizer.encode("the") == own.encode("the")
    mask = Grammars(tokenizer, TemplateFormat(tokenizer)).compile(Grammar("json_object")).mask()
    for token_id in (*tokenizer.encode("{}"), own.size + 33):
        mask.accept(token_id)

    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": own.size}), encoding="utf-8")
    assert (JsonTokenizer(tmp_path).end_ids, JsonTokenizer(tmp_path).size) == (own.end_ids, own.size)


def test_an_added_token_that_the_model_has_not_is_left_out(tmp_path: Path) -> None:
    """As by whoever trains on, and adds a token for padding without a row of weights."""
    made = write_tokenizer(tmp_path)
    own = JsonTokenizer(tmp_path)
    made.add_special_tokens(["<pad>"])
    made.save(str(tmp_path / "tokenizer.json"))
    assert JsonTokenizer(tmp_path).size == own.size + 1
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": own.size}), encoding="utf-8")
    tokenizer = JsonTokenizer(tmp_path)
    assert tokenizer.size == own.size
    assert tokenizer.special_ids == own.special_ids
    assert max(tokenizer.encode("a<pad>b")) < own.size
    # What is no added token is another model's.
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 9}), encoding="utf-8")
    assert JsonTokenizer(tmp_path).size > len(SPECIAL) + 9


@pytest.mark.parametrize("missing", [0, 1, 3, len(SPECIAL) + len(ANSWER)])
@pytest.mark.parametrize("later", [0, 40], ids=["its id", "a later id"])
@pytest.mark.parametrize("end", ["<|im_end|>", "</tool_call>"])
def test_tokens_that_only_the_configuration_adds_are_as_transformers_has_them(
    tmp_path: Path, missing: int, later: int, end: str
) -> None:
    write_tokenizer(tmp_path)
    document = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    everything = document["added_tokens"]
    document["added_tokens"] = everything[: len(everything) - missing]
    (tmp_path / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
    listed = {f"{each['id'] + later * (each is everything[-1])}": each for each in everything}
    written = {at: {key: each[key] for key in each if key != "id"} for at, each in listed.items()}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(config | {"added_tokens_decoder": written}), encoding="utf-8"
    )
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    text = "a<think>b</tool_call>c<|im_end|>"
    vocabulary, ours = Vocabulary.read(tmp_path), JsonTokenizer(tmp_path)
    assert vocabulary.encode(text, rendered=True) == theirs.encode(text)
    assert vocabulary.ends == (theirs.eos_token_id,)
    assert ours.end_ids == [theirs.eos_token_id]
    assert "".join(ours.display(each)[0] for each in theirs.encode(text)) == text
    assert set(ours.special_ids) == set(SPECIAL)


BLOCKS = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁": 256, "h": 257, "i": 258, "▁h": 259}
"""A vocabulary as SentencePiece's: spaces as a block, and bytes for what it does not hold."""


def test_pieces_of_sentencepiece(tmp_path: Path) -> None:
    """As Llama 2 and Mistral have them, with a space before every text."""
    made = Tokenizer(BPE(BLOCKS, [("▁", "h")], byte_fallback=True, fuse_unk=True))
    made.normalizer = Sequence([Prepend("▁"), Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(["</s>"])
    tokenizer = saved(made, tmp_path)
    for text in ("hi", "hi hi", "h é h", " h", "  hi", " ", " é"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == made.decode(ids) == text


def test_sentencepiece_without_a_space_before_every_text(tmp_path: Path) -> None:
    """As Gemma has it: a leading space is the text's own, and runs of them are added tokens."""
    made = Tokenizer(BPE(BLOCKS, [("▁", "h")], byte_fallback=True, fuse_unk=True))
    made.normalizer = Replace(" ", "▁")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens(["</s>"])
    made.add_tokens([AddedToken("▁▁", normalized=False)])
    tokenizer = saved(made, tmp_path)
    for ids, text in (([259, 258], " hi"), ([261, 257], "  h"), ([257, 261, 259, 195, 169], "h   hé")):
        assert tokenizer.decode(ids) == made.decode(ids) == text
        detokenizer = Detokenizer(tokenizer)
        assert "".join(map(detokenizer.push, ids)) == text
    grammars = Grammars(tokenizer, TemplateFormat(tokenizer))
    assert grammars.compile(Grammar("json_object")).mask().takes([ord("{")])


def test_what_begins_every_text_may_also_end_an_answer(tmp_path: Path) -> None:
    """As OPT has it; what a tokenizer puts behind a text does not begin one."""
    made = Tokenizer(BPE(BLOCKS, [], byte_fallback=True))
    made.decoder = decoders.ByteFallback()
    made.add_special_tokens(["</s>", "<s>"])
    for template, begin_ids in (("</s> $A", [260]), ("<s> $A </s>", [261]), ("$A </s>", [])):
        special = [(name, made.token_to_id(name)) for name in ("</s>", "<s>")]
        made.post_processor = TemplateProcessing(single=template, special_tokens=special)
        assert saved(made, tmp_path).begin_ids == begin_ids


@pytest.mark.parametrize("kind", ["LlamaTokenizer", "LlamaTokenizerFast", "PreTrainedTokenizerFast"])
@pytest.mark.parametrize(
    "flags", [{}, {"add_bos_token": True, "add_eos_token": True}, {"add_bos_token": False}]
)
@pytest.mark.parametrize("written", [None, "$A", "<s> $A"])
def test_every_text_begins_as_transformers_has_it(
    tmp_path: Path, kind: str, flags: dict[str, bool], written: str | None
) -> None:
    """Which is what tokenizer.json says: since its version 5, `add_bos_token` beside that is not read."""
    made = Tokenizer(BPE(BLOCKS, [], byte_fallback=True))
    made.decoder = decoders.ByteFallback()
    made.add_special_tokens(["</s>", "<s>"])
    if written is not None:
        made.post_processor = TemplateProcessing(
            single=written, special_tokens=[("<s>", 261)] if "<s>" in written else []
        )
    config = {"tokenizer_class": kind, "bos_token": "<s>", "eos_token": "</s>", **flags}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    begin_ids = saved(made, tmp_path).begin_ids
    theirs = AutoTokenizer.from_pretrained(tmp_path).encode("h")
    assert begin_ids == [each for each in theirs if each in (260, 261)]
    vocabulary = Vocabulary.read(tmp_path)
    ids = vocabulary.encode("h", rendered=False)
    assert ids == [*begin_ids, *vocabulary.encode("h", rendered=True)]


def saved(made: Tokenizer, folder: Path) -> JsonTokenizer:
    made.save(str(folder / "tokenizer.json"))
    config = {"eos_token_id": made.token_to_id("</s>")}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return JsonTokenizer(folder)


def test_a_panic_is_an_error(tmp_path: Path) -> None:
    """The library's own, of a pattern for words that takes too long."""
    made = Tokenizer(BPE(BLOCKS, [], byte_fallback=True))
    made.decoder = decoders.ByteFallback()
    made.pre_tokenizer = Split(Regex("(a+)+b"), "isolated")
    made.add_special_tokens(["</s>"])
    tokenizer = saved(made, tmp_path)
    assert tokenizer.encode("aab") == [97, 97, 98]
    with pytest.raises(LibraryPanicError, match="tokenizers"):
        tokenizer.encode("a" * 40)


@pytest.mark.parametrize("text", ["\ud800", "a\udfff"])
def test_lone_surrogates_are_refused(tokenizer: JsonTokenizer, text: str) -> None:
    with pytest.raises(TextError, match="surrogate"):
        tokenizer.encode(text)


def test_what_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: cannot be read"):
        JsonTokenizer(tmp_path)
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(CheckpointError, match="eos"):
        JsonTokenizer(tmp_path)
    file = tmp_path / "tokenizer.json"
    document = json.loads(file.read_text(encoding="utf-8")) | {"decoder": None}
    file.write_text(json.dumps(document), encoding="utf-8")
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}), encoding="utf-8")
    with pytest.raises(CheckpointError, match="neither of bytes"):
        JsonTokenizer(tmp_path)
