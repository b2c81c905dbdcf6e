"""A model's tokenizer in the gateway: for models whose Triton counts no tokens, or takes nothing but ids.

Reads `tokenizer.json`, the form of Hugging Face's tokenizers (https://huggingface.co/docs/tokenizers).
"""

from collections.abc import Sequence
from itertools import takewhile
from typing import Any, Final

from tokenizers import AddedToken, Encoding, Tokenizer, normalizers
from tokenizers.decoders import DecodeStream

from gateway.chat.guards import GUARD, is_mark
from gateway.chat.templates import Folder, read_config, text_of, tokenizer_config
from wire.tokenizer_files import with_added_tokens

_FILE: Final = "tokenizer.json"
_GENERATION_FILE: Final = "generation_config.json"


class VocabularyError(Exception):
    """A folder has no tokenizer that can be used; the message says why."""


class Vocabulary:
    """Turns text into token ids and back. Shared by all requests."""

    def __init__(self, tokenizer: Tokenizer, ends: Sequence[int] = (), pad: int | None = None) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._guarded = _dropping_guards(tokenizer)
        self.ends = tuple(ends)
        """The ids that end an answer, first the one that the tokenizer calls so; empty: it names none."""
        self.pad = pad if pad is not None or not ends else ends[0]
        """The id that fills up what is too short; None: the tokenizer names none, nor an end."""
        sample = tokenizer.encode("a", add_special_tokens=True)
        added = zip(sample.tokens, sample.special_tokens_mask, strict=True)
        self._beginning = [token for token, _ in takewhile(lambda each: each[1], added)]
        """The special tokens that every text gets in front of it."""

    @classmethod
    def read(cls, folder: Folder) -> "Vocabulary":
        """Read the tokenizer of a folder.

        Raises:
            VocabularyError: it has none, or one that cannot be used.
            TemplateError: its configuration cannot be read.
        """
        file = folder / _FILE
        if not file.is_file():
            raise VocabularyError(f"{folder} has no {_FILE}")
        named, generation = tokenizer_config(folder), read_config(folder / _GENERATION_FILE)
        try:
            document = file.read_text(encoding="utf-8")
            tokenizer = Tokenizer.from_str(document)
            completed = with_added_tokens(document, named, tokenizer.get_added_tokens_decoder())
            if completed is not document:
                tokenizer = Tokenizer.from_str(completed)
        except Exception as error:  # noqa: BLE001 - the library raises nothing more specific
            raise VocabularyError(f"{file} is not a tokenizer: {error}") from None
        ends = [_id_of(tokenizer, named.get("eos_token")), *_ids(generation.get("eos_token_id"))]
        pads = [_id_of(tokenizer, named.get("pad_token")), *_ids(generation.get("pad_token_id"))]
        return cls(
            tokenizer,
            list(dict.fromkeys(end for end in ends if end is not None)),
            next((pad for pad in pads if pad is not None), None),
        )

    def encode(self, text: str, *, rendered: bool) -> list[int]:
        """Return the ids of `text`; `rendered`: a template wrote it, with its special tokens.

        Otherwise those that every text begins with are added, as the backends add them to a plain prompt.
        """
        return list(self._encoded(text, special=not rendered).ids)

    def encode_guarded(self, text: str) -> list[int]:
        """Return the ids of what a template wrote, with guards within what is to be no control token."""
        (encoded,) = self._guarded.encode_batch_fast([text], add_special_tokens=False)
        return list(encoded.ids)

    def count(self, text: str) -> int:
        """Return the number of tokens of an answer's text, without any that are added."""
        return len(self._encoded(text, special=False))

    def count_prompt(self, text: str) -> int:
        """Return the number of tokens that a backend makes of a prompt's text."""
        return len(self._encoded(text, special=True))

    def _encoded(self, text: str, *, special: bool) -> Encoding:
        # A batch: `encode` of one text holds the interpreter's lock all the while, which streams wait for.
        (encoded,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)
        return encoded

    def for_text_backend(self, text: str) -> str:
        """Return a rendered prompt without the beginning that a backend's own tokenizer adds once more."""
        for token in self._beginning:
            text = text.removeprefix(token)
        return text

    def special(self) -> frozenset[str]:
        """Return the texts of special tokens, which backends leave out of an answer unless told otherwise."""
        return frozenset(text for text, special in self.added().items() if special)

    def added(self) -> dict[str, bool]:
        """Return the texts that are tokens wherever they stand, and whether these are special."""
        return {token.content: token.special for token in self._tokenizer.get_added_tokens_decoder().values()}

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, without special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def shown(self, id_: int) -> str:
        """Return the text of an id by itself: a special token's name, and the space with which it begins."""
        stream = self.stream([id_], special=True)
        return stream.push([id_]) + stream.end()

    def stream(self, before: Sequence[int] = (), *, special: bool = False) -> "TextStream":
        """Return a decoder for ids that come one after the other; `special`: special tokens are text, too.

        They go on from the ids `before`, if there are any: a space at their beginning is text then.
        """
        return TextStream(self._tokenizer, before, special=special)


class TextStream:
    """The text of one answer's ids, as far as it is certain: characters come whole."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = (), *, special: bool) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._held: list[int] = []
        self._begin()
        for each in before:
            self._stream.step(tokenizer, each)

    def push(self, ids: Sequence[int]) -> str:
        """Return the text that is certain with these ids."""
        pieces = []
        for each in ids:
            self._held.append(each)
            try:
                piece = self._stream.step(self._tokenizer, each)
            except Exception:  # noqa: BLE001 - the library raises nothing more specific
                # Of bytes in a row of which some are no character, it takes none for one. Where the first of
                # them have been returned as one already, it gives up. What is held begins behind those.
                self._begin()
                piece = "".join(self._stream.step(self._tokenizer, held) or "" for held in self._held)
            if piece is not None:
                pieces.append(piece)
                self._held.clear()
        return "".join(pieces)

    def _begin(self) -> None:
        self._stream = DecodeStream(skip_special_tokens=not self._special)

    def end(self) -> str:
        """Return what stands for a character that never became whole; empty: there is none."""
        held, self._held = self._held, []
        return self._tokenizer.decode(held, skip_special_tokens=not self._special)


def _dropping_guards(tokenizer: Tokenizer) -> Tokenizer:
    """Return the same tokenizer, of the same vocabulary in memory, which drops `GUARD` from texts.

    Added tokens are looked for in the text as it came, then its normalizer runs, and that drops the guards:
    what they stood within is split and merged as other text is. Tokenizers may look for some of these tokens
    only in what the normalizer leaves, where no guard is, and where it may have made such a token of other
    text. Here those that may be control tokens come first, too, but for marks that the normalizer would
    change, as one does that puts a space before each: they are found where they were, as are all others.
    """
    made, drop = Tokenizer(tokenizer.model), normalizers.Replace(GUARD, "")
    own = tokenizer.normalizer
    made.normalizer = drop if own is None else normalizers.Sequence([drop, own])
    if tokenizer.pre_tokenizer is not None:
        made.pre_tokenizer = tokenizer.pre_tokenizer
    added = sorted(tokenizer.get_added_tokens_decoder().items())

    def is_late(token: AddedToken) -> bool:
        changes = own is not None and own.normalize_str(token.content) != token.content
        return bool(token.normalized) and not token.special and (changes or not is_mark(token.content))

    made.add_tokens(
        [
            AddedToken(
                token.content,
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=is_late(token),
                special=token.special,
            )
            for _, token in added
        ]
    )
    return made


def _id_of(tokenizer: Tokenizer, token: Any) -> int | None:
    text = text_of(token)
    return None if text is None else tokenizer.token_to_id(text)


def _ids(value: Any) -> list[int]:
    """Return ids that are written as one number or a list."""
    return [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, int)]
