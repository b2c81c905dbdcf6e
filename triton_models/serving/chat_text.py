"""The text side of one model: its tokenizer, its chat format and its grammars, as serving uses them."""

import io
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from triton_models.directory import TOKENIZER_JSON, chat_template, detect_format
from triton_models.errors import InvalidGrammarError, ModelError, TextError
from triton_models.options import EntryParameters
from triton_models.text.answer import AnswerStream
from triton_models.text.formats import ChatFormat, TemplateFormat, chat_format
from triton_models.text.grammars import CompiledGrammar, Grammars
from triton_models.text.json_tokenizer import JsonTokenizer
from triton_models.text.tokenizers import Tokenizer, load_tokenizer
from wire.history import Turn
from wire.limits import IDS_LIMIT
from wire.meta import Tokenized
from wire.request import Detokenize, Generation, Tokenize

_TOKENIZER_FILES: Final = (
    TOKENIZER_JSON,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/tool_use.jinja",
)
"""What a gateway reads of a tokenizer's folder; all but the first may be missing."""


@dataclass(frozen=True, slots=True)
class ChatText:
    """A tokenizer, and the chat format and grammars that go with it."""

    tokenizer: Tokenizer
    format: ChatFormat
    grammars: Grammars
    archive: bytes = b""
    """The tokenizer's files as a zip archive; empty where no gateway needs them."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, chat_format: ChatFormat, archive: bytes = b"") -> "ChatText":
        """Build the text side of a model."""
        return cls(tokenizer, chat_format, Grammars(tokenizer, chat_format), archive)

    def compile_grammar(self, generation: Generation) -> CompiledGrammar | None:
        """Return the grammar that the answer must follow; None: it is unconstrained.

        Raises:
            InvalidGrammarError: the grammar cannot be enforced.
        """
        if generation.grammar is None:
            return None
        if generation.ignore_eos or generation.min_tokens:
            raise InvalidGrammarError(
                "ignore_eos and min_tokens contradict it: the answer ends where it ends"
            )
        return self.grammars.compile(
            generation.grammar, continues=generation.raw, metadata=generation.answer_metadata
        )

    def prompt_ids(self, generation: Generation, prompt: str, history: list[Turn]) -> list[int]:
        """Return the prompt's ids: rendered from the conversation or text, or as the client gave them.

        Raises:
            ModelError: the format cannot express it, or the request contradicts itself.
        """
        if generation.answer_metadata is not None and (generation.raw or generation.prompt_token_ids):
            raise ModelError("answer_metadata belongs to a conversation, not to raw text or ids")
        if generation.prompt_token_ids is not None:
            return generation.prompt_token_ids
        if not generation.raw:
            turns = [*history, Turn(generation.role, prompt)]
            return self.format.render_turns(turns, answer_metadata=self._metadata(generation))
        if history or generation.role != "user":
            raise ModelError("raw excludes history and role")
        return self.format.render_text(prompt)

    def echo(self, generation: Generation, prompt: str, ids: list[int], stream: AnswerStream) -> str:
        """Return the prompt's text to put before the answer that `stream` makes; empty without echo.

        Text is repeated as given; ids are decoded, and special ones only shown with `show_special`.

        Raises:
            ModelError: the prompt is a conversation.
        """
        if not generation.echo:
            return ""
        if generation.prompt_token_ids is not None:
            return stream.echo(ids)
        if not generation.raw:
            raise ModelError("echo belongs to raw text or ids, not to a conversation")
        return prompt

    def stop_ids(self, generation: Generation) -> frozenset[int]:
        """Return the ids that end the answer: the format's unless ignored, and the request's own."""
        own = frozenset(generation.stop_token_ids)
        return own if generation.ignore_eos else own | self.format.stop_ids

    def answer(self, generation: Generation) -> AnswerStream:
        """Return a new stream from token ids to text.

        Raises:
            ModelError: `show_special` and `end_after_call_of` are both set.
        """
        if generation.show_special and generation.end_after_call_of:
            raise ModelError("show_special excludes end_after_call_of")
        return AnswerStream(
            self.tokenizer,
            self.format,
            generation.stop,
            generation.min_tokens,
            raw=generation.raw,
            blank_start=generation.blank_start,
            metadata=self._metadata(generation),
            end_after_call_of=generation.end_after_call_of,
            include_stop=generation.include_stop,
            show_special=generation.show_special,
            echoes=generation.echo and generation.prompt_token_ids is not None,
        )

    def tokenize(self, request: Tokenize, prompt: str, history: list[Turn]) -> Tokenized:
        """Return the ids of a text or a conversation.

        Raises:
            ModelError: the format cannot express it, there are too many ids, or text has a history.
        """
        if request.tokenize == "conversation":
            ids = self.format.render_turns(
                [*history, Turn(request.role, prompt)],
                add_generation_prompt=request.add_generation_prompt,
                answer_metadata=request.answer_metadata,
            )
        elif history:
            raise ModelError("text excludes history")
        else:
            ids = self.format.render_text(prompt) if request.prefix else self.tokenizer.encode(prompt)
        if len(ids) > IDS_LIMIT:
            raise TextError(f"it comes to {len(ids)} tokens, and at most {IDS_LIMIT} are returned")
        return Tokenized(ids=ids, strings=self._strings(ids) if request.strings else None)

    def detokenize(self, request: Detokenize, vocabulary: int) -> tuple[str, Tokenized]:
        """Return the text of ids of a model that has `vocabulary` ids.

        Raises:
            TextError: the model has no such id.
        """
        ids = request.detokenize
        for at, token_id in enumerate(ids):
            if token_id >= vocabulary:
                raise TextError(f"id {token_id} at place {at}: the model has {vocabulary} ids")
        strings = self._strings(ids) if request.strings else None
        return self.tokenizer.decode(ids), Tokenized(strings=strings)

    def _strings(self, ids: list[int]) -> list[str]:
        display = self.tokenizer.display
        return [display(token_id)[0] for token_id in ids]

    def _metadata(self, generation: Generation) -> str | None:
        """Return the answer's first line if the model is not to choose it; empty if it must be text."""
        grammar = generation.grammar
        is_text = grammar is not None and grammar.kind != "tool_calls" and not generation.raw
        if generation.answer_metadata is None and is_text and self.format.call_syntax:
            return ""
        return generation.answer_metadata


def load_text(parameters: EntryParameters) -> ChatText:
    """Load the tokenizer and choose the chat format.

    Raises:
        ModelError: a file is missing or broken, or the format cannot be determined.
    """
    directory = parameters.checkpoint
    name = parameters.options.get("format") or detect_format(directory)
    templated = name == TemplateFormat.name
    tokenizer = JsonTokenizer(directory) if templated else load_tokenizer(directory, name)
    archive = archive_of(directory) if templated else b""
    return ChatText.of(tokenizer, chat_format(name, tokenizer, chat_template(directory)), archive)


def archive_of(directory: Path) -> bytes:
    """Return the tokenizer's files as they are now, with the weights that are loaded.

    Equal files make equal archives, so that a gateway reads those of several replicas once.
    """
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in _TOKENIZER_FILES:
            if (file := directory / name).is_file():
                # Its own date, not the file's.
                archive.writestr(zipfile.ZipInfo(name), file.read_bytes(), zipfile.ZIP_DEFLATED)
    return written.getvalue()
