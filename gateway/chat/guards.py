"""Texts of messages within a rendered prompt: what a user types is never a control token (divergence 20).

A chat template writes the structure of a conversation and the texts of its messages into one text, in which
the tokenizer then finds control tokens, such as `<|im_end|>`, wherever they stand. In a message such a text
could end it, and begin a system message. So it is guarded: `GUARD` is put behind its first character, and
the tokenizer, which looks for whole tokens, does not find it. `Vocabulary.encode_guarded` drops the guards
once it has looked, and what remains is encoded as any other text.

The guard is a noncharacter of Unicode, which is no text. Where a message has one itself, U+FFFD takes its
place, as the standard advises (chapter 23.7). Texts between which an image stands are guarded each by itself:
no model whose ids the gateway makes takes images.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from os.path import commonprefix
from typing import Any, Final

from jinja2 import nodes

from gateway.chat.marked import MARKS

GUARD: Final = "\ufdd0"
_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
_BEHIND: Final = r"\g<0>" + GUARD
_NEVER: Final = r"(?!)"
_ESCAPED = re.compile(r"(?<!\\)((?:\\\\)*)\\ufdd0")
"""A guard as Python and JSON write it in ASCII; backslashes of the text itself come in pairs there."""
_TAG = re.compile(r"</?[\w:]+>")
_MARK = re.compile(r"\W.*\w.*\W", re.DOTALL)
"""A word in brackets of some kind, as opposed to one without, or to white space."""
_REASONING: Final = frozenset(mark for pair in MARKS for mark in pair)
_REPLACE: Final = "replace"
_SEARCHES: Final = frozenset(
    {"count", "endswith", "find", "index", "partition", "removeprefix", "removesuffix", _REPLACE}
    | {"rfind", "rindex", "rpartition", "rsplit", "split", "startswith"}
)
"""Methods of texts, and a filter, that look for another text."""


class Guard:
    """Guards what of a conversation a template gets to read.

    Args:
        control: the tokens that no message may hold; one of a single character cannot be guarded.
        removed: texts that the template takes out of messages.
    """

    def __init__(self, control: Iterable[str], removed: Iterable[str] = ()) -> None:
        rests: dict[str, set[str]] = {}
        for token in control:
            if token[1:]:
                rests.setdefault(token[0], set()).add(token[1:])
        # Looked ahead for, since the next token may begin within this one.
        begins = (f"{re.escape(first)}(?={_any_of(rest)})" for first, rest in rests.items())
        self._begins = re.compile("|".join(begins) or _NEVER)
        self._first = re.compile(_any_of(rests) or _NEVER)
        self._removed = tuple(filter(None, removed))

    def __call__(self, value: Any) -> Any:
        """Return a JSON value whose texts are guarded, the names in objects, too."""
        match value:
            case str():
                return self._text(value)
            case Mapping():
                return {self._text(name): self(each) for name, each in value.items()}
            case list() | tuple():
                return [self(each) for each in value]
        return value

    def _text(self, text: str) -> str:
        text = text.replace(GUARD, _REPLACEMENT)
        guarded, found = self._begins.subn(_BEHIND, text)
        if self._removed and self._begins.search(self._without_removed(guarded)):
            # A token would come of what stands around such a text: every beginning of one is guarded.
            guarded, found = self._first.subn(_BEHIND, text)
        return _Guarded(guarded) if found else text

    def _without_removed(self, text: str) -> str:
        for _ in self._removed:  # in whichever order the template removes them
            for each in self._removed:
                text = text.replace(each, "")
        return text


class _Guarded(str):
    """A text with guards, which are there as well where a template writes a list of texts as Python does."""

    __slots__ = ()

    def __repr__(self) -> str:
        return unescaped(super().__repr__())


def unescaped(text: str) -> str:
    """Return what Python or JSON wrote in ASCII, with its guards as they were."""
    return _ESCAPED.sub(lambda found: found[1] + GUARD, text)


def unguarded(text: str) -> str:
    """Return a text as it is shown."""
    return text.replace(GUARD, "")


def control_tokens(
    added: Mapping[str, bool], trees: Iterable[nodes.Template], mentions: Callable[[str], bool]
) -> list[str]:
    """Return which of a tokenizer's added tokens are the conversation's structure.

    These are the special ones, and of the others those that the template itself writes, such as DeepSeek's
    `<｜User｜>`. Tags such as `<tool_call>` are none then: messages hold them, and templates look for them
    there. Nor are the marks of reasoning, and words that a template looks for in messages, such as GLM-4.5's
    `/nothink`: users are to type them.

    `added` says by text whether a token is special, `mentions` whether the templates have a text in them.
    """
    words = {text for tree in trees for text in _searched(tree) if not _MARK.fullmatch(text)}
    return [
        token
        for token, special in added.items()
        if token not in words | _REASONING and (special or (is_mark(token) and mentions(token)))
    ]


def is_mark(token: str) -> bool:
    """Return whether a token that is not special may be the structure of a conversation."""
    return _MARK.fullmatch(token) is not None and not _TAG.fullmatch(token)


def removed_texts(trees: Iterable[nodes.Template]) -> frozenset[str]:
    """Return the texts that templates take out of others, such as `/no_think`."""
    return frozenset(
        text
        for tree in trees
        for name, arguments in _searches(tree)
        if name == _REPLACE
        for text in _texts(arguments[:1])
    )


def _searched(template: nodes.Template) -> Iterator[str]:
    """Yield the texts that a template looks for in others."""
    for compared in template.find_all(nodes.Compare):
        if any(each.op in ("in", "notin") for each in compared.ops):
            yield from _texts([compared.expr])
    for _, arguments in _searches(template):
        yield from _texts(arguments)


def _searches(template: nodes.Template) -> Iterator[tuple[str, Sequence[nodes.Node]]]:
    """Yield each search of a template within a text: what it is called, and its arguments."""
    for node in template.find_all((nodes.Call, nodes.Filter)):
        match node:
            case nodes.Call(node=nodes.Getattr(attr=name)) | nodes.Filter(name=name) if name in _SEARCHES:
                yield name, node.args


def _texts(expressions: Iterable[nodes.Node]) -> Iterator[str]:
    for each in expressions:
        if isinstance(each, nodes.List | nodes.Tuple):
            yield from _texts(each.items)
        elif isinstance(each, nodes.Const) and isinstance(each.value, str):
            yield each.value


def _any_of(texts: Iterable[str]) -> str:
    """Return a regular expression of any of `texts`, where what several begin with stands once.

    A tokenizer may have a thousand control tokens, which begin alike.
    """
    alike: dict[str, list[str]] = {}
    for text in texts:
        alike.setdefault(text[0], []).append(text)
    written = []
    for each in alike.values():
        beginning = commonprefix(each)  # noqa: RUF071 - of texts, not of paths
        rests = {text.removeprefix(beginning) for text in each}
        written.append(re.escape(beginning) + ("" if "" in rests else f"(?:{_any_of(rests)})"))
    return "|".join(written)
