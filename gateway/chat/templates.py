"""Chat templates: a conversation as text, written by the template that a model's tokenizer brings.

A template is a Jinja program in `chat_template.jinja`, or `chat_template` in `tokenizer_config.json` or, as
of old for models that see images, in `chat_template.json`, as transformers' `apply_chat_template` reads them
(https://huggingface.co/docs/transformers/chat_templating). There may be another for requests with tools. It
runs in Jinja's sandbox: it comes with a checkpoint, and a checkpoint may come from anywhere.

Knows nothing of token ids; `gateway.chat.vocabulary` has them.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Final, NoReturn, Protocol

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_items
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.chat.guards import Guard, control_tokens, removed_texts, unescaped
from gateway.core.request import Conversation, Draft, Message, ToolOffer, images_in
from gateway.errors import InvalidRequestError
from wire.calls import read_json

_TEMPLATE_FILE: Final = "chat_template.jinja"
_CONFIG_FILE: Final = "tokenizer_config.json"
_PROCESSOR_FILE: Final = "chat_template.json"
_SPECIAL_FILE: Final = "special_tokens_map.json"
_DEFAULT: Final = "default"
_WITH_TOOLS: Final = "tool_use"
_TOOLS_FILE: Final = f"additional_chat_templates/{_WITH_TOOLS}.jinja"
_OWN: Final = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""Variables that the gateway itself sets, beside the tokens."""
_OF_MESSAGES: Final = frozenset({"reasoning_content", "reasoning"})
"""Fields of messages that only some templates read."""
_IMAGE: Final = "image"
"""The type of a content's part for which a template writes the mark of an image."""
_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_REFUSALS: Final = (
    *(jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError),
    RecursionError,  # of a switch, arguments or a tool that are nested too deeply
)
"""What a template raises that cannot express a conversation."""
_CONTINUED: Final = "\ue000\t"
"""Behind a text that is to be continued, while it is rendered: a mark of no script, and a blank."""
_SHORT_ID: Final = 9
"""Characters of the ids of calls that Mistral's templates demand, letters and digits all."""


class TemplateError(Exception):
    """A folder's template or configuration cannot be used; the message says why."""


class Folder(Protocol):
    """A tokenizer's folder or a file in it: a `pathlib.Path`, or a `zipfile.Path` of an archive."""

    def __truediv__(self, name: str, /) -> "Folder": ...

    def is_file(self) -> bool: ...  # noqa: D102 - as a path's

    def read_text(self, encoding: str) -> str: ...  # noqa: D102 - as a path's


class _Generation(Extension):
    """The block by which templates mark what the assistant wrote, for training: it writes its content."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the block, in which variables are set for it alone."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class ChatTemplate:
    """Renders conversations. Shared by all requests.

    Args:
        sources: templates by name; `default` must be there, and `tool_use` may be, for requests with tools.
        tokens: the texts of special tokens that templates refer to, such as `bos_token`.
        added: by text, the tokens that the tokenizer finds in any text, and whether they are special.

    Raises:
        TemplateError: a template is not one.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        tokens: Mapping[str, str],
        added: Mapping[str, bool] = MappingProxyType({}),
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.filters["items"] = _items
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _now
        self._tokens = dict(tokens)
        self.sources = dict(sources)
        try:
            self._templates = {name: environment.from_string(text) for name, text in sources.items()}
            trees = [environment.parse(text) for text in sources.values()]
            self.reads = frozenset().union(*map(_reads, trees))
            """Names that it reads: variables, and fields of messages that only some templates read."""
            self._images = any(node.value == _IMAGE for tree in trees for node in tree.find_all(nodes.Const))
            """Whether it knows contents with images, which are lists of parts."""
            self._lists = self._images and not any(
                node.name == "string" for tree in trees for node in tree.find_all(nodes.Test)
            )
            """Whether it takes every content for such a list."""
            self._no_content = None if any(map(_knows_no_content, trees)) else ""
            """What it takes for the content of a message that has calls only."""
            self._id_of = _short_id if any(map(_demands_short_ids, trees)) else str
            """Writes the id of a call."""
            self._guard = Guard(control_tokens(added, trees, self.mentions), removed_texts(trees))
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(
                f"the chat template is not valid Jinja (line {error.lineno}): {error}"
            ) from None
        if _DEFAULT not in self._templates:
            raise TemplateError(f"no chat template is called {_DEFAULT!r}")

    @classmethod
    def read(cls, folder: Folder, added: Mapping[str, bool] = MappingProxyType({})) -> "ChatTemplate | None":
        """Read the template of a tokenizer's folder; None: it has none, as that of a base model.

        Raises:
            TemplateError: it has one that cannot be used.
        """
        config = tokenizer_config(folder)
        extra = config.get("extra_special_tokens")
        given = {**config, **(extra if isinstance(extra, dict) else {})}
        tokens = {  # also a model's own, such as `image_token`
            name: text
            for name, token in given.items()
            if name.endswith("_token") and (text := text_of(token)) is not None
        }
        files = {_DEFAULT: folder / _TEMPLATE_FILE, _WITH_TOOLS: folder / _TOOLS_FILE}
        if files[_DEFAULT].is_file():
            found = {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.is_file()}
            return cls(found, tokens, added)
        template = config.get("chat_template")
        if template is None:
            template = read_config(folder / _PROCESSOR_FILE).get("chat_template")
        match template:
            case str(text):
                return cls({_DEFAULT: text}, tokens, added)
            case list(named):
                return cls({each["name"]: each["template"] for each in named}, tokens, added)
            case None:
                return None
        raise TemplateError(f"{folder}: its chat_template is no text")

    def render(self, conversation: Conversation, *, answer_next: bool = True, guarded: bool = False) -> str:
        """Return the prompt for the assistant's next message, or the last one's continuation.

        A conversation whose last message is the assistant's is rendered up to the end of its text: what the
        template writes after it would end that message.

        Args:
            conversation: whose messages it writes; tools are offered unless their choice is `none`.
            answer_next: false: the messages alone, each with its end.
            guarded: control tokens in the texts of messages are guarded (`gateway.chat.guards`): it is for
                `Vocabulary.encode_guarded`, and nobody else.

        Raises:
            InvalidRequestError: the template refuses the conversation, or cannot express it.
        """
        for name in conversation.switches:
            if name in _OWN or name in _TOKENS or name in self._tokens:
                raise InvalidRequestError(
                    f"The gateway sets {name!r} itself.", param=f"chat_template_kwargs.{name}"
                )
        if not self._images:
            for image in images_in(conversation):
                raise InvalidRequestError("the model's chat template knows no images", param=image.field)
        *others, last = conversation.messages
        continues = answer_next and last.role == "assistant" and not last.calls
        shown = replace(last, content=last.content + _CONTINUED) if continues else last
        guard: Callable[[Any], Any] = self._guard if guarded else lambda value: value
        offer = conversation.offer
        tools = _tools(offer) if offer is not None and offer.choice != "none" else None
        name = _WITH_TOOLS if tools and _WITH_TOOLS in self._templates else _DEFAULT
        try:
            text = self._templates[name].render(
                messages=[self._document(message, guard) for message in (*others, shown)],
                tools=guard(tools),
                documents=None,
                add_generation_prompt=answer_next and not continues,
                **self._tokens,
                **guard(conversation.switches),
            )
        except _REFUSALS as error:
            # Some take system messages only first, as Qwen3.5's; some one call at a time, as Llama 3's; some
            # questions and answers in turns, as Mistral's and Gemma's; some no system messages, as Gemma 2's.
            for rearrange in (_system_first, _one_by_one, _in_turns, _system_asks):
                rearranged = rearrange(conversation.messages)
                if rearranged != conversation.messages:
                    changed = replace(conversation, messages=rearranged)
                    return self.render(changed, answer_next=answer_next, guarded=guarded)
            raise InvalidRequestError(
                f"the model's chat template does not take this conversation: {error}", param="messages"
            ) from None
        return _cut_behind(text, last.content) if continues else text

    def mentions(self, text: str) -> bool:
        """Whether a template writes or looks for `text`."""
        return any(text in source for source in self.sources.values())

    def _document(self, message: Message, guard: Callable[[Any], Any]) -> dict[str, Any]:
        """Return a message as templates expect it: OpenAI's form, with a call's arguments as an object."""
        content: Any = _parts(message) if self._lists or message.images else message.content
        if message.calls and not content:
            content = self._no_content
        document: dict[str, Any] = {"role": message.role, "content": guard(content)}
        if message.calls:
            document["tool_calls"] = [
                {
                    "id": guard(self._id_of(call.id)),
                    "type": "function",
                    "function": {"name": guard(call.name), "arguments": _arguments(call.arguments, guard)},
                }
                for call in message.calls
            ]
        if message.reasoning:
            document.update(dict.fromkeys(_OF_MESSAGES, guard(message.reasoning)))
        if message.answers is not None:
            document["tool_call_id"] = guard(self._id_of(message.answers))
        return document


def _reads(template: nodes.Template) -> set[str]:
    fields = {node.attr for node in template.find_all(nodes.Getattr)}
    fields |= {node.value for node in template.find_all(nodes.Const) if isinstance(node.value, str)}
    return meta.find_undeclared_variables(template) | (fields & _OF_MESSAGES)


def _knows_no_content(template: nodes.Template) -> bool:
    """Whether it asks if a content is null. Of DeepSeek's, the first ones show calls only where it is."""
    return any(test.name == "none" and _names_content(test.node) for test in template.find_all(nodes.Test))


def _names_content(node: nodes.Node) -> bool:
    match node:
        case nodes.Getattr(attr="content") | nodes.Getitem(arg=nodes.Const(value="content")):
            return True
    return False


def _demands_short_ids(template: nodes.Template) -> bool:
    """Whether it compares the length of something with that of Mistral's ids."""
    return any(
        isinstance(node.expr, nodes.Filter)
        and node.expr.name in ("length", "count")
        and any(isinstance(each.expr, nodes.Const) and each.expr.value == _SHORT_ID for each in node.ops)
        for node in template.find_all(nodes.Compare)
    )


def _short_id(id_: str) -> str:
    """Return an id as Mistral's templates take it: the same for the same one."""
    if len(id_) == _SHORT_ID and id_.isascii() and id_.isalnum():
        return id_
    return hashlib.sha256(id_.encode()).hexdigest()[:_SHORT_ID]


def tokenizer_config(folder: Folder) -> Mapping[str, Any]:
    """Return the configuration of a tokenizer's folder, with its special tokens.

    Older ones list no added tokens, and a file of its own says there which the special ones are.

    Raises:
        TemplateError: a file holds something else.
    """
    config = read_config(folder / _CONFIG_FILE)
    return config if "added_tokens_decoder" in config else {**config, **read_config(folder / _SPECIAL_FILE)}


def read_config(file: Folder) -> Mapping[str, Any]:
    """Return the object in a file of a tokenizer's folder; empty: there is no such file.

    Raises:
        TemplateError: it holds something else.
    """
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise TemplateError(f"{file} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise TemplateError(f"{file} is not a JSON object")
    return config


def text_of(token: Any) -> str | None:
    """Return a token's text: it is written as that, or as an object with the token's properties."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _parts(message: Message) -> list[dict[str, str]]:
    """Return a message's text and images in their order; what the images are, the template does not see."""
    parts, done = [], 0
    for end in (*(image.at for image in message.images), None):
        if text := message.content[done:end]:
            parts.append({"type": "text", "text": text})
        if end is not None:
            parts.append({"type": _IMAGE})
            done = end
    return parts


class _Unread(str):
    """Arguments that are no object: the text that the model wrote; a pair, where a template wants pairs."""

    __slots__ = ()

    def __repr__(self) -> str:
        return unescaped(super().__repr__())

    def items(self) -> list[tuple[str, str]]:
        """Return the text as if it were an argument."""
        return [("arguments", str(self))]


class _Arguments(dict[str, Any]):
    """Arguments as an object; where a template joins them with text, as DeepSeek's do, the text they are."""

    __slots__ = ("_text",)

    def __init__(self, text: str, document: Mapping[str, Any]) -> None:
        super().__init__(document)
        self._text = text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    return value.items() if isinstance(value, _Unread) else do_items(value)


def _arguments(text: str, guard: Callable[[Any], Any]) -> Any:
    """Return arguments as an object, if they are one."""
    arguments = read_json(text)
    return _Unread(guard(text)) if arguments is None else _Arguments(guard(text), guard(arguments))


def _system_first(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return a conversation whose system messages are one, the first, as in our own formats."""
    system = [message for message in messages if message.role == "system"]
    if not system:
        return tuple(messages)
    content = "\n\n".join(message.content for message in system if message.content)
    others = (message for message in messages if message.role != "system")
    return replace(system[0], content=content), *others


def _one_by_one(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return a conversation with a message for each call, and its result behind it."""
    apart: list[Message] = []
    for message in messages:
        end = len(apart)
        if message.answers is not None:
            ends = (at for at in range(end, 0, -1) if message.answers in {c.id for c in apart[at - 1].calls})
            end = next(ends, end)
        apart[end:end] = [
            replace(message, calls=(call,), content="" if number else message.content)
            for number, call in enumerate(message.calls)
        ] or [message]
    return tuple(apart)


def _in_turns(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return a conversation in which the user and the assistant take turns, and the user begins.

    Messages of one role in a row are one, up to a call. Where a turn is missing, behind a result or at the
    beginning, nothing is said in it.
    """
    runs: list[list[Message]] = []
    for message in messages:
        before = runs[-1][-1] if runs else None
        if before and before.role == message.role != "tool" and not before.calls:
            runs[-1].append(message)
        else:
            runs.append([message])
    turns: list[Message] = []
    asked = False
    for run in runs:
        match run[0].role:
            case "user" if turns and turns[-1].role == "tool":
                turns.append(Message(role="assistant", content=""))
            case "assistant" if not asked:
                turns.append(Message(role="user", content=""))
        asked = asked or run[0].role != "system"
        turns.append(_as_one(run))
    return tuple(turns)


def _system_asks(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return a conversation whose first question begins with what the system says."""
    system = [replace(message, role="user") for message in messages if message.role == "system"]
    others = [message for message in messages if message.role != "system"]
    if not system:
        return tuple(others)
    questions = [at for at, message in enumerate(others) if message.role == "user"]
    begin, end = (questions[0], questions[0] + 1) if questions else (0, 0)
    return *others[:begin], _as_one([*system, *others[begin:end]]), *others[end:]


def _as_one(messages: Sequence[Message]) -> Message:
    """Return messages of one role as one; only the last may have calls."""
    first, *others = messages
    if not others:
        return first
    draft = Draft(first.role, first.field)
    for message in messages:
        draft.begin()
        draft.add(message.content, message.images)
        draft.reasoning.append(message.reasoning)
    return replace(draft.message(), calls=messages[-1].calls)


def _tools(offer: ToolOffer) -> list[dict[str, Any]]:
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description or "",
                "parameters": dict(tool.parameters) or {"type": "object", "properties": {}},
            },
        }
        for tool in offer.tools
    ]


def _cut_behind(text: str, content: str) -> str:
    """Return `text` up to the end of `content`, which `_CONTINUED` is behind."""
    mark, blank = _CONTINUED
    written, found, rest = text.rpartition(mark)
    if not found:
        raise InvalidRequestError(
            "the model's chat template does not show the last message, which is to be continued",
            param="messages",
        )
    # One that trims what it writes has trimmed the blank, and would have trimmed those of the content.
    return written if rest.startswith(blank) else written.removesuffix(content[len(content.rstrip()) :])


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - as transformers' filter takes them
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002 - as above
) -> str:
    """Return JSON without the escapes for HTML that Jinja's own filter makes."""
    text = json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    return unescaped(text) if ensure_ascii else text


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now(UTC).strftime(form)
