"""The tokenizer of ChatGLM2 and ChatGLM3: SentencePiece, plus special ids to which no text is encoded."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from sentencepiece import SentencePieceProcessor

from triton_models.errors import CheckpointError
from triton_models.text.tokenizers.base import TOKENIZER_FILE, display_piece, read_tokenizer, to_utf8

SPECIAL_TOKENS = {
    "chatglm2": ("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop"),
    "chatglm3": (
        *("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop"),
        *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    ),
}
"""By chat format, in the order of their ids (`SPTokenizer` of the published `tokenization_chatglm.py`)."""

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # stands for a space in SentencePiece's pieces
_NO_TEXT = ""


class SentencePieceTokenizer:
    """See the module, and `Tokenizer`. A leading space in the first piece of a text is dropped."""

    def __init__(self, directory: Path, special_tokens: Sequence[str]) -> None:
        """Read `tokenizer.model`; the ids of `special_tokens` follow its pieces, in that order.

        Raises:
            CheckpointError: the file is missing or broken, or is not a ChatGLM tokenizer.
        """
        file = directory / TOKENIZER_FILE
        self._processor = _load(file)
        count = self._processor.get_piece_size()
        self._names: list[str] = self._processor.id_to_piece(list(range(count)))
        self._pieces = [self._content(token_id) for token_id in range(count)]
        self._check_leading_space(file)
        self._special_names = dict(enumerate(special_tokens, start=count))
        self.special_ids: Mapping[str, int] = MappingProxyType(
            {name: token_id for token_id, name in self._special_names.items()}
        )
        self.eos_id: int = self._processor.eos_id()
        self.size = count + len(self.special_ids)

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer.encode`."""
        ids: list[int] = self._processor.encode(to_utf8(text))
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """See `Tokenizer.decode`."""
        names = [self._names[token_id] if self.piece(token_id) else _NO_TEXT for token_id in ids]
        text: str = self._processor.decode(names)
        return text

    def piece(self, token_id: int) -> str | bytes:
        """See `Tokenizer.piece`: one byte for a byte piece, else a string."""
        return self._pieces[token_id] if 0 <= token_id < len(self._pieces) else _NO_TEXT

    def display(self, token_id: int) -> tuple[str, bytes]:
        """See `Tokenizer.display`."""
        if piece := self.piece(token_id):
            return display_piece(piece)
        if 0 <= token_id < len(self._names):
            return self._names[token_id], b""
        return self._special_names.get(token_id, f"<unused {token_id}>"), b""

    def _content(self, token_id: int) -> str | bytes:
        if self._processor.is_byte(token_id):
            return bytes([int(self._names[token_id][1:-1], 16)])  # named <0x0A>
        if self._processor.is_control(token_id) or self._processor.is_unknown(token_id):
            return _NO_TEXT
        return self._names[token_id].replace(_SPACE, " ")

    def _check_leading_space(self, file: Path) -> None:
        """Check that exactly one leading space is dropped: incremental detokenizing relies on it."""
        if _SPACE not in self._names or self._processor.decode([_SPACE, _SPACE]) != " ":
            raise CheckpointError(f"{file}: not a ChatGLM tokenizer: it treats leading spaces differently")


def _load(file: Path) -> SentencePieceProcessor:
    document = read_tokenizer(file)
    try:
        return SentencePieceProcessor(model_proto=document)
    except RuntimeError as error:
        raise CheckpointError(f"{file}: not a SentencePiece model, or a damaged one") from error
