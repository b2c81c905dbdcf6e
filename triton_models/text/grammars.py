"""Grammars over token ids: compiled once; before each token they determine which ids may come next.

llguidance does the parsing, over the bytes that ids add to a text (`_Pieces`). A token is allowed if some
text of the grammar continues with its bytes, even if the tokenizer would split that text differently: the
model chooses. Of the special ids, only those that end an answer are allowed, where the grammar can end, and
in grammars of kind `tool_calls` the one that begins a segment.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from itertools import takewhile
from typing import Final, Protocol, TypeVar

import llguidance
import numpy as np
from numpy.typing import NDArray

from triton_models.errors import InvalidGrammarError, TokenMaskError, panics_are_errors
from triton_models.text.call_grammar import call_document, parts
from triton_models.text.formats import ChatFormat
from triton_models.text.grammar_text import about_grammar, about_mask, text_document
from triton_models.text.raw_call_grammar import raw_call_document
from triton_models.text.tokenizers import Tokenizer, ids_within
from wire.grammar import Grammar

CACHED: Final = 64
"""Most compiled grammars in the cache."""

CACHED_CHARACTERS: Final = 2_000_000
"""Most characters of all cached grammars. The largest were measured to take 200 bytes per character."""

FORCED_BYTES: Final = 256
"""Of a text that must come, so many bytes are split into tokens: more than a step's guesses."""

LIMITS: Final = llguidance.LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    step_max_items=25_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
"""At worst 1 s to compile, about 10 ms per mask and 100 MB: all other requests wait for a step's masks."""

COMPILE_S: Final = 10.0
"""Ten times what the worst grammar within `LIMITS` takes: one that takes longer is refused."""

COMPILED_AT_ONCE: Final = 3
"""Threads that compile, with those that were given up: nothing can end these but the limits."""

SPENT_AFTER: Final = 5_000
"""Number of tokens after which a grammar is recompiled for later answers. All its answers share the states of
one lexer, which reached `max_lexer_states` after 50 000 tokens in the worst case that was measured."""

TRIED: Final = 8
"""Tokens that are tried after each opening when a grammar is compiled: the first masks of an object with
thousands of properties are the most expensive."""

NAMES: Final = ("[a-z]{1,30}", "[a-zA-Z0-9_]{1,30}")
"""Tokens that a mask takes all at once, beside llguidance's own for text in quotes. To look at each of
150,000 that may stand in a name takes a millisecond (bench/LOG.md)."""

STACK_BYTES: Final = 2**28
"""llguidance needs up to 10 KB of stack for each rule in a chain of references, and a grammar of 2^18
characters can contain thousands. Such grammars were measured to compile with half of this size. The usual 8
MiB would overflow, which ends the process. Memory is only used as deep as the recursion goes."""

_LIBRARY = "llguidance"
_NO_MASK, _LEFT = "the answer cannot go on by its grammar", "the answer has left its grammar"
_WORD_BITS = 32
_SPECIAL_ID = b"\xff"
"""What llguidance puts before a special id among bytes."""
_TOO_FEW_CPUS = 2

T = TypeVar("T")

_stack_size_lock = threading.Lock()


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

    Attributes:
        matcher: the parser at the beginning of an answer.
        allowed: the bits of the ids that may be part of any answer.
        encode: splits a part of an answer into ids, as a model most likely does.
        tokens: number of tokens of all answers; it does no harm if threads occasionally count two as one.
        failed: whether it is used for no further answer: the fault may be in the shared state.
    """

    def __init__(
        self, matcher: llguidance.LLMatcher, allowed: NDArray[np.int32], encode: Callable[[str], list[int]]
    ) -> None:
        self.matcher = matcher
        self.allowed = allowed
        self.encode = encode
        self.tokens = 0
        self.failed = False

    @property
    def spent(self) -> bool:
        """Whether the grammar must be recompiled for later answers."""
        return self.failed or self.tokens >= SPENT_AFTER

    def mask(self) -> "GrammarMask":
        """Return the mask for a new answer; thread-safe."""
        with panics_are_errors(_LIBRARY), self.noting_failure():
            return GrammarMask(self)

    def may_hold(self, token_id: int) -> bool:
        """Whether the id may be part of any answer."""
        word, bit = divmod(token_id, _WORD_BITS)
        return word < len(self.allowed) and bool(self.allowed[word] >> bit & 1)

    @contextmanager
    def noting_failure(self) -> Iterator[None]:
        """Note a failure of the block.

        Every exception counts, including panics, which do not derive from `Exception`.
        """
        try:
            yield
        except BaseException:
            self.failed = True
            raise


class GrammarMask:
    """The tokens with which one answer may continue. Used by one thread at a time.

    What looks ahead is a second parser, told the same tokens: whatever a guess does to it, as reaching a
    limit, the answer goes on as without guesses. (Copies of the first would take longer the longer the answer
    is.) Once it has failed, it forces nothing and takes no token.
    """

    def __init__(self, grammar: CompiledGrammar) -> None:
        self.grammar = grammar
        self.matcher = grammar.matcher.deep_copy()
        self._scout: llguidance.LLMatcher | None = None
        """Made when it is first needed."""
        self._untold: list[int] = []
        """Tokens that the scout has yet to be told."""

    def fill(self, words: Words) -> None:
        """Write to `words` a set bit for each token that may come next, and clear the others.

        Raises:
            TokenMaskError: the grammar is too complex at this position, or nothing can follow.
        """
        found = self.words()
        words.numpy()[: len(found)] = found

    def words(self) -> NDArray[np.int32]:
        """Return what `fill` writes."""
        with self.grammar.noting_failure():
            words = np.zeros_like(self.grammar.allowed)
            self.matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            words &= self.grammar.allowed
            if self.matcher.is_error() or not words.any():
                raise self.error(_NO_MASK)
            return words

    @classmethod
    def fill_all(
        cls, masks: Sequence["GrammarMask"], words: Words, rows: Sequence[int]
    ) -> list[TokenMaskError | None]:
        """Fill the rows of all masks in one call; return the error of each, or None."""
        alike = len({id(mask.grammar.allowed) for mask in masks}) == 1
        allowed = masks[0].grammar.allowed if alike else np.stack([mask.grammar.allowed for mask in masks])
        found = np.empty((len(masks), allowed.shape[-1]), dtype=np.int32)
        if (thread := _thread()) is not None:
            matchers = [(mask.matcher, place) for place, mask in enumerate(masks)]
            thread.unsafe_compute_mask_ptr(matchers, found.ctypes.data, found.strides[0], len(found))
        else:
            for mask, row in zip(masks, found, strict=True):
                mask.matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        found &= allowed
        words.numpy()[rows, : allowed.shape[-1]] = found
        return [
            mask.error(_NO_MASK) if mask.matcher.is_error() or not some else None
            for mask, some in zip(masks, found.any(axis=1).tolist(), strict=True)
        ]

    @classmethod
    def accept_all(
        cls, masks: Sequence["GrammarMask"], token_ids: Sequence[int]
    ) -> list[TokenMaskError | None]:
        """Continue all masks, each after its token, in one call; return the error of each, or None."""
        told = [(mask.matcher, token_id) for mask, token_id in zip(masks, token_ids, strict=True)]
        with ExitStack() as noting:
            # It is unknown whose failure it is.
            for grammar in {id(mask.grammar): mask.grammar for mask in masks}.values():
                noting.enter_context(grammar.noting_failure())
            if (thread := _thread()) is not None:
                taken = thread.consume_token_par(told)
            else:
                taken = [matcher.consume_token(token_id) for matcher, token_id in told]
        errors: list[TokenMaskError | None] = []
        for mask, token_id, right in zip(masks, token_ids, taken, strict=True):
            mask.note(token_id)
            errors.append(None if right else mask.error(_LEFT))
        return errors

    def accept(self, token_id: int) -> None:
        """Continue after `token_id`.

        Raises:
            TokenMaskError: the grammar does not allow the token.
        """
        self.note(token_id)
        with self.grammar.noting_failure():
            if not self.matcher.consume_token(token_id):
                raise self.error(_LEFT)

    def note(self, token_id: int) -> None:
        """Note that the answer continues after `token_id`, which the parser is told."""
        self.grammar.tokens += 1
        if self._scout is not None:
            self._untold.append(token_id)

    @property
    def scout(self) -> llguidance.LLMatcher:
        """The parser that looks ahead."""
        if self._scout is None:
            self._scout = self.matcher.deep_copy()
        elif self._untold:
            self._scout.consume_tokens(self._untold)
            self._untold.clear()
        return self._scout

    def forced(self) -> Sequence[int]:
        """Return the next tokens, as the tokenizer splits the text that must come, but for the last.

        llguidance's own forcing is off (`grammar_text`), and stays so: these are guesses, which a model that
        splits the text differently does not follow.
        """
        with self.grammar.noting_failure():
            text, *_ = self.scout.compute_ff_bytes()[:FORCED_BYTES].split(_SPECIAL_ID)
        # One byte is one token at most.
        return self.grammar.encode(text.decode("utf-8", "ignore"))[:-1] if len(text) > 1 else ()

    def takes(self, tokens: Sequence[int]) -> int:
        """Return how many of `tokens` may come next, one after the other."""
        # llguidance would fail on an id that it does not know.
        known = list(takewhile(self.grammar.may_hold, tokens))
        with self.grammar.noting_failure():
            return self.scout.validate_tokens(known)

    def fill_ahead(self, tokens: Sequence[int], rows: Sequence[Words]) -> None:
        """Do what `fill` does for each of `rows`, each after one more of `tokens`; leave those that fail."""
        told = 0
        with self.grammar.noting_failure():
            scout = self.scout
            for token_id, row in zip(tokens, rows, strict=True):
                # A wrong guess makes states of the lexer, too.
                self.grammar.tokens += 1
                if not scout.consume_token(token_id):
                    break
                told += 1
                words = np.zeros_like(self.grammar.allowed)
                scout.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
                if scout.is_error():
                    break
                row.numpy()[: len(words)] = words & self.grammar.allowed
            scout.rollback(told)

    def error(self, what: str) -> TokenMaskError:
        """Return `what` with its reason, as an error after which the grammar is used for no new answer."""
        self.grammar.failed = True
        return TokenMaskError(f"{what}: {about_mask(self.matcher.get_error())}")


@cache
def _thread() -> llguidance.LLExecutor | None:
    """Return the thread that fills or tells many masks in one call; None on few CPUs.

    So the interpreter lock is released once. The caller's own thread is as fast, and need not wait until the
    other has a CPU; but it releases the lock for each mask, and other threads give it back late.

    More threads would be slower. All masks of a grammar share one lexer and its lock, so they would wait for
    each other: the masks of 64 answers took 3.8 ms on 12 threads, and 0.75 ms on one.
    """
    return llguidance.LLExecutor(num_threads=1) if (os.cpu_count() or 1) > _TOO_FEW_CPUS else None


class Grammars:
    """Compiles grammars for one model, and caches the most recently used. Thread-safe.

    Args:
        tokenizer: the model's tokenizer.
        chat_format: the model's, which says how answers and segments end, and how calls are written.
    """

    def __init__(self, tokenizer: Tokenizer, chat_format: ChatFormat) -> None:
        """Prepare llguidance's form of the vocabulary, which takes tenths of a second."""
        self._format = chat_format
        self._text_tokenizer = tokenizer
        self._pieces = _Pieces(tokenizer)
        blanks, *texts = llguidance.LLTokenizer.general_slices()
        self._tokenizer = llguidance.LLTokenizer(
            self._pieces, eos_token=sorted(chat_format.stop_ids), slices=[blanks, *NAMES, *texts]
        )
        self._allowed = np.zeros(-(-tokenizer.size // _WORD_BITS) * _WORD_BITS, dtype=np.uint8)
        self._allowed[: tokenizer.size] = 1
        self._allowed[self._pieces.special_token_ids] = 0
        self._allowed[list(chat_format.stop_ids)] = 1
        self._words = _packed(self._allowed)
        visible = [(len(each), at) for at, each in enumerate(self._pieces.texts) if each.strip()]
        self._smallest_first = np.array([at for _, at in sorted(visible)], dtype=np.int64)
        self._lock = threading.Lock()
        self._threads = threading.BoundedSemaphore(COMPILED_AT_ONCE)
        self._compiled: OrderedDict[tuple[Grammar, bool, str | None], CompiledGrammar] = OrderedDict()

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
            InvalidGrammarError: the grammar is broken or too large, or cannot be enforced. The message names
                the part of a grammar of kind `tool_calls` that cannot be compiled alone either.
            LibraryPanicError: llguidance panicked.
        """
        key = (grammar, continues, metadata)
        with self._lock:
            if (found := self._compiled.get(key)) is not None and not found.spent:
                self._compiled.move_to_end(key)
                return found
        if not self._threads.acquire(timeout=COMPILE_S):
            raise InvalidGrammarError("others that take too long are being compiled; try again later")

        compile_it = partial(self._compile_or_blame, grammar, continues=continues, metadata=metadata)
        try:
            with panics_are_errors(_LIBRARY):
                compiled = on_deep_stack(compile_it, COMPILE_S, self._threads.release)
        except TimeoutError:
            raise InvalidGrammarError(f"it takes more than {COMPILE_S:g} s to compile") from None
        except RecursionError:
            raise InvalidGrammarError("it is nested too deeply") from None
        with self._lock:
            self._compiled[key] = compiled
            self._compiled.move_to_end(key)
            while len(self._compiled) > CACHED or self._cached_characters() > CACHED_CHARACTERS:
                self._compiled.popitem(last=False)
        return compiled

    def _cached_characters(self) -> int:
        return sum(len(grammar.text) for grammar, *_ in self._compiled)

    def _compile_or_blame(
        self, grammar: Grammar, *, continues: bool, metadata: str | None
    ) -> CompiledGrammar:
        try:
            return self._compile(grammar, continues=continues, metadata=metadata)
        except InvalidGrammarError:
            for part, alone in parts(grammar.text) if grammar.kind == "tool_calls" else ():
                try:
                    self._compile(alone, continues=continues)
                except InvalidGrammarError as error:
                    raise InvalidGrammarError(part.blamed(str(error))) from None
            raise

    def _compile(self, grammar: Grammar, *, continues: bool, metadata: str | None = None) -> CompiledGrammar:
        prefix = " " if self._pieces.hides_space and not continues else ""
        words = self._words
        if grammar.kind == "tool_calls" and continues:
            document = raw_call_document(grammar, self._text_tokenizer.special_ids)
        elif grammar.kind == "tool_calls":
            syntax, segment_id = self._format.call_syntax, next(iter(self._format.segment_roles), None)
            if syntax is None or segment_id is None:
                raise InvalidGrammarError("calls cannot be enforced: the model's format has none here")
            document = call_document(
                grammar.text, prefix=prefix, metadata=metadata, syntax=syntax, segment_id=segment_id
            )
        else:
            document = text_document(grammar, prefix=prefix)
        if document.special_ids:
            allowed = self._allowed.copy()
            allowed[[*document.special_ids]] = 1
            words = _packed(allowed)
        matcher = llguidance.LLMatcher(self._tokenizer, document.text(), limits=LIMITS, log_level=0)
        if matcher.is_error():
            raise InvalidGrammarError(about_grammar(matcher.get_error(), document))
        compiled = CompiledGrammar(matcher, words, partial(ids_within, self._text_tokenizer))
        # This compiles now what llguidance compiles on first use, and checks that an answer can begin.
        for opening in document.openings:
            try:
                self._try(compiled.mask(), opening)
            except TokenMaskError as error:
                raise InvalidGrammarError(f"no answer can begin by this grammar ({error})") from None
        return compiled

    def _try(self, mask: GrammarMask, opening: str) -> None:
        """Try an answer that begins with `opening` and continues with the shortest visible tokens.

        Raises:
            TokenMaskError: no answer can begin in this way.
        """
        for token_id in self._tokenizer.greedy_tokenize(opening):
            mask.accept(token_id)
        for _ in range(TRIED):
            allowed = np.unpackbits(mask.words().view(np.uint8), bitorder="little")[self._smallest_first]
            if not allowed.any():
                return
            mask.accept(int(self._smallest_first[allowed.argmax()]))


def _packed(allowed: NDArray[np.uint8]) -> NDArray[np.int32]:
    """Return an array of 0 and 1 as bits."""
    return np.packbits(allowed, bitorder="little").view(np.int32)


class _Pieces(llguidance.TokenizerWrapper):
    """The bytes that the ids of a tokenizer add to a text, with the interface that llguidance wants.

    It never tokenizes a text: see `no_forcing`.

    Attributes:
        texts: the bytes of each id; empty if it is not text (special and control ids, the unknown token).
        hides_space: whether a separate text, such as an answer in a conversation, begins with a space that is
            not shown: SentencePiece's dummy prefix, which every text had in training.
    """

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer) -> None:
        pieces = [tokenizer.piece(token_id) for token_id in range(tokenizer.size)]
        self.hides_space = " " in pieces
        # A string loses its leading space at the beginning of a text; bytes never do. So in a vocabulary with
        # both, the byte piece for a space is left out: the space would be visible there.
        left_out = b" " if self.hides_space else None
        self.texts = [
            each.encode() if isinstance(each, str) else b"" if each == left_out else each for each in pieces
        ]
        self.eos_token_id = tokenizer.eos_id
        self.bos_token_id = None
        self.tokens = [each or b"<%d>" % token_id for token_id, each in enumerate(self.texts)]
        self.special_token_ids = [token_id for token_id, each in enumerate(self.texts) if not each]

    def __call__(self, text: str) -> list[int]:
        raise NotImplementedError


def on_deep_stack(
    function: Callable[[], T], timeout_s: float | None = None, done: Callable[[], object] = lambda: None
) -> T:
    """Run `function` on a thread with a large stack; return what it returns, or raise what it raises.

    `done` is called once the thread is not needed any more, or cannot be had.

    Raises:
        TimeoutError: it took longer than `timeout_s`; the thread is left alone, and keeps no process alive.
        RuntimeError: there is no thread to be had.
    """
    result: Future[T] = Future()
    result.add_done_callback(lambda _: done())

    def run() -> None:
        try:
            result.set_result(function())
        except BaseException as error:  # noqa: BLE001 - panics, too: the caller's
            result.set_exception(error)

    with _stack_size_lock:
        # The setting is for the whole process: another thread that starts now gets a larger one, too.
        usual = threading.stack_size(STACK_BYTES)
        try:
            threading.Thread(target=run, name="deep-stack", daemon=True).start()
        except RuntimeError as error:
            result.set_exception(error)
        finally:
            threading.stack_size(usual)
    return result.result(timeout_s)
