"""A model without weights whose every token depends on all before it, through the KV cache.

Attention with queries of zero averages the values, and the values carry each token weighted by its place.
So a lost, doubled or foreign cache entry changes what is generated.
"""

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from triton_models.engine.engine import Engine
from triton_models.engine.linear import Linear
from triton_models.engine.models import KVShape, Operations
from triton_models.engine.sampling import SamplingParams
from triton_models.engine.sequence import Request, TokenOutput

VOCABULARY = 61
POISON = 60
"""A prompt with this token leaves NaN in its keys and values; it is never generated."""

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


class NearMask:
    """The part of a token mask that looks ahead: it takes no guesses."""

    def forced(self) -> Sequence[int]:
        return ()

    def takes(self, tokens: Sequence[int]) -> int:
        return 0

    def fill_ahead(self, tokens: Sequence[int], rows: Sequence[Tensor]) -> None:
        raise NotImplementedError


class FakeModel:
    """A `CausalModel`. `gate`: what a pass waits for; `faults`: how many fail, after `sound_steps`."""

    vocab_size = VOCABULARY
    kv_shape = KVShape(layers=1, heads=1, head_dim=2)
    query_heads = 2
    dtype = torch.float32
    device = torch.device("cpu")

    def __init__(self, *, max_positions: int = 128, faults: int = 0) -> None:
        self.max_positions = max_positions
        self.faults = faults
        self.sound_steps = 0
        self.steps: list[list[int]] = []
        """The positions of every step's tokens."""
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def convert(self, convert: Callable[[Linear], Linear]) -> None:
        """It has no matrices."""

    def forward(self, tokens: Tensor, operations: Operations) -> Tensor:
        positions = operations.positions
        self.entered.set()
        self.gate.wait(30)
        self.steps.append(positions.tolist())
        if self.sound_steps > 0:
            self.sound_steps -= 1
        elif self.faults > 0:
            self.faults -= 1
            raise RuntimeError("/secret/path: the device is gone")
        carried = tokens.float() * weight(positions)
        carried = torch.where(tokens == POISON, torch.nan, carried)
        values = torch.stack([carried, torch.ones_like(carried)], dim=-1)[:, None, :]
        zeros = torch.zeros_like(values)
        keys = torch.where(values.isnan(), values, zeros)
        projected = torch.cat([torch.zeros(len(tokens), 2, 2), keys, values], dim=1)
        mean = operations.attend(0, projected, None)[:, 2]
        return (mean * (positions + 1)).round()[:, None]

    def logits(self, hidden: Tensor, operations: Operations) -> Tensor:
        return logits_of(hidden[:, 0])


def weight(positions: Tensor) -> Tensor:
    return (positions % 7 + 1).float()


def logits_of(state: Tensor) -> Tensor:
    logits = 3 * torch.sin(state[:, None] % 997 * (torch.arange(VOCABULARY) + 1) * 0.7)
    logits[:, POISON] = -1000.0
    return logits


def continuation(prompt: Sequence[int], count: int) -> list[int]:
    """The greedy answer, computed without an engine."""
    tokens = list(prompt)
    for _ in range(count):
        state = (torch.tensor(tokens).float() * weight(torch.arange(len(tokens)))).sum()
        tokens.append(int(logits_of(state[None]).argmax()))
    return tokens[len(prompt) :]


def request(
    request_id: str,
    prompt: Sequence[int] = (1, 2, 3),
    sampling: SamplingParams = GREEDY,
    *,
    priority: int = 0,
    deadline: float | None = None,
) -> Request:
    return Request(
        request_id=request_id,
        prompt_ids=tuple(prompt),
        sampling=sampling,
        priority=priority,
        deadline=deadline,
    )


def run(engine: Engine, *, steps: int = 5000) -> dict[str, list[TokenOutput]]:
    """Step until nothing is open; outputs by request."""
    outputs: dict[str, list[TokenOutput]] = {}
    for _ in range(steps):
        engine.step()
        for output in engine.take_outputs():
            outputs.setdefault(output.request_id, []).append(output)
        if not engine.open_requests:
            return outputs
    raise AssertionError(f"{engine.open_requests} requests are open after {steps} steps")


def ids(outputs: list[TokenOutput]) -> list[int]:
    return [each.token_id for each in outputs if each.token_id is not None]
