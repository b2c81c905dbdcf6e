"""A Python-backend entry that has ONNX Runtime decode greedily: `ids` and `count` in, `answers` out."""

import json
import os
from typing import Any

import triton_python_backend_utils as pb_utils
from onnxruntime import InferenceSession, OrtValue, SessionOptions

from bench.onnx.decoding import GreedyDecoder


class TritonPythonModel:
    """Answers one request after the other, each with a batch of prompts of one length."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the graph that the parameter `graph` names; it is optimised as it is loaded."""
        parameters = json.loads(args["model_config"])["parameters"]
        options = SessionOptions()
        options.intra_op_num_threads = int(os.environ.get("OMP_NUM_THREADS", "0"))  # as our engine; 0: cores
        graph = parameters["graph"]["string_value"]
        session = InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        self._decoder = GreedyDecoder(session, OrtValue.ortvalue_from_numpy)

    def execute(self, requests: list[Any]) -> list[Any]:
        """Decode."""
        responses = []
        for request in requests:
            ids, count = (
                pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("ids", "count")
            )
            answers = self._decoder.answer(ids, int(count[0]))
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("answers", answers)]))
        return responses
