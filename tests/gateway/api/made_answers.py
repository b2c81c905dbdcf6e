"""Answers as the model's side sends them, made up: texts, calls, log-probabilities and ends."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

from gateway.generation import Generation
from tests.gateway.dialects.test_chatglm import response

SPECIAL = ["<|user|>", "[gMASK]", "</s>", "```", '{"a": "}"}', "{", "f", "now"]
PIECES = st.sampled_from(["你好", "🙂", "a", " ", "\n", "\ufffd", *SPECIAL])
CALLS = st.sampled_from(
    ["f\n ```python\ntool_call(a='京')\n```", "now\n```python\ntool_call()\n```", 'f\n{"a": [1, "🙂"]}']
)
SEGMENTS = st.lists(CALLS | st.lists(PIECES | CALLS, max_size=5).map("".join), min_size=1, max_size=3)


@dataclass(frozen=True)
class Choice:
    """One choice's answer; text and tokens are cut each for itself, since text is held back at times."""

    segments: tuple[str, ...]
    tokens: int
    finish: str
    cuts: tuple[tuple[float, float], ...] = ()
    stop: str | int | None = None

    def documents(self, index: int, request: Generation) -> Iterator[tuple[str, dict[str, Any]]]:
        """Return the text and the meta of each response, the last one's without usage."""
        if request.prompt_logprobs is not None:
            told = [logprob(each, index, request.prompt_logprobs) for each in range(5)]
            told[0] |= {"logprob": None, "top": []}
            ids_too: dict[str, Any] = {"token_ids": []} if request.return_token_ids else {}
            for begin, end in pairwise([0, 1 + index % 3, 4, 5]):
                yield "", {"index": index, "prompt_logprobs": told[begin:end], "logprobs": [], **ids_too}
        text = "".join(self.segments)
        starts = [sum(map(len, self.segments[:number])) for number in range(1, len(self.segments))]
        text_at = [0, *sorted(round(cut * len(text)) for cut, _ in self.cuts), len(text)]
        token_at = [0, *sorted(round(cut * self.tokens) for _, cut in self.cuts), self.tokens]
        for number, (text_span, span) in enumerate(zip(pairwise(text_at), pairwise(token_at), strict=True)):
            last = number == len(self.cuts)
            ids = list(range(*span))
            meta: dict[str, Any] = {"index": index, "tokens": len(ids)}
            if request.return_token_ids:
                meta["token_ids"] = ids
            if request.logprobs is not None:
                meta["logprobs"] = [logprob(each, index, request.logprobs) for each in ids]
            begin, end = text_span
            opened = [at for at in starts if begin <= at < end or (last and at == end)]
            starts = [at for at in starts if at not in opened]
            if opened:
                meta["segments"] = [{"at": at - begin, "role": "assistant"} for at in opened]
            if last:
                meta["finish_reason"] = self.finish
                if self.stop is not None and self.finish == "stop":
                    meta["stop_reason"] = self.stop
            yield text[begin:end], meta


def logprob(place: int, index: int, top: int) -> dict[str, Any]:
    token = "你🙂ab"[place % 4]
    told = {"id": place, "token": token, "bytes": list(token.encode()), "logprob": -0.5 - place - index}
    return told | {"top": [told | {"id": other, "logprob": -1.0 - other} for other in range(top)]}


CHOICES = st.builds(
    Choice,
    segments=SEGMENTS.map(tuple),
    tokens=st.integers(0, 6),
    finish=st.sampled_from(["stop", "length"]),
    cuts=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=6).map(tuple),
    stop=st.sampled_from([None, "END", 0, 7]),
)


BEHIND_FENCED = Choice(("f\n ```python\ntool_call(a='京')\n```", "\n Done"), 6, "stop", ((0.3, 0.3),))
BEHIND_JSON = Choice(("\nSo", 'f\n{"a": 1} Done', "now\n{}", "\n Done"), 9, "stop", ((0.5, 0.5), (0.8, 0.9)))
"""Text behind calls, which chance seldom makes."""


def responses(choices: Sequence[Choice], request: Generation, order: Sequence[int]) -> Iterator[Any]:
    """Return what the model's side sends; `order` says which choice goes on next."""
    accepted: dict[str, Any] = {"request_id": "r", "prompt_tokens": 7}
    if request.return_token_ids:
        accepted["prompt_token_ids"] = [1, 2]
    yield response(meta={"accepted": accepted})
    total = sum(choice.tokens for choice in choices)
    usage = {"prompt_tokens": 7, "completion_tokens": total, "cached_tokens": 2}
    waiting = {index: list(choice.documents(index, request)) for index, choice in enumerate(choices)}
    turn = 0
    while waiting:
        index = list(waiting)[order[turn % len(order)] % len(waiting)]
        turn += 1
        text, meta = waiting[index].pop(0)
        if not waiting[index]:
            del waiting[index]
        yield response(text, meta if waiting else meta | {"usage": usage})
