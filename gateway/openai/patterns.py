"""What regular expressions cost: nested repetitions multiply, and every backend pays for the product."""

import re
from collections.abc import Iterable, Iterator
from typing import Any, Final

from gateway.errors import InvalidRequestError

REPEATS_LIMIT: Final = 50_000
"""`(a{1,1000}){1,1000}` has a million: compiled in no time, but after a few tokens of an answer too complex
to go on. 40,000, as in `(\\w{1,200} ){1,200}`, were seen to work."""

_MOST = 10**12
_TOKEN = re.compile(
    r"\\[pPxuUb]\{[^}]{0,99}\}|\\.|\[\^?\]?(?:\\.|\[:\w{1,9}:\]|[^\]\\])*+(?:\]|\Z|\\)"
    r"|\{(\d{1,18})(?:,(\d{0,18}))?\}|.",
    re.DOTALL,
)
"""An escape, a class of characters, a counted repetition, or any one character; each is found without going
back, since a client chooses the text. A class that does not end goes on to the end."""


def check_repeats(patterns: Iterable[str], field: str) -> None:
    """Refuse expressions that repeat a part too often.

    Args:
        patterns: regular expressions.
        field: the request's, that they came with.

    Raises:
        InvalidRequestError: one does; `param` is `field`.
    """
    for pattern in patterns:
        if (found := repeats(pattern)) > REPEATS_LIMIT:
            raise InvalidRequestError(
                f"{field}: the repetitions of a regular expression multiply to {found},"
                f" and at most {REPEATS_LIMIT} are allowed.",
                param=field,
            )


def repeats(pattern: str) -> int:
    """Return how often the part that is repeated most may stand there; `*` and `+` count once."""
    most = last = 1
    outer: list[int] = []
    for token in _TOKEN.finditer(pattern):
        if token[0] == "(":
            outer.append(most)
            most = last = 1
        elif token[0] == ")" and outer:
            last, most = most, max(most, outer.pop())
        elif token[1] is not None:
            last = min(last * max(int(token[2] or token[1]), 1), _MOST)
            most = max(most, last)
        elif token[0] not in "*+?":
            last = 1
    return max(most, *outer, 1)


def patterns_of(schema: Any) -> Iterator[str]:
    """Yield the regular expressions in a JSON schema."""
    level = [schema]
    while level:
        each = level.pop()
        if isinstance(each, dict):
            if isinstance(pattern := each.get("pattern"), str):
                yield pattern
            if isinstance(named := each.get("patternProperties"), dict):
                yield from named
            level += each.values()
        elif isinstance(each, list):
            level += each
