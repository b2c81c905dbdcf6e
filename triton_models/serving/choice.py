"""One of the answers that a request asks for; for the engine, a separate request."""

from collections import deque

from triton_models.engine.sequence import FinishReason, TokenOutput
from triton_models.serving.answer import Answer


class Choice:
    """An answer and its progress. The request that it belongs to sends it.

    Attributes:
        key: its id in the engine, unique in this process.
        index: its place among the request's choices.
        first_token: seconds from its arrival in the engine to its first step, and to its first token.
        closed_at: when its last response was sent, in monotonic seconds.
        pending: outputs that `answer` has not taken yet; only used without a delta channel.
        deltas: how many deltas went into the frames of a delta channel.
    """

    __slots__ = ("answer", "closed_at", "deltas", "first_token", "index", "key", "pending")

    def __init__(self, key: str, index: int, answer: Answer) -> None:
        self.key = key
        self.index = index
        self.answer = answer
        self.first_token: tuple[float, float] | None = None
        self.closed_at: float | None = None
        self.pending: deque[TokenOutput] = deque()
        self.deltas = 0

    @property
    def closed(self) -> bool:
        """Whether its last response was sent."""
        return self.closed_at is not None

    @property
    def ended(self) -> bool:
        """Whether the answer has ended; at most its last response is still to be sent."""
        return self.answer.finish is not None

    def take(self, output: TokenOutput) -> bool:
        """Take an output; return whether there is something to send or the answer has ended."""
        self.answer.take(output)
        return self.answer.sendable or self.ended

    def take_pending(self) -> None:
        """Take all pending outputs."""
        while self.pending:
            self.answer.take(self.pending.popleft())

    def fail(self) -> None:
        """Give up the answer; its request then ends with an error."""
        self.answer.finish = FinishReason.ERROR
