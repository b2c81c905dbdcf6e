"""Greedy decoding with a session of ONNX Runtime. Knows neither the package nor Triton."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray


class GreedyDecoder:
    """Feeds each step's cache to the next one, as ONNX Runtime's own values, which nobody copies.

    Args:
        session: an `onnxruntime.InferenceSession` on a graph of `bench/onnx/export.py`.
        wrap: makes the runtime's value of an array (`OrtValue.ortvalue_from_numpy`).
    """

    def __init__(self, session: Any, wrap: Callable[[NDArray[Any]], Any]) -> None:
        self._session = session
        self._wrap = wrap
        self._past = [each for each in session.get_inputs() if each.name != "ids"]

    def answer(self, prompts: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        """Return the `count` most likely next tokens of each prompt: [batch, tokens] gives [batch, count]."""
        values = {"ids": self._wrap(np.ascontiguousarray(prompts))}
        for each in self._past:
            _, heads, _, width = each.shape
            values[each.name] = self._wrap(np.zeros((len(prompts), heads, 0, width), dtype=np.float32))
        answers = np.empty((len(prompts), count), dtype=np.int64)
        names = ["logits", *(f"new_{each.name}" for each in self._past)]
        for step in range(count):
            logits, *past = self._session.run_with_ort_values(names, values)
            answers[:, step] = logits.numpy().argmax(axis=1)
            values = {each.name: value for each, value in zip(self._past, past, strict=True)}
            values["ids"] = self._wrap(np.ascontiguousarray(answers[:, step : step + 1]))
        return answers
