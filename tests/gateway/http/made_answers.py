"""Answers as the model's side sends them, made up: texts, calls, log-probabilities and ends."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Any

from hypothesis import strategies as st

from gateway.core.request import Generation
from tests.gateway.triton.dialects.test_chatglm import response

SPECIAL = ["<|user|>", "[gMASK]", "</s>", "```", '{"a": "}"}', "{", "f", "now"]
PIECES = st.sampled_from(["你好", "🙂", "a", " ", "\n", "\ufffd", *SPECIAL])
CALLS = st.sampled_from(
    ["f\n ```python\ntool_call(a='京')\n```", "now\n```python\ntool_call()\n```", 'f\n{"a": [1, "🙂"]}']
)
SEGMENTS = st.lists(CALLS | st.lists(PIECES | CALLS, max_size=5).map("".join), min_size=1, max_size=3)

PROMPT_TOKENS = 7


@dataclass(frozen=True)
class Choice:
    """One choice's answer; tokens come with their text or before it, since text is held back at times."""

    segments: tuple[str, ...]
    width: int
    """Bytes of a token."""
    finish: str
    cuts: tuple[tuple[float, float], ...] = ()
    """How much of the text a delta ends behind, and how much of the tokens if that is more."""
    stop: str | int | None = None

    @property
    def tokens(self) -> list[tuple[bytes, int]]:
        """The bytes of each token, and where in the text it begins; a role token has none."""
        tokens, at = [], 0
        for number, segment in enumerate(self.segments):
            if number:
                tokens.append((b"", at))
            utf8 = segment.encode()
            for begin in range(0, len(utf8), self.width):
                before = utf8[:begin].decode(errors="ignore")
                tokens.append((utf8[begin : begin + self.width], at + len(before)))
            at += len(segment)
        return tokens

    def documents(self, index: int, request: Generation) -> Iterator[tuple[str, dict[str, Any]]]:
        """Return the text and the meta of each response, the last one's without usage."""
        if request.prompt_logprobs is not None:
            told = [logprob(each, b"ab", index, request.prompt_logprobs) for each in range(PROMPT_TOKENS)]
            told[0] |= {"logprob": None, "top": []}
            ids_too: dict[str, Any] = {"token_ids": []} if request.return_token_ids else {}
            for begin, end in pairwise([0, 1 + index % 3, 4, PROMPT_TOKENS]):
                yield "", {"index": index, "prompt_logprobs": told[begin:end], "logprobs": [], **ids_too}
        text = "".join(self.segments)
        starts = [sum(map(len, self.segments[:number])) for number in range(1, len(self.segments))]
        tokens, sent = self.tokens, 0
        bounds = [0, *sorted(round(cut * len(text)) for cut, _ in self.cuts), len(text)]
        ahead = [*sorted(round(cut * len(tokens)) for _, cut in self.cuts), len(tokens)]
        for number, (begin, end) in enumerate(pairwise(bounds)):
            last = number == len(self.cuts)
            opened = [at for at in starts if begin <= at < end or (last and at == end)]
            starts = [at for at in starts if at not in opened]
            ids = list(range(sent, self._ready(end, ahead[number], starts)))
            sent += len(ids)
            meta: dict[str, Any] = {"index": index, "tokens": len(ids)}
            if request.return_token_ids:
                meta["token_ids"] = ids
            if request.logprobs is not None:
                meta["logprobs"] = [logprob(each, tokens[each][0], index, request.logprobs) for each in ids]
            if opened:
                meta["segments"] = [{"at": at - begin, "role": "assistant"} for at in opened]
            if last:
                meta["finish_reason"] = self.finish
                if self.stop is not None and self.finish == "stop":
                    meta["stop_reason"] = self.stop
            yield text[begin:end], meta

    def _ready(self, end: int, ahead: int, unopened: list[int]) -> int:
        """Return how many tokens have come: all that begin before `end`, and up to `ahead` if that is more.

        A role token comes with its segment, though, and nothing before it.
        """
        come = takewhile(
            lambda each: (each[1][0] or each[1][1] not in unopened) and (each[1][1] < end or each[0] < ahead),
            enumerate(self.tokens),
        )
        return sum(1 for _ in come)


def logprob(place: int, utf8: bytes, index: int, top: int) -> dict[str, Any]:
    token = utf8.decode("utf-8", "backslashreplace")
    told = {"id": place, "token": token, "bytes": list(utf8), "logprob": -0.5 - place - index}
    return told | {"top": [told | {"id": other, "logprob": -1.0 - other} for other in range(top)]}


CHOICES = st.builds(
    Choice,
    segments=SEGMENTS.map(tuple),
    width=st.integers(1, 5),
    finish=st.sampled_from(["stop", "length"]),
    cuts=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=6).map(tuple),
    stop=st.sampled_from([None, "END", 0, 7]),
)


BEHIND_FENCED = Choice(("f\n ```python\ntool_call(a='京')\n```", "\n Done"), 4, "stop", ((0.3, 0.3),))
BEHIND_JSON = Choice(("\nSo", 'f\n{"a": 1} Done', "now\n{}", "\n Done"), 3, "stop", ((0.5, 0.5), (0.8, 0.9)))
"""Text behind calls, which chance seldom makes."""


def responses(choices: Sequence[Choice], request: Generation, order: Sequence[int]) -> Iterator[Any]:
    """Return what the model's side sends; `order` says which choice goes on next."""
    accepted: dict[str, Any] = {"request_id": "r", "prompt_tokens": PROMPT_TOKENS}
    if request.return_token_ids:
        accepted["prompt_token_ids"] = [1, 2]
    yield response(meta={"accepted": accepted})
    total = sum(len(choice.tokens) for choice in choices)
    usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": total, "cached_tokens": 2}
    waiting = {index: list(choice.documents(index, request)) for index, choice in enumerate(choices)}
    turn = 0
    while waiting:
        index = list(waiting)[order[turn % len(order)] % len(waiting)]
        turn += 1
        text, meta = waiting[index].pop(0)
        if not waiting[index]:
            del waiting[index]
        yield response(text, meta if waiting else meta | {"usage": usage})
