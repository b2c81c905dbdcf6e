from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.onnx.decoding import GreedyDecoder

VOCABULARY = 50


class Value:
    """Stands for the runtime's own values, which nobody but it reads."""

    def __init__(self, array: NDArray[Any]) -> None:
        self._array = array

    def numpy(self) -> NDArray[Any]:
        return self._array


class Session:
    """One layer whose keys are the ids so far, whose values are twice these; next is the sum of all ids."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []
        self.handed_back: list[bool] = []
        self._last: list[Value] = []

    def get_inputs(self) -> list[Any]:
        shapes = {
            "ids": ["batch", "tokens"],
            "key_0": ["batch", 1, "past", 1],
            "value_0": ["batch", 1, "past", 1],
        }
        return [SimpleNamespace(name=name, shape=shape) for name, shape in shapes.items()]

    def run_with_ort_values(self, names: list[str], values: dict[str, Value]) -> list[Value]:
        assert names == ["logits", "new_key_0", "new_value_0"]
        ids, keys, doubles = (values[name].numpy() for name in ("ids", "key_0", "value_0"))
        assert ids.flags.c_contiguous
        self.steps.append((keys.shape[2], ids.shape[1]))
        self.handed_back.append([values["key_0"], values["value_0"]] == self._last)
        new = ids[:, None, :, None].astype(np.float32)
        keys, doubles = np.concatenate((keys, new), 2), np.concatenate((doubles, 2 * new), 2)
        assert (doubles == 2 * keys).all()
        following = keys.sum(axis=(1, 2, 3)).astype(int) % VOCABULARY
        self._last = [Value(keys), Value(doubles)]
        return [Value(np.eye(VOCABULARY, dtype=np.float32)[following]), *self._last]


def test_each_step_gets_the_cache_of_the_one_before() -> None:
    session = Session()
    prompts = np.array([[3, 4, 5], [10, 20, 30]], dtype=np.int64)
    answers = GreedyDecoder(session, Value).answer(prompts, 4)
    assert answers.tolist() == [[12, 24, 48, 46], [10, 20, 40, 30]]
    assert session.steps == [(0, 3), (3, 1), (4, 1), (5, 1)]
    assert session.handed_back == [False, True, True, True]
