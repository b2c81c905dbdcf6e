"""A client that chooses the tokens itself: greedy, beam and nucleus loops over logits, by Triton's libraries.

A `Forward` takes ids and mask, each [rows, positions] int64, and returns logits, [rows, positions,
vocabulary].
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Forward = Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.float32]]


def forward_by(library: Any, client: Any, model: str, *, binary: bool | None = None) -> Forward:
    """Return what asks a server; `library` is `tritonclient.http` or `tritonclient.grpc`."""
    options = {} if binary is None else {"binary_data": binary}

    def forward(ids: NDArray[np.int64], mask: NDArray[np.int64]) -> NDArray[np.float32]:
        inputs = []
        for name, values in (("input_ids", ids), ("attention_mask", mask)):
            inputs.append(library.InferInput(name, list(values.shape), "INT64"))
            inputs[-1].set_data_from_numpy(values, **options)
        outputs = [library.InferRequestedOutput("logits", **options)]
        logits: NDArray[np.float32] = client.infer(model, inputs, outputs=outputs).as_numpy("logits")
        return logits

    return forward


def tokenize(library: Any, client: Any, model: str, texts: list[str]) -> tuple[Any, Any]:
    """Return ids and mask of texts."""
    given = library.InferInput("TEXT", [len(texts)], "BYTES")
    given.set_data_from_numpy(np.array([text.encode() for text in texts], dtype=np.object_))
    answer = client.infer(model, [given])
    return answer.as_numpy("input_ids"), answer.as_numpy("attention_mask")


def longer(ids: Any, mask: Any, tokens: Any) -> tuple[Any, Any]:
    """Return the rows with one more token each."""
    ones = np.ones((len(ids), 1), np.int64)
    return np.hstack([ids, np.asarray(tokens, np.int64)[:, None]]), np.hstack([mask, ones])


def greedy(forward: Forward, ids: Any, mask: Any, count: int) -> Any:
    for _ in range(count):
        ids, mask = longer(ids, mask, forward(ids, mask)[:, -1].argmax(-1))
    return ids


def nucleus(forward: Forward, ids: Any, mask: Any, count: int, *, top_p: float, seed: int) -> Any:
    dice = np.random.default_rng(seed)
    for _ in range(count):
        tokens = []
        for row in forward(ids, mask)[:, -1].astype(np.float64):
            shares = np.exp(row - row.max())
            order = np.argsort(-shares)
            reached = np.cumsum(shares[order]) / shares.sum()
            kept = order[: np.searchsorted(reached, top_p) + 1]
            tokens.append(dice.choice(kept, p=shares[kept] / shares[kept].sum()))
        ids, mask = longer(ids, mask, tokens)
    return ids


def beams(forward: Forward, ids: Any, mask: Any, count: int, *, width: int) -> Any:
    """Return the likeliest of `width` beams of one prompt; no token ends one early."""
    ids, mask = ids.repeat(width, 0), mask.repeat(width, 0)
    scores = np.array([0.0] + [-np.inf] * (width - 1))
    for _ in range(count):
        row = forward(ids, mask)[:, -1].astype(np.float64)
        row -= row.max(-1, keepdims=True)
        row -= np.log(np.exp(row).sum(-1, keepdims=True))
        together = (scores[:, None] + row).ravel()
        best = np.argsort(-together)[:width]
        scores, (parents, tokens) = together[best], np.divmod(best, row.shape[1])
        ids, mask = longer(ids[parents], mask[parents], tokens)
    return ids[:1]
