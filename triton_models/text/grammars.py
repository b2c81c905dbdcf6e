"""Grammars over token ids: compiled once; before each token they determine which ids may come next.

llguidance does the parsing, over the bytes that ids add to a text (`Vocabulary`). A token is allowed if some
text of the grammar continues with its bytes, even if the tokenizer would split that text differently: the
model chooses. Of the special ids, only those that end an answer are allowed, where the grammar can end, and
in grammars of kind `tool_calls` the one that begins a segment.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Final, Protocol, TypeVar

import llguidance
import numpy as np
from numpy.typing import NDArray

from triton_models.errors import InvalidGrammarError, TokenMaskError, panics_are_errors
from triton_models.text.call_grammar import call_document
from triton_models.text.grammar_text import about_grammar, about_mask, text_document
from triton_models.text.tokenizers import Tokenizer
from wire.grammar import Grammar

CACHED: Final = 64
"""Most compiled grammars in the cache."""

CACHED_CHARACTERS: Final = 2_000_000
"""Most characters of all cached grammars. The largest were measured to take 200 bytes per character."""

LIMITS: Final = llguidance.LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    step_max_items=25_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
"""At worst 1 s to compile, about 10 ms per mask and 100 MB: all other requests wait for a step's masks."""

SPENT_AFTER: Final = 5_000
"""Number of tokens after which a grammar is recompiled for later answers. All its answers share the states of
one lexer, which reached `max_lexer_states` after 50 000 tokens in the worst case that was measured."""

TRIED: Final = 8
"""Tokens that are tried after each opening when a grammar is compiled: the first masks of an object with
thousands of properties are the most expensive."""

STACK_BYTES: Final = 2**28
"""llguidance needs up to 10 KB of stack for each rule in a chain of references, and a grammar of 2^18
characters can contain thousands. Such grammars were measured to compile with half of this size. The usual 8
MiB would overflow, which ends the process. Memory is only used as deep as the recursion goes."""

_LIBRARY = "llguidance"
_WORD_BITS = 32
_TOO_FEW_CPUS = 2

T = TypeVar("T")

_stack_size_lock = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The bytes that the ids of one tokenizer add to a text.

    `pieces` holds them at the index of each id; None if it is not text (special and control ids, the unknown
    token). If `hides_space` is true, a separate text, such as an answer in a conversation, begins with a
    space that is not shown: SentencePiece's dummy prefix, which every text had in training.
    """

    pieces: Sequence[bytes | None]
    hides_space: bool


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    """Return the vocabulary of `tokenizer`.

    A piece that is a string loses its leading space at the beginning of a text; bytes never do. So in a
    vocabulary with both, the byte piece for a space is left out: the space would be visible there.
    """
    pieces = [tokenizer.piece(token_id) for token_id in range(tokenizer.size)]
    hides_space = " " in pieces
    utf8 = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
    return Vocabulary(
        pieces=[
            None if not each or (hides_space and piece == b" ") else each
            for piece, each in zip(pieces, utf8, strict=True)
        ],
        hides_space=hides_space,
    )


class Words(Protocol):
    """A row of a bit mask, as passed to `engine.sampling.TokenMask`: an int32 tensor on the CPU."""

    def numpy(self) -> NDArray[np.int32]:
        """Return an array that shares the row's memory."""
        ...


class CompiledGrammar:
    """A compiled grammar, for any number of answers, in sequence or at the same time.

    Each mask has its own copy of the parser, but all masks share one lexer, which llguidance guards with a
    lock. The states that the lexer creates for one answer count towards the limit of all, and are never
    freed. So a grammar can only be used for a limited number of tokens.
    """

    def __init__(self, matcher: llguidance.LLMatcher, allowed: NDArray[np.int32]) -> None:
        self._matcher = matcher
        self._allowed = allowed
        self._tokens = 0
        self._failed = False

    @property
    def spent(self) -> bool:
        """Whether the grammar must be recompiled for later answers."""
        return self._failed or self._tokens >= SPENT_AFTER

    def mask(self) -> "GrammarMask":
        """Return the mask for a new answer; thread-safe."""
        with panics_are_errors(_LIBRARY), self.noting_failure():
            return GrammarMask(self, self._matcher.deep_copy(), self._allowed)

    def note_token(self) -> None:
        """Count a token of an answer; it does no harm if threads occasionally count two as one."""
        self._tokens += 1

    def note_failure(self) -> None:
        """Use this grammar for no further answer: the fault may be in the shared state."""
        self._failed = True

    @contextmanager
    def noting_failure(self) -> Iterator[None]:
        """Note a failure of the block.

        Every exception counts, including panics, which do not derive from `Exception`.
        """
        try:
            yield
        except BaseException:
            self.note_failure()
            raise


class GrammarMask:
    """The tokens with which one answer may continue. Used by one thread at a time."""

    def __init__(
        self, grammar: CompiledGrammar, matcher: llguidance.LLMatcher, allowed: NDArray[np.int32]
    ) -> None:
        self._grammar = grammar
        self.matcher = matcher
        self.allowed = allowed

    def fill(self, words: Words) -> None:
        """Write to `words` a set bit for each token that may come next, and clear the others.

        Raises:
            TokenMaskError: the grammar is too complex at this position, or nothing can follow.
        """
        self.fill_row(words.numpy())

    def fill_row(self, row: NDArray[np.int32]) -> None:
        """Like `fill`, with an array."""
        with self._grammar.noting_failure():
            row = row[: len(self.allowed)]
            self.matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            row &= self.allowed
            if self.matcher.is_error() or not row.any():
                raise self.filling_error()

    @classmethod
    def fill_all(cls, masks: Sequence["GrammarMask"], rows: Sequence[Words]) -> list[TokenMaskError | None]:
        """Fill the words of all masks in one call; return the error of each, or None."""
        allowed = np.stack([mask.allowed for mask in masks])
        words = np.zeros_like(allowed)
        if (executor := _executor()) is not None:
            matchers = [(mask.matcher, place) for place, mask in enumerate(masks)]
            executor.unsafe_compute_mask_ptr(matchers, words.ctypes.data, words.strides[0], len(words))
        else:
            for mask, row in zip(masks, words, strict=True):
                mask.matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        words &= allowed
        errors: list[TokenMaskError | None] = []
        for mask, target, found, some in zip(masks, rows, words, words.any(axis=1).tolist(), strict=True):
            target.numpy()[: len(found)] = found
            failed = mask.matcher.is_error() or not some
            errors.append(mask.filling_error() if failed else None)
        return errors

    def accept(self, token_id: int) -> None:
        """Continue after `token_id`.

        Raises:
            TokenMaskError: the grammar does not allow the token.
        """
        with self._grammar.noting_failure():
            self._grammar.note_token()
            if not self.matcher.consume_token(token_id):
                raise self._error("the answer has left its grammar")

    def filling_error(self) -> TokenMaskError:
        """Return why there is no mask at this position."""
        self._grammar.note_failure()
        return self._error("the answer cannot go on by its grammar")

    def _error(self, what: str) -> TokenMaskError:
        return TokenMaskError(f"{what}: {about_mask(self.matcher.get_error())}")


@cache
def _executor() -> llguidance.LLExecutor | None:
    """Return the threads that fill masks: 80 % of the CPUs, llguidance's choice; None if that is one thread.

    The caller's own thread is as fast as one other, and need not wait until that has a CPU.
    """
    return llguidance.LLExecutor() if (os.cpu_count() or 1) > _TOO_FEW_CPUS else None


class Grammars:
    """Compiles grammars for one model, and caches the most recently used. Thread-safe.

    Args:
        vocabulary: the bytes of the ids of the model's tokenizer.
        stop_ids: the ids with which the model ends an answer.
        segment_id: the id with which the model begins another segment, if its chat format has one.
        call_format: the chat format whose notation the model's tool calls have; None: the model has no tools.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        stop_ids: Collection[int],
        *,
        segment_id: int | None = None,
        call_format: str | None = None,
    ) -> None:
        self._vocabulary = vocabulary
        self._stop_ids = sorted(stop_ids)
        self._segment_id = segment_id
        self._call_format = call_format
        self._lock = threading.Lock()
        self._tokenizer: llguidance.LLTokenizer | None = None
        pieces = vocabulary.pieces
        self._is_text = np.zeros(-(-len(pieces) // _WORD_BITS) * _WORD_BITS, dtype=np.uint8)
        self._is_text[: len(pieces)] = [piece is not None for piece in pieces]
        visible = [(len(piece), at) for at, piece in enumerate(pieces) if piece and not piece.isspace()]
        self._smallest_first = np.array([at for _, at in sorted(visible)], dtype=np.int64)
        self._compiled: OrderedDict[tuple[str, str, bool, str | None], CompiledGrammar] = OrderedDict()

    def compile(
        self, grammar: Grammar, *, continues: bool = False, metadata: str | None = None
    ) -> CompiledGrammar:
        """Return `grammar`, compiled.

        Usually takes milliseconds; a very large one takes a second, mostly without the interpreter lock.

        Args:
            grammar: in the wire's form.
            continues: the answer continues other text.
            metadata: the answer's first line, if it is part of the prompt.

        Raises:
            InvalidGrammarError: the grammar is broken or too large, or cannot be enforced.
            LibraryPanicError: llguidance panicked.
        """
        key = (grammar.kind, grammar.text, continues, metadata)
        with self._lock:
            if (found := self._compiled.get(key)) is not None and not found.spent:
                self._compiled.move_to_end(key)
                return found
        try:
            with panics_are_errors(_LIBRARY):
                compiled = on_deep_stack(lambda: self._compile(grammar, continues, metadata))
        except RecursionError:
            raise InvalidGrammarError("it is nested too deeply") from None
        with self._lock:
            self._compiled[key] = compiled
            self._compiled.move_to_end(key)
            while len(self._compiled) > CACHED or self._cached_characters() > CACHED_CHARACTERS:
                self._compiled.popitem(last=False)
        return compiled

    def _cached_characters(self) -> int:
        return sum(len(text) for _, text, *_ in self._compiled)

    def _compile(self, grammar: Grammar, continues: bool, metadata: str | None) -> CompiledGrammar:  # noqa: FBT001
        prefix = " " if self._vocabulary.hides_space and not continues else ""
        if grammar.kind == "tool_calls":
            document = call_document(
                grammar.text,
                prefix=prefix,
                metadata=metadata,
                call_format=None if continues else self._call_format,
                segment_id=self._segment_id,
            )
        else:
            document = text_document(grammar, prefix=prefix)
        matcher = llguidance.LLMatcher(self.prepare(), document.text(), limits=LIMITS, log_level=0)
        if matcher.is_error():
            raise InvalidGrammarError(about_grammar(matcher.get_error(), document))
        allowed = self._is_text.copy()
        allowed[self._stop_ids] = 1
        if grammar.kind == "tool_calls":
            allowed[self._segment_id] = 1
        compiled = CompiledGrammar(matcher, np.packbits(allowed, bitorder="little").view(np.int32))
        # This compiles now what llguidance compiles on first use, and checks that an answer can begin.
        for opening, part in document.openings.items():
            try:
                self._try(compiled.mask(), opening)
            except TokenMaskError as error:
                words = f"no answer can begin by this grammar ({error})"
                raise InvalidGrammarError(words if part is None else part.blamed(words)) from None
        return compiled

    def _try(self, mask: GrammarMask, opening: str) -> None:
        """Try an answer that begins with `opening` and continues with the shortest visible tokens.

        Raises:
            TokenMaskError: no answer can begin in this way.
        """
        row = np.zeros(len(self._is_text) // _WORD_BITS, dtype=np.int32)
        for token_id in self.prepare().greedy_tokenize(opening):
            mask.accept(token_id)
        for _ in range(TRIED):
            mask.fill_row(row)
            allowed = np.unpackbits(row.view(np.uint8), bitorder="little")[self._smallest_first]
            if not allowed.any():
                return
            mask.accept(int(self._smallest_first[allowed.argmax()]))

    def prepare(self) -> llguidance.LLTokenizer:
        """Return llguidance's form of the vocabulary; the first call takes tenths of a second."""
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = llguidance.LLTokenizer(
                    _Wrapper(self._vocabulary, self._stop_ids[0]), eos_token=self._stop_ids
                )
            return self._tokenizer


class _Wrapper(llguidance.TokenizerWrapper):
    """A vocabulary with llguidance's interface, which never tokenizes a text: see `no_forcing`."""

    is_tokenizer_wrapper = True

    def __init__(self, vocabulary: Vocabulary, eos_id: int) -> None:
        pieces = vocabulary.pieces
        self.eos_token_id = eos_id
        self.bos_token_id = None
        self.tokens = [
            b"<%d>" % token_id if piece is None else piece for token_id, piece in enumerate(pieces)
        ]
        self.special_token_ids = [token_id for token_id, piece in enumerate(pieces) if piece is None]

    def __call__(self, text: str) -> list[int]:
        raise NotImplementedError


def on_deep_stack(function: Callable[[], T]) -> T:
    """Run `function` on a thread with a large stack; return what it returns, or raise what it raises."""
    with ThreadPoolExecutor(1, "deep-stack") as pool:
        with _stack_size_lock:
            # The setting is for the whole process: another thread that starts now gets a larger one, too.
            usual = threading.stack_size(STACK_BYTES)
            try:
                result = pool.submit(function)
            finally:
                threading.stack_size(usual)
        return result.result()
