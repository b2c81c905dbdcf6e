"""The tokenizer of ChatGLM2 and ChatGLM3: SentencePiece, plus special ids to which no text is encoded."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from sentencepiece import SentencePieceProcessor

from triton_models.errors import CheckpointError
from triton_models.text.tokenizers.base import SLICE, TOKENIZER_FILE, Tokenizer, read_tokenizer, to_utf8

SPECIAL_TOKENS = {
    "chatglm2": ("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop"),
    "chatglm3": (
        *("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop"),
        *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    ),
}
"""By chat format, in the order of their ids (`SPTokenizer` of the published `tokenization_chatglm.py`)."""

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # stands for a space in SentencePiece's pieces


class SentencePieceTokenizer(Tokenizer):
    """A piece is one byte or a string. A leading space in the first piece of a text is dropped."""

    def __init__(self, directory: Path, special_tokens: Sequence[str]) -> None:
        """Read `tokenizer.model`; the ids of `special_tokens` follow its pieces, in that order.

        Raises:
            CheckpointError: the file is missing or broken, or is not a ChatGLM tokenizer.
        """
        file = directory / TOKENIZER_FILE
        document = read_tokenizer(file)
        try:
            self._processor = SentencePieceProcessor(model_proto=document)
        except RuntimeError as error:
            raise CheckpointError(f"{file}: not a SentencePiece model, or a damaged one") from error
        self._written: list[str] = self._processor.id_to_piece(list(range(self._processor.get_piece_size())))
        # Incremental detokenizing relies on it that exactly one leading space is dropped.
        if _SPACE not in self._written or self._processor.decode([_SPACE, _SPACE]) != " ":
            raise CheckpointError(f"{file}: not a ChatGLM tokenizer: it treats leading spaces differently")
        super().__init__(
            [self._content(token_id) for token_id in range(len(self._written))],
            special_tokens,
            self._processor.eos_id(),
            dict(enumerate(self._written)),
        )

    def encode(self, text: str) -> list[int]:  # noqa: D102 - inherited
        found = self._processor.encode(to_utf8(text), return_type="numpy")
        ids: list[int] = []
        for at in range(0, len(found), SLICE):
            ids += found[at : at + SLICE].tolist()
        return ids

    def decode(self, ids: Iterable[int]) -> str:  # noqa: D102 - inherited
        written = [self._written[token_id] if self.piece(token_id) else "" for token_id in ids]
        text: str = self._processor.decode(written)
        return text

    def _content(self, token_id: int) -> str | bytes:
        if self._processor.is_byte(token_id):
            return bytes([int(self._written[token_id][1:-1], 16)])  # named <0x0A>
        if self._processor.is_control(token_id) or self._processor.is_unknown(token_id):
            return ""
        return self._written[token_id].replace(_SPACE, " ")
