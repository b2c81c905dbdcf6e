"""Plays models of other people's backends, to the letter of their contracts, in Triton's Python backend.

An answer is what stands behind the last `SAY:` of the prompt, up to the line's end, in tokens of at most
three characters; of the model that takes ids, a token is a character. `SAY:!` fails as a backend does, with a
traceback, a prompt with `!late` after two responses, and `SAY:!long` as vLLM of a long prompt; the answer to
`SAY:?` is what the model was given.
"""

import json
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as utils

STEP_S = 0.002
SECRET = "Traceback (most recent call last):\n  File /opt/secret.py: "
Given = dict[str, list[Any]]
ALPHABET = [*map(chr, range(32, 127)), "\n"]
"""The characters by their ids, in the tokenizer of `foreign_server.py`."""


_LATE = 2
"""Responses before a failure in the middle of an answer."""


def tokens_of(text: str) -> list[str]:
    return [text[at : at + 3] for at in range(0, len(text), 3)]


def scores_of(ids: list[int]) -> list[float]:
    """The log-probabilities of an answer's ids so far."""
    return [-id_ / 128 for id_ in ids]


class TritonPythonModel:
    def initialize(self, arguments: dict[str, str]) -> None:
        config = json.loads(arguments["model_config"])
        self.plays = config["parameters"]["plays"]["string_value"]
        self.cancelled = Path(arguments["model_repository"]) / "cancelled"
        self.decoupled = config["model_transaction_policy"]["decoupled"]

    def execute(self, requests: list[Any]) -> list[Any] | None:
        if not self.decoupled:
            return [list(self.answer(request))[-1] for request in requests]
        for request in requests:
            threading.Thread(target=self.stream, args=(request, request.get_response_sender())).start()
        return None

    def stream(self, request: Any, sender: Any) -> None:
        final = utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        try:
            responses = list(self.answer(request))
            for at, response in enumerate(responses):
                if request.is_cancelled():
                    self.cancelled.touch()
                    break
                if at == _LATE and self.late(request):
                    raise RuntimeError("the engine is broken")  # noqa: TRY301 - as any other failure
                last = at == len(responses) - 1 and self.plays not in ("bls", "llmapi")
                sender.send(response, final if last else 0)
                if last:
                    return
                time.sleep(STEP_S)
        except Exception as error:  # noqa: BLE001 - as the backends do
            text = f"Error generating stream: {'' if isinstance(error, ValueError) else SECRET}{error}"
            text = error.args[0] if isinstance(error, LookupError) else text
            traceback.print_exc()
            empty = np.array([b"N/A"], dtype=np.object_)
            failed = utils.InferenceResponse([utils.Tensor("text_output", empty)], utils.TritonError(text))
            sender.send(failed, final)
            return
        sender.send(flags=final)

    def late(self, request: Any) -> bool:
        """Whether it is to fail in the middle of its answer."""
        given = utils.get_input_tensor_by_name(request, "text_input")
        if given is not None:
            return b"!late" in given.as_numpy().reshape(-1)[0]
        ids = utils.get_input_tensor_by_name(request, "input_ids").as_numpy().reshape(-1)
        return "!late" in "".join(ALPHABET[id_] for id_ in ids)

    def answer(self, request: Any) -> Iterator[Any]:
        shapes = {tensor.name(): tensor.as_numpy().shape for tensor in request.inputs()}
        given = {tensor.name(): tensor.as_numpy().reshape(-1).tolist() for tensor in request.inputs()}
        if self.plays == "inner":
            return self.as_inner(given, shapes)
        if self.plays == "plain":
            return self.as_plain(given)
        if self.plays == "vllm_embeds":
            return self.as_vllm_that_embeds(given)
        prompt = given["text_input"][0].decode()
        if "embedding_request" in given:
            raise ValueError("Model vllm does not support 'embed' request")
        said = prompt.rpartition("SAY:")[2].partition("\n")[0]
        answer: Callable[[Given, str, list[str]], Iterator[Any]] = getattr(self, "as_" + self.plays)
        return answer(given, prompt, tokens_of(self.told(said, given)))

    def told(self, said: str, given: Given) -> str:
        if said == "!":
            raise RuntimeError("the engine is broken")
        if said == "!long":
            raise ValueError("The decoder prompt (length 9) is longer than the maximum model length of 8. So")
        if said != "?":
            return said
        shown = {name: values for name, values in given.items() if name not in ("text_input", "input_ids")}
        return json.dumps(shown, default=bytes.decode)

    def as_vllm(self, given: Given, prompt: str, tokens: list[str]) -> Iterator[Any]:
        parameters = json.loads(given["sampling_parameters"][0])
        adapter = parameters.get("lora_name")
        if adapter == "absent":
            raise LookupError(f"LoRA {adapter} is not supported, we currently support ['tuned']")
        tokens = tokens_of(f"{adapter}: " + "".join(tokens)) if adapter else tokens
        stream = given.get("stream", [False])[0]
        taken = tokens[: int(parameters.get("max_tokens", 16))]
        if parameters["top_k"] == 0:
            raise RuntimeError("top_k must be -1 (disable), or at least 1, got 0.")
        text, reason = "".join(taken), "length" if len(taken) < len(tokens) else "stop"
        for stop in parameters.get("stop", []):
            if stop in text:
                kept = len(stop) if parameters["include_stop_str_in_output"] else 0
                text, reason = text[: text.index(stop) + kept], "stop"
        taken = tokens_of(text)
        if not stream:
            copies = parameters.get("n", 1)
            before = "" if given.get("exclude_input_in_output", [False])[0] else prompt
            yield self.vllm_response(given, [before + text] * copies, reason, prompt=prompt, tokens=taken)
            return
        for at, token in enumerate(taken or [""]):
            ends = at >= len(taken) - 1
            yield self.vllm_response(
                given, [token], reason if ends else "None", prompt=prompt, tokens=[token]
            )

    def vllm_response(
        self, given: Given, texts: list[str], reason: str, *, prompt: str, tokens: list[str]
    ) -> Any:
        def asked(name: str) -> bool:
            return bool(given.get(name, [False])[0])

        outputs = [utils.Tensor("text_output", np.array([text.encode() for text in texts], dtype=np.object_))]
        if asked("return_finish_reason"):
            reasons = np.array([reason.encode()] * len(texts), dtype=np.object_)
            outputs.append(utils.Tensor("finish_reason", reasons))
        if asked("return_num_input_tokens"):
            outputs.append(
                utils.Tensor("num_input_tokens", np.array(len(tokens_of(prompt)), dtype=np.uint32))
            )
        if asked("return_num_output_tokens"):
            outputs.append(
                utils.Tensor("num_output_tokens", np.array([len(tokens)] * len(texts), dtype=np.uint32))
            )
        if asked("return_logprobs"):
            listed = [
                {
                    "7": {"logprob": -0.5, "rank": 1, "decoded_token": token},
                    "9": {"logprob": -1.5, "rank": 2, "decoded_token": "x"},
                }
                for token in tokens
            ]
            documents = np.array([json.dumps(listed).encode()] * len(texts), dtype=np.object_)
            outputs.append(utils.Tensor("logprobs", documents))
        return utils.InferenceResponse(outputs)

    def as_llmapi(self, given: Given, prompt: str, tokens: list[str]) -> Iterator[Any]:
        taken = tokens[: given["sampling_param_max_tokens"][0]]
        reason = "length" if len(taken) < len(tokens) else "stop"
        streams = given.get("streaming", [False])[0]
        if streams and not self.decoupled:
            raise RuntimeError("Streaming is only supported in decoupled mode.")
        before = "" if given["sampling_param_exclude_input_from_output"][0] else prompt
        for at in range(len(taken)) if streams else [len(taken) - 1]:
            outputs = [
                utils.Tensor(
                    "text_output", np.array([(before + "".join(taken[: at + 1])).encode()], dtype=np.object_)
                )
            ]
            ends = at >= len(taken) - 1
            told = np.array([(reason if ends else "None").encode()], dtype=np.object_)
            if given.get("return_finish_reason", [False])[0]:
                outputs.append(utils.Tensor("finish_reason", told))
            yield utils.InferenceResponse(outputs)

    def as_ensemble(self, given: Given, prompt: str, tokens: list[str]) -> Iterator[Any]:
        taken = tokens[: given["max_tokens"][0]]
        steps = [[token] for token in taken] if given.get("stream", [False])[0] else [taken]
        for step in steps:
            text = np.array([["".join(step).encode()]], dtype=np.object_)
            outputs = [utils.Tensor("text_output", text)]
            counts = {"num_input_tokens": len(tokens_of(prompt)), "num_output_tokens": len(step)}
            outputs += [
                utils.Tensor(name, np.array([[count]], dtype=np.int32))
                for name, count in counts.items()
                if given.get(f"return_{name}", [False])[0]
            ]
            yield utils.InferenceResponse(outputs)

    def as_bls(self, given: Given, prompt: str, tokens: list[str]) -> Iterator[Any]:
        taken = tokens[: given["max_tokens"][0]]
        for at in range(len(taken)) if given.get("stream", [False])[0] else [len(taken) - 1]:
            text = np.array([["".join(taken[: at + 1]).encode()]], dtype=np.object_)  # accumulate_tokens
            yield utils.InferenceResponse([utils.Tensor("text_output", text)])

    def as_plain(self, given: Given) -> Iterator[Any]:
        vector = np.array([[len(given["TEXT"][0]), 0.5, -1.0]], dtype=np.float32)
        yield utils.InferenceResponse([utils.Tensor("sentence_embedding", vector)])

    def as_vllm_that_embeds(self, given: Given) -> Iterator[Any]:
        if "embedding_request" not in given:
            raise ValueError("Model vllm_embeds does not support 'generate' request")
        asked = json.loads(given["embedding_request"][0])
        length = asked.get("pooling_params", {"dimensions": [4]})["dimensions"][0]
        vector = json.dumps([float(len(asked["input"])), *[0.25] * (length - 1)]).encode()
        count = np.array(len(asked["input"]), dtype=np.uint32)
        shown = [
            utils.Tensor("text_output", np.array([vector], dtype=np.object_)),
            utils.Tensor("num_input_tokens", count),
        ]
        yield utils.InferenceResponse(shown)

    def as_inner(self, given: Given, shapes: dict[str, tuple[int, ...]]) -> Iterator[Any]:
        if any(len(shape) != (3 if name.endswith("_list") else 2) for name, shape in shapes.items()):
            raise RuntimeError("Invalid format for input_ids")
        if given["beam_width"] != [1] or given["pad_id"] != [ALPHABET.index("_")]:
            raise RuntimeError("not as the clients of this model write it")
        prompt = given["input_ids"][: given["input_lengths"][0]]
        said = "".join(ALPHABET[id_] for id_ in prompt).rpartition("SAY:")[2].partition("\n")[0]
        said = self.told(said, given)
        words = self.words_of(given.get("stop_words_list", []))
        ids: list[int] = []
        for id_ in map(ALPHABET.index, said):
            if id_ == given["end_id"][0] or len(ids) == given["request_output_len"][0]:
                break
            ids.append(id_)
            if any(ids[-len(word) :] == word for word in words):
                break
        scored = given.get("return_log_probs", [False])[0]
        if not given.get("streaming", [False])[0]:
            shown = ids if given["exclude_input_in_output"][0] else prompt + ids
            yield self.inner_response(shown, scores_of(ids) if scored else None)
            return
        for at, id_ in enumerate(ids):
            yield self.inner_response([id_], scores_of(ids[: at + 1]) if scored else None)
        yield self.inner_response([], scores_of(ids) if scored else None)

    def words_of(self, flat: list[int]) -> list[list[int]]:
        ids, ends = flat[: len(flat) // 2], flat[len(flat) // 2 :]
        starts = [0, *ends]
        return [ids[start:end] for start, end in zip(starts, ends, strict=False) if end > 0]

    def inner_response(self, ids: list[int], scores: list[float] | None) -> Any:
        told = {
            "output_ids": np.array([[ids]], np.int32),
            "sequence_length": np.array([[len(ids)]], np.int32),
        }
        if scores is not None:
            told["output_log_probs"] = np.array([[scores]], np.float32)
            told["cum_log_probs"] = np.array([[sum(scores)]], np.float32)
        return utils.InferenceResponse([utils.Tensor(name, values) for name, values in told.items()])
