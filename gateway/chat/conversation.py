"""A conversation in the turns of ChatGLM's formats: roles, tools on offer, calls and their results.

What a format cannot express directly is joined or refused, never dropped:

* all system messages join into one, the first turn, in their order and a blank line apart;
* ChatGLM2 knows only rounds of question and answer: consecutive user (or assistant) messages join the same
  way. If a conversation begins with an assistant message, that round has an empty question, as a greeting has
  in the model's own history of (question, answer) pairs;
* ChatGLM3 and GLM-4 keep every message as its own turn, and a conversation that ends with an assistant
  message is rendered as it stands: another answer follows that one;
* tools are in the system turn, for ChatGLM3 after the sentence that the model was trained with. A call is an
  assistant turn of its own, after its message's text, and its result an observation. The results of one
  message's calls come in the order of the calls: only this order tells the model which is which.

A `tool_choice` is enforced by the first line of the answer, which becomes part of the prompt: the name of the
tool that must be called, or an empty line if the answer must be text. A grammar enforces what follows, and
the name if there are several (`wire.grammar.ToolCalls`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any, Final

from gateway.chat.calls import CallReader, FencedCallReader, JsonCallReader, LiteralCallReader, OnPart
from gateway.core.request import Grammar, Message, NamedTool, ToolOffer
from gateway.errors import InvalidRequestError, UpstreamProtocolError
from wire import grammar as wire_grammar
from wire.calls import NOTATIONS, CallNotation, read_json
from wire.grammar import CallableTool, ToolCalls
from wire.history import Turn

_NO_PARAMETERS = {"type": "object", "properties": {}}


def documents(offer: ToolOffer) -> list[dict[str, Any]]:
    """Return the tools as they appear in the prompt."""
    return [
        {
            "name": tool.name,
            **({} if tool.description is None else {"description": tool.description}),
            "parameters": dict(tool.parameters) or _NO_PARAMETERS,
        }
        for tool in offer.tools
    ]


def answer_metadata(offer: ToolOffer) -> str | None:
    """Return the first line of the answer; None: the model decides."""
    if isinstance(offer.choice, NamedTool):
        return offer.choice.name
    if offer.choice == "none":
        return ""
    if offer.choice == "auto":
        return None
    return offer.tools[0].name if len(offer.tools) == 1 else None


def call_rules(offer: ToolOffer, grammar: Grammar | None = None) -> ToolCalls | None:
    """Return the grammar of the answer's calls; None: there is none. `grammar` is that of text without calls.

    Required calls have one. If a tool is strict or the text has a grammar, so do all possible calls.
    """
    if offer.choice == "none":
        return None
    if offer.choice == "auto" and grammar is None and not any(tool.strict for tool in offer.tools):
        return None
    if offer.choice != "auto":
        grammar = None  # The answer is calls only.
    names = callable_names(offer)
    return ToolCalls(
        tools=[
            CallableTool(tool.name, dict(tool.parameters), tool.strict)
            for tool in offer.tools
            if tool.name in names
        ],
        required=offer.choice != "auto",
        single=offer.single or isinstance(offer.choice, NamedTool),
        text=wire_grammar.Grammar(grammar.kind, grammar.text) if grammar is not None else None,
    )


def callable_names(offer: ToolOffer) -> list[str]:
    """Return the names of the tools that the answer may call."""
    if isinstance(offer.choice, NamedTool):
        return [offer.choice.name]
    return [] if offer.choice == "none" else [tool.name for tool in offer.tools]


def last_calls(offer: ToolOffer) -> list[str]:
    """Return the names of the tools after whose call the answer ends."""
    return callable_names(offer) if offer.single or isinstance(offer.choice, NamedTool) else []


INSTRUCTION: Final = (
    "Answer the following questions as best as you can. You have access to the following tools:"
)
"""What ChatGLM3 was trained to read before its tools."""


@dataclass(frozen=True, slots=True)
class ToolForm:
    """How a format writes tools."""

    notation: CallNotation
    read: Callable[[str, OnPart], CallReader]
    """Makes a reader for a call of the named tool."""
    read_enforced: Callable[[str, OnPart], CallReader]
    """The same for a call whose form a grammar enforces."""
    instruction: str | None = None
    """The text that the model was trained to read before its tools, unless the prompt format adds it."""
    own_code: str | None = None
    """What the model writes in place of a tool's name before code of its own."""


@dataclass(frozen=True, slots=True)
class TokenizerForm:
    """The published tokenizer of a format: its class and its special tokens. None has a BOS token."""

    name: str
    eos_token: str
    pad_token: str


_SENTENCE_PIECES: Final = TokenizerForm("ChatGLMTokenizer", "</s>", "<unk>")


@dataclass(frozen=True, slots=True)
class ChatForm:
    """One chat format."""

    name: str
    """As models report it."""
    title: str
    """For people."""
    tokenizer: TokenizerForm
    tools: ToolForm | None = None
    """None: no tools, and a conversation is rounds of question and answer. Otherwise every message is a
    turn."""


_FORMS: Final[Mapping[str, ChatForm]] = {
    form.name: form
    for form in (
        ChatForm("chatglm2", "ChatGLM2", _SENTENCE_PIECES),
        ChatForm(
            "chatglm3",
            "ChatGLM3",
            _SENTENCE_PIECES,
            ToolForm(NOTATIONS["chatglm3"], FencedCallReader, LiteralCallReader, INSTRUCTION, "interpreter"),
        ),
        ChatForm(
            "glm4",
            "GLM-4",
            TokenizerForm("ChatGLM4Tokenizer", "<|endoftext|>", "<|endoftext|>"),
            ToolForm(NOTATIONS["glm4"], JsonCallReader, JsonCallReader),
        ),
    )
}


def known_form(name: str | None) -> ChatForm | None:
    """Return the format that a model reports as `name`; None: it is not known here, or the model has none."""
    return _FORMS.get(name or "")


def chat_form(name: str | None) -> ChatForm:
    """Return the format that a model reports as `name`.

    Raises:
        UpstreamProtocolError: there is none of that name.
    """
    form = known_form(name)
    if form is None:
        raise UpstreamProtocolError(f"the model's chat format {name!r} is not known to this gateway")
    return form


_BLANK_LINE = "\n\n"


def to_turns(messages: Sequence[Message], form: ChatForm, offer: ToolOffer | None = None) -> list[Turn]:
    """Return `messages` as the turns of the chat format `form`; the last is the one to be answered.

    Raises:
        InvalidRequestError: the format cannot express the conversation; `param` names the message.
    """
    for image in (image for message in messages for image in message.images):
        raise InvalidRequestError(f"{form.title} sees no images", param=image.field)
    turns = _rounds(messages, form, offer) if form.tools is None else _turns(messages, form.tools, offer)
    if turns[-1].tools is not None:
        raise InvalidRequestError(
            "a conversation with tools needs a message beside the system's", param=messages[-1].field
        )
    return turns


def _rounds(messages: Sequence[Message], form: ChatForm, offer: ToolOffer | None) -> list[Turn]:
    """Return the turns of a conversation without tools: text, one speaker after the other."""
    if offer is not None:
        raise InvalidRequestError(
            f"{form.title} was trained without tools, and cannot use any", param=offer.field
        )
    spoken = [message for message in messages if message.role != "system"]
    for message in spoken:
        if message.role == "tool" or message.calls:
            raise InvalidRequestError(f"{form.title} has no tools", param=message.field)
    if spoken and spoken[-1].role == "assistant":
        raise InvalidRequestError(
            f"a {form.title} conversation ends with a question, not with an assistant message",
            param=spoken[-1].field,
        )
    neighbours = groupby(spoken, key=attrgetter("role"))
    joined = (Turn(role, _join(message.content for message in run)) for role, run in neighbours)
    return [*_system(messages), *joined]


def _turns(messages: Sequence[Message], tools: ToolForm, offer: ToolOffer | None) -> list[Turn]:
    """Return the turns of a conversation with tools: one per message, call and result."""
    turns = _system(messages, tools, offer)
    caller: Message | None = None
    results: list[Message] = []
    for message in messages:
        if message.role == "system":
            continue
        if message.role == "tool":
            results.append(message)
            continue
        turns += _observations(caller, results)
        if message.content or not message.calls:
            turns.append(Turn(message.role, message.content))
        for call in message.calls:
            arguments = read_json(call.arguments)
            written = call.arguments if arguments is None else tools.notation.write(arguments)
            turns.append(Turn("assistant", written, metadata=call.name))
        caller, results = message, []
    return turns + _observations(caller, results)


ANSWERED_TWICE: Final = "this call was answered before"
NO_CALL: Final = "a tool's result must answer a call that the assistant made just before it"
NO_RESULT: Final = "an assistant that calls tools must be answered with a result for each call"


def _observations(caller: Message | None, results: Sequence[Message]) -> list[Turn]:
    """Return the results of the calls of `caller`, in the order of the calls.

    Raises:
        InvalidRequestError: there is not exactly one for each.
    """
    calls = () if caller is None else caller.calls
    ids = frozenset(call.id for call in calls)
    contents: dict[str, str] = {}
    for result in results:
        if result.answers in contents:
            raise InvalidRequestError(ANSWERED_TWICE, param=result.field)
        if result.answers is None or result.answers not in ids:
            raise InvalidRequestError(NO_CALL, param=result.field)
        contents[result.answers] = result.content
    if caller is not None and len(contents) < len(ids):
        raise InvalidRequestError(NO_RESULT, param=caller.field)
    return [Turn("observation", contents[call.id]) for call in calls]


def _system(
    messages: Sequence[Message], tools: ToolForm | None = None, offer: ToolOffer | None = None
) -> list[Turn]:
    """Return the system's turn, with the tools on offer; none, if there is nothing in it."""
    texts = [message.content for message in messages if message.role == "system"]
    if tools is None or offer is None:
        return [Turn("system", _join(texts))] if texts else []
    if tools.instruction and not (texts and texts[-1].rstrip().endswith(tools.instruction)):
        texts.append(tools.instruction)
    return [Turn("system", _join(texts), tools=documents(offer))]


def _join(texts: Iterable[str]) -> str:
    """Join with blank lines; an empty text adds none."""
    return _BLANK_LINE.join(text for text in texts if text)
