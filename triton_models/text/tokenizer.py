"""The tokenizer of ChatGLM2 and ChatGLM3: SentencePiece pieces, then special ids that text never encodes to.

A special id exists only as a number. `<|user|>` typed by somebody stays ordinary pieces, and that is what
keeps a user's text from passing for another role's.
"""

from collections.abc import Iterable
from pathlib import Path

from sentencepiece import SentencePieceProcessor

from triton_models.errors import CheckpointError, TextError

TOKENIZER_FILE = "tokenizer.model"

SPECIAL_TOKENS = {
    "chatglm2": ("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop"),
    "chatglm3": (
        *("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop"),
        *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    ),
}
"""By chat format, in the order of their ids (`SPTokenizer` of the published `tokenization_chatglm.py`)."""

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # what SentencePiece writes for a space inside a piece
_NO_TEXT = ""


class Tokenizer:
    """Text <-> ids. Immutable once made, so any number of threads may share one.

    Attributes:
        special_ids: id of each special token by its name; they follow the pieces.
        eos_id: the id that ends an answer.
        size: number of ids that mean something; a checkpoint's padded vocabulary is larger.
    """

    def __init__(self, directory: Path, chat_format: str) -> None:
        """Read `tokenizer.model` of a checkpoint whose special tokens are those of `chat_format`.

        Raises:
            CheckpointError: the file is missing, broken or not built as ChatGLM's tokenizers are.
            TextError: no chat format has that name.
        """
        if chat_format not in SPECIAL_TOKENS:
            raise TextError(f"unknown chat format {chat_format!r}; there are {', '.join(SPECIAL_TOKENS)}")
        file = directory / TOKENIZER_FILE
        self._processor = _load(file)
        count = self._processor.get_piece_size()
        self._names: list[str] = self._processor.id_to_piece(list(range(count)))
        self._pieces = [self._content(token_id) for token_id in range(count)]
        self._check_leading_space(file)
        self._special_names = dict(enumerate(SPECIAL_TOKENS[chat_format], start=count))
        self.special_ids = {name: token_id for token_id, name in self._special_names.items()}
        self.eos_id: int = self._processor.eos_id()
        self.size = count + len(self.special_ids)

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, never a special one and without any prefix.

        Raises:
            TextError: `text` holds lone surrogates.
        """
        try:
            utf8 = text.encode()
        except UnicodeEncodeError as error:
            raise TextError(
                f"the text holds a lone surrogate at character {error.start}, which is not valid Unicode"
            ) from None
        ids: list[int] = self._processor.encode(utf8)
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`, decoded at one go.

        Special and control ids, the unknown token (ChatGLM's padding) and ids beyond the vocabulary have no
        text, and separate what stands on either side of them: bytes across one never join to a character.
        Bytes that are not UTF-8 become U+FFFD each.
        """
        names = [self._names[token_id] if self.piece(token_id) else _NO_TEXT for token_id in ids]
        text: str = self._processor.decode(names)
        return text

    def piece(self, token_id: int) -> str | bytes:
        """Return what a token adds to the text: one byte for a byte piece, else a string, empty for no text.

        SentencePiece drops the space that the very first piece of a text may begin with; here it is kept.
        """
        return self._pieces[token_id] if 0 <= token_id < len(self._pieces) else _NO_TEXT

    def display(self, token_id: int) -> tuple[str, bytes]:
        r"""Return how a log-probability report shows `token_id` (any number), and its UTF-8 bytes.

        Tokens that are no text go by their name and have no bytes. The bytes of others may be a part of a
        character; an escape such as ``\xe4`` then shows each, as in OpenAI's own reports.
        """
        piece = self.piece(token_id)
        if isinstance(piece, bytes):
            return piece.decode("ascii", "backslashreplace"), piece
        if piece:
            return piece, piece.encode()
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
        """Make sure that exactly one leading space is dropped: incremental detokenising builds on it."""
        if _SPACE not in self._names or self._processor.decode([_SPACE, _SPACE]) != " ":
            raise CheckpointError(f"{file}: not a ChatGLM tokenizer: it treats leading spaces differently")


def _load(file: Path) -> SentencePieceProcessor:
    try:
        document = file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from error
    if not document:
        raise CheckpointError(f"{file}: is empty")
    try:
        return SentencePieceProcessor(model_proto=document)
    except RuntimeError as error:
        raise CheckpointError(f"{file}: not a SentencePiece model, or a damaged one") from error
