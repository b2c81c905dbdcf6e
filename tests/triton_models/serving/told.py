"""What a client was told of the choices of one request, put together from wherever it came."""

from dataclasses import dataclass, field

from tests.triton_models.serving.fakes import FakeResponder
from wire.meta import Meta, TokenLogprob


@dataclass
class Told:
    """What was told of one choice."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list, compare=False)
    """Compared apart: their last bits move with what else is in the step."""
    tokens: int = 0
    end: tuple[str | None, int | str | None] | None = None

    def add(self, text: str, tokens: int, meta: Meta) -> None:
        assert self.end is None, "something after the end of a choice"
        self.text += text
        self.tokens += tokens
        self.token_ids += meta.token_ids or []
        self.logprobs += meta.logprobs or []
        if meta.finish_reason is not None:
            self.end = meta.finish_reason, meta.stop_reason


def told(answer: FakeResponder, n: int, channel: FakeResponder | None = None, first: int = 0) -> list[Told]:
    """Put an answer together; `channel` has the deltas of the choices as `first` and what follows."""
    answer.wait()
    assert answer.refusal is None, answer.refusal
    channel = channel or answer.channel
    choices = [Told() for _ in range(n)]
    for index, choice in enumerate(choices):
        for text, tokens, meta in channel.deltas(first + index) if channel else ():
            choice.add(text, tokens, meta or Meta())
    accepted, *others = answer.responses
    assert accepted[1].accepted is not None
    for text, meta in others:
        choices[meta.index].add(text, meta.tokens, meta)
    assert all(choice.end is not None for choice in choices)
    *before, last = answer.metas
    assert all(meta.usage is None for meta in before)
    assert last.usage.completion_tokens == sum(choice.tokens for choice in choices)
    return choices


def logprobs(choices: list[Told]) -> list[float]:
    """Return the log-probabilities of all tokens and their likely ones."""
    return [
        logprob
        for choice in choices
        for token in choice.logprobs
        for logprob in (token.logprob, *(each.logprob for each in token.top))
    ]
