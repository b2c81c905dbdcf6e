"""How the conversations of a model without a tokenizer of its own read: prompts as text, and their tokens."""

import io
import threading
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Final

from msgspec import structs

from gateway.chat.conversation import callable_names, last_calls
from gateway.chat.guards import unguarded
from gateway.chat.marked import MARKS, MarkedText
from gateway.chat.structural_tags import FORMS, CallForm
from gateway.chat.styles import CALL_LIST, CallStyle, style_of
from gateway.chat.templates import ChatTemplate, Folder, TemplateError
from gateway.chat.value_types import leaves, types_of
from gateway.chat.vocabulary import Vocabulary, VocabularyError
from gateway.core.request import Conversation, Image, PlainText, Prompt, Tool, ToolOffer, images_in
from gateway.core.upstream import Tokenization, Tokens
from gateway.errors import InvalidRequestError, NoTemplateError, UpstreamProtocolError
from wire.grammar import Grammar, Reasoning, ToolCalls

_CALL_ID: Final = "[CALL_ID]"
"""Where a template has calls with ids in them, no grammar says what those are."""
_HIDDEN: Final = "Special tokens mark the model's tool calls, and its backend leaves them out of answers."
_ARCHIVES: Final = 16
"""So many tokenizers that models send are kept; more are read anew where a model comes back."""
_one_at_a_time = threading.Lock()
_ARCHIVE_BYTES: Final = 2**28
"""Most that an archive may hold: a tokenizer.json has up to 40 MiB."""


@dataclass(frozen=True, slots=True)
class RenderedPrompt(PlainText):
    """A prompt as the text that its backend tokenizes, and what to look for in the answer."""

    tokens: int | None = None
    """None: they were not counted."""
    tools: tuple[str, ...] = ()
    """Names of those that may be called."""
    strings: Mapping[str, Mapping[str, bool]] = field(default_factory=dict)
    """By tool, the names of its parameters that are strings, and whether they may be null."""
    single: bool = False
    """At most one call is answered with."""
    thinks: bool = False
    """The answer may begin with reasoning."""
    thinking: bool = False
    """The prompt ends within it."""
    show_special: bool = False
    """The marks in the answer are special tokens, which the backend must not leave out."""
    ids: tuple[int, ...] = ()
    """Of the text, where the backend takes nothing else."""
    images: tuple[Image, ...] = ()
    """In the order in which the text refers to them."""
    converses: bool = False
    """It is a conversation: white space before the answer is none of it."""
    offer: ToolOffer | None = None
    """The tools that may be called, or must be."""
    listed: bool = False
    """The answer must be a list of calls (`gateway.chat.call_list`)."""
    grammar: Grammar | None = None
    """Of the answer, as our own engine takes it."""
    tagged: Mapping[str, Any] | None = None
    """The structural tag that the answer is held to (`gateway.chat.structural_tags`)."""


@dataclass(frozen=True, slots=True)
class ModelText:
    """How a model's conversations read, and how its tokens are counted: a tokenizer's folder."""

    template: ChatTemplate | None = None
    """None: of a base model, which continues text but converses with nobody, or not known here."""
    vocabulary: Vocabulary | None = None
    style: CallStyle | None = None
    """How it writes tool calls; None: not at all, or they cannot be told from text."""
    no_style: str = "The model's chat template has no tool calls that the gateway can read."
    """Why there is none, for clients."""
    thinks: bool = False
    """It may write its reasoning first."""
    marks: tuple[str, str] = MARKS[0]
    """What stands before and behind its reasoning."""
    special: frozenset[str] = frozenset()
    """Texts of its special tokens."""

    @classmethod
    def read(cls, folder: Folder) -> "ModelText":
        """Read a tokenizer's folder.

        Raises:
            VocabularyError: it has no tokenizer that can be used.
            TemplateError: it has a template that cannot.
        """
        vocabulary = Vocabulary.read(folder)
        template = ChatTemplate.read(folder, vocabulary.added())
        if template is None:
            return cls(vocabulary=vocabulary, special=vocabulary.special())
        marks = next((each for each in MARKS if template.mentions(each[1])), None)
        return cls(
            template,
            vocabulary,
            style_of(template.mentions),
            thinks=marks is not None,
            marks=marks or MARKS[0],
            special=vocabulary.special(),
        )

    def without_special(self) -> "ModelText":
        """Return how its conversations read where its backend leaves special tokens out of every answer.

        Nothing tells calls and reasoning from text whose marks are such tokens.
        """
        model = replace(self, thinks=self.thinks and self.special.isdisjoint(self.marks))
        if self.style is None or self.special.isdisjoint(_marks_of(self.style)):
            return model
        return replace(model, style=None, no_style=_HIDDEN)

    def render(self, prompt: Prompt, field_name: str | None = None, *, count: bool = False) -> RenderedPrompt:
        """Return a prompt as text; `count` its tokens, where there is a tokenizer.

        Raises:
            InvalidRequestError: the model takes no such prompt.
        """
        text = self.text(prompt, field_name)
        return self.read_after(prompt, text, tokens=self.count_prompt(text) if count else None)

    def read_after(self, prompt: Prompt, text: str, *, tokens: int | None = None) -> RenderedPrompt:
        """Return a prompt, whose text is `text`, with what to look for in the answer."""
        if not isinstance(prompt, Conversation):
            return RenderedPrompt(text, tokens)
        offer = prompt.offer if prompt.offer is not None and prompt.offer.choice != "none" else None
        must_call = offer is not None and offer.choice != "auto"
        marks = set(self.marks) if self.thinks else set()
        if offer is not None and self.style is not None and not must_call:
            marks |= _marks_of(self.style)
        return RenderedPrompt(
            text,
            tokens,
            tools=tuple(callable_names(offer)) if offer is not None else (),
            strings={tool.name: _strings_of(tool) for tool in offer.tools} if offer is not None else {},
            single=offer is not None and bool(last_calls(offer)),
            thinks=self.thinks,
            thinking=self.thinks and text.rstrip().endswith(self.marks[0]),
            show_special=not marks.isdisjoint(self.special),
            images=tuple(images_in(prompt)),
            converses=True,
            offer=offer,
            listed=must_call,
        )

    @property
    def call_marks(self) -> tuple[str, str] | None:
        """The marks within which a grammar of text can enforce its calls; None: it cannot."""
        marks = None if self.style is None else self.style.enforced
        return None if marks is None or not self.special.isdisjoint(marks) else marks

    @property
    def call_form(self) -> CallForm | None:
        """How its calls are written, where structural tags can hold them to schemas; None: they cannot."""
        form = None if self.style is None else FORMS.get(self.style.name)
        if form is None or any(mark in text for mark in self.special for text in form.texts):
            return None
        return form

    def held(self, rules: ToolCalls) -> ToolCalls | None:
        """Return calls that may come among text, in the notation that a grammar can hold it to, if any."""
        style = self.style
        if self.call_marks is not None:
            return structs.replace(rules, marks=self.call_marks)
        if style is None or self.template is None:
            return None
        marks = [mark for mark in (style.list_mark, style.named_mark) if self.template.mentions(mark)]
        if style.list_mark and self.special.issuperset(marks) and not self.template.mentions(_CALL_ID):
            return structs.replace(rules, opening=marks[0], between=marks[1] if marks[1:] else None)
        return structs.replace(rules, bare=style.bare) if style.bare and rules.text is None else None

    def reasoning_before(self, prompt: RenderedPrompt) -> Reasoning | None:
        """Return what may come before that which a grammar of text is of; None: nothing that it can allow.

        Nothing comes where the prompt has ended it: so templates switch reasoning off.
        """
        return self.reasoning(prompt) if self.special.isdisjoint(self.marks) else None

    def reasoning(self, prompt: RenderedPrompt, *, again: bool = False) -> Reasoning | None:
        """Return the reasoning with which an answer may begin, if it may.

        `again`: also where the prompt has ended it. What an answer begins with is still read as such.
        """
        begin, end = self.marks
        if not prompt.thinks or (not again and prompt.text.rstrip().endswith(end)):
            return None
        return Reasoning(begin=begin, end=end, begun=prompt.thinking)

    def reader(self, prompt: RenderedPrompt) -> MarkedText:
        """Return what reads one answer to `prompt`."""
        return MarkedText(
            CALL_LIST if prompt.listed else self.style,
            prompt.tools,
            single=prompt.single,
            thinks=prompt.thinks,
            thinking=prompt.thinking,
            marks=self.marks,
            strings=prompt.strings,
        )

    def text(self, prompt: Prompt, field_name: str | None = None, *, answer_next: bool = True) -> str:
        """Return a prompt as the text that a backend tokenizes; `answer_next` as in `Tokenization`.

        Raises:
            InvalidRequestError: the model takes no such prompt.
        """
        match prompt:
            case PlainText(text):
                return text
            case Conversation():
                written = self.written(prompt, answer_next=answer_next)
                return written if self.vocabulary is None else self.vocabulary.for_text_backend(written)
        raise InvalidRequestError(
            "The model's backend takes prompts as text only.", param=field_name or "prompt"
        )

    def written(self, prompt: Conversation, *, answer_next: bool = True, guarded: bool = False) -> str:
        """Return a conversation as the model's template writes it; `guarded` as in `ChatTemplate.render`.

        Raises:
            InvalidRequestError: there is no template, or it cannot express the conversation.
        """
        if self.template is None:
            raise no_template()
        offer = prompt.offer
        if offer is not None and self.style is None:
            raise InvalidRequestError(self.no_style, param=offer.field)
        return self.template.render(prompt, answer_next=answer_next, guarded=guarded)

    def encoded(self, prompt: Prompt, field_name: str | None = None) -> RenderedPrompt:
        """Return a prompt with its ids; a template writes the beginning of all text itself.

        Control tokens in a text are the caller's own; in the messages of a conversation, they are text.

        Raises:
            InvalidRequestError: the model takes no such prompt.
        """
        vocabulary = self.required_vocabulary()
        if isinstance(prompt, Conversation):
            guarded = self.written(prompt, guarded=True)
            text, ids = unguarded(guarded), vocabulary.encode_guarded(guarded)
        else:
            text = self.text(prompt, field_name)
            ids = vocabulary.encode(text, rendered=False)
        if not ids:
            where = prompt.messages[-1].field if isinstance(prompt, Conversation) else field_name or "prompt"
            raise InvalidRequestError("The prompt has no tokens, and this model begins none.", param=where)
        return replace(self.read_after(prompt, text, tokens=len(ids)), ids=tuple(ids))

    def required_vocabulary(self) -> Vocabulary:
        """Return the tokenizer of a model that takes nothing but ids.

        Raises:
            UpstreamProtocolError: there is none.
        """
        if self.vocabulary is None:
            raise UpstreamProtocolError("The gateway has no tokenizer of this model.")
        return self.vocabulary

    def count_prompt(self, text: str) -> int:
        """Return how many tokens the backend makes of a prompt's text; 0: they cannot be counted."""
        return 0 if self.vocabulary is None else self.vocabulary.count_prompt(text)

    def tokens(self, tokenization: Tokenization, *, exact: bool = False) -> Tokens:
        """Answer a tokenization here, as such backends have none; `exact`: the model takes nothing but ids.

        Raises:
            InvalidRequestError: there is no tokenizer, or it cannot express the prompt.
        """
        if self.vocabulary is None:
            raise InvalidRequestError(
                "The gateway has no tokenizer of this model: set `tokenizers`.", param="model"
            )
        prompt = tokenization.prompt
        if isinstance(prompt, Conversation) and exact:
            written = self.written(prompt, answer_next=tokenization.answer_next, guarded=True)
            text, ids = unguarded(written), self.vocabulary.encode_guarded(written)
        elif isinstance(prompt, Conversation):
            text = self.text(prompt, answer_next=tokenization.answer_next)
            ids = self.vocabulary.encode(text, rendered=False)
        elif isinstance(prompt, PlainText):
            text = prompt.text
            ids = self.vocabulary.encode(text, rendered=not tokenization.prefix)
        else:
            ids = list(getattr(prompt, "ids", ()))
            return Tokens(text=self.vocabulary.decode(ids), strings=self._strings(tokenization, ids))
        strings = self._strings(tokenization, ids)
        return Tokens(ids=ids, text=text, strings=strings, pad=self.vocabulary.pad)

    def _strings(self, tokenization: Tokenization, ids: Sequence[int]) -> Sequence[str] | None:
        if not tokenization.strings or self.vocabulary is None:
            return None
        shown = {each: self.vocabulary.shown(each) for each in set(ids)}
        return [shown[each] for each in ids]


def text_of_archive(archive: bytes) -> ModelText:
    """Return what the zip archive of a tokenizer's folder says: the same object for equal archives.

    A large tokenizer takes a second to read, for which the library keeps the interpreter to itself.

    Raises:
        UpstreamProtocolError: it is none, or its tokenizer or template cannot be used.
    """
    try:
        with _one_at_a_time:  # so that replicas that come together have it read once
            return _read_archive(archive)
    except (VocabularyError, TemplateError) as error:
        raise UpstreamProtocolError(f"the tokenizer that the model sends: {error}") from None
    except Exception as error:  # noqa: BLE001 - the files may be anything
        reason = f"{type(error).__name__}: {error}"
        raise UpstreamProtocolError(f"the tokenizer that the model sends cannot be read: {reason}") from None


@lru_cache(_ARCHIVES)
def _read_archive(archive: bytes) -> ModelText:
    files = zipfile.ZipFile(io.BytesIO(archive))
    files.filename = "the archive"  # for messages: it has none
    size = sum(each.file_size for each in files.infolist())
    if size > _ARCHIVE_BYTES:
        raise VocabularyError(f"its files have {size} bytes")
    return ModelText.read(zipfile.Path(files))


def no_template() -> NoTemplateError:
    """Return the error for a conversation with a model whose format nobody knows."""
    return NoTemplateError(
        "The gateway has no chat template of this model: use completions, or set `tokenizers`"
        " to a folder with one.",
        param="messages",
    )


def _marks_of(style: CallStyle) -> set[str]:
    """Return the marks without which nothing tells a style's calls from text."""
    return set() if style.unmarked else {*style.openings, style.closing}


def _strings_of(tool: Tool) -> dict[str, bool]:
    root = tool.parameters
    found, *others = leaves(root, root)
    properties = found.get("properties")
    if others or not isinstance(properties, Mapping):
        return {}
    types = {name: types_of(schema, root) for name, schema in properties.items()}
    return {name: "null" in each for name, each in types.items() if each - {"null"} == {"string"}}
