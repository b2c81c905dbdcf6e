"""Answers as a load generator sees them, streamed or not, and many of them as one row of a table."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from time import monotonic
from typing import Any

import msgspec

TTFT_LIMIT_S = 0.5
PER_TOKEN_LIMIT_S = 0.015
"""The limits that an answer must keep to count in `LoadRow.within`, both."""


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None

    @property
    def shows(self) -> bool:
        """Whether there is a token in it: of text, of reasoning or of a call."""
        return bool(self.content or self.reasoning_content or self.reasoning or self.tool_calls)


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta = _Delta()
    message: _Delta = _Delta()
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class _Document(msgspec.Struct):
    """The fields that are read of a chunk or of a complete answer, from either route."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: dict[str, Any] | None = None


_decode = msgspec.json.Decoder(_Document).decode


@dataclass(slots=True)
class Answer:
    """The timing and token counts of one answer. Times are those of `time.monotonic`, in seconds."""

    sent: float
    pieces: list[float] = field(default_factory=list)
    """Arrival time of each chunk that holds text, reasoning, part of a call, or the end of the answer."""
    ended: float = 0.0
    prompt_tokens: int = 0
    tokens: int = 0
    text: str = ""
    """What was said, without reasoning and calls."""
    ids: list[int] = field(default_factory=list)
    """Of its tokens, if the server tells them."""
    error: str | None = None
    """The reason why the request counts as failed; None: it does not."""

    def take_event(self, now: float, data: bytes) -> None:
        """Process the data of one event of a stream."""
        if data == b"[DONE]":
            return
        chunk = _decode(data)
        if chunk.error:
            self.error = str(chunk.error)
        for choice in chunk.choices:
            self._say(choice)
            if choice.text or choice.delta.shows or choice.finish_reason:
                self.pieces.append(now)
        if chunk.usage is not None:
            self._count(chunk.usage)

    def finish(self, body: bytes | None) -> None:
        """End the answer; `body` is that of an answer that was not streamed.

        Raises:
            ValueError: `body` is not an answer of an OpenAI server.
        """
        self.ended = monotonic()
        if body is not None:
            document = _decode(body)
            self.pieces.append(self.ended)
            for choice in document.choices:
                self._say(choice)
            if document.usage is not None:
                self._count(document.usage)
        if self.error is None and not (self.pieces and self.tokens):
            self.error = "no text, or no token counts"

    def need_ids(self) -> None:
        """Make the answer fail if not all of its tokens' ids were told."""
        if len(self.ids) != self.tokens:
            self.error = f"{len(self.ids)} ids of {self.tokens} tokens, and the next turn needs them"

    def _say(self, choice: _Choice) -> None:
        self.text += choice.text or choice.delta.content or choice.message.content or ""
        self.ids += choice.token_ids or ()

    def _count(self, usage: _Usage) -> None:
        self.prompt_tokens = usage.prompt_tokens
        self.tokens = usage.completion_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRow:
    """One measurement. Times are milliseconds and exclude failed requests."""

    clients: int
    """Number of clients in a closed loop."""
    rate: float
    """Requests per second in an open loop."""
    requests: int
    failed: int
    tokens_per_second: float
    """Output tokens per second, from the first request to the last answer."""
    ttft_p50: float
    ttft_p99: float
    per_token_p50: float
    """Percentile over answers of their mean time per output token after the first."""
    per_token_p99: float
    gap_p50: float
    """Time between two pieces of one answer."""
    gap_p99: float
    gap_max: float
    within: float
    """Share of all requests whose time to first token and mean time per token kept the limits."""
    prompt_tokens: float
    output_tokens: float
    pieces: float
    """These three are means over the answers."""
    seconds: float
    error: str = ""
    """The error of the first request that failed."""


def summarise(answers: Sequence[Answer], *, clients: int, rate: float) -> LoadRow:
    """Return the row of one measurement.

    Raises:
        RuntimeError: every request failed, or there was none, so there is nothing to measure.
    """
    failures = [answer.error for answer in answers if answer.error is not None]
    good = [answer for answer in answers if answer.error is None]
    if not answers:
        raise RuntimeError("no request was made")
    if not good:
        raise RuntimeError(f"all {len(answers)} requests failed, the first: {failures[0]}")
    first = [answer.pieces[0] - answer.sent for answer in good]
    per_token = [_per_token(answer) for answer in good]
    gaps = [later - earlier for answer in good for earlier, later in pairwise(answer.pieces)]
    seconds = max(answer.ended for answer in good) - min(answer.sent for answer in good)
    kept = sum(
        ttft <= TTFT_LIMIT_S and each <= PER_TOKEN_LIMIT_S
        for ttft, each in zip(first, per_token, strict=True)
    )
    return LoadRow(
        clients=clients,
        rate=rate,
        requests=len(answers),
        failed=len(failures),
        tokens_per_second=sum(answer.tokens for answer in good) / seconds,
        ttft_p50=1000 * percentile(first, 50),
        ttft_p99=1000 * percentile(first, 99),
        per_token_p50=1000 * percentile(per_token, 50),
        per_token_p99=1000 * percentile(per_token, 99),
        gap_p50=1000 * percentile(gaps, 50),
        gap_p99=1000 * percentile(gaps, 99),
        gap_max=1000 * percentile(gaps, 100),
        within=kept / len(answers),
        prompt_tokens=statistics.fmean(answer.prompt_tokens for answer in good),
        output_tokens=statistics.fmean(answer.tokens for answer in good),
        pieces=statistics.fmean(len(answer.pieces) for answer in good),
        seconds=seconds,
        error=failures[0] or "" if failures else "",
    )


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the smallest value that at least `percent` % of `values` do not exceed; 0 without values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


def _per_token(answer: Answer) -> float:
    return (answer.pieces[-1] - answer.pieces[0]) / max(1, answer.tokens - 1)
