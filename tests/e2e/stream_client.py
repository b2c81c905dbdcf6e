"""A plain gRPC client of a model's entry, as anybody could write from wire/README.md."""

import contextlib
import json
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from wire.meta import Meta, Tokenized, decode_meta
from wire.strings import pack_strings, unpack_strings

TIMEOUT_S = 100.0


@dataclass
class StreamAnswer:
    """Everything that one generation was answered."""

    responses: list[tuple[str, Meta]] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.responses)

    @property
    def metas(self) -> list[Meta]:
        return [meta for _, meta in self.responses]

    @property
    def token_ids(self) -> list[int]:
        return [token_id for meta in self.metas for token_id in meta.token_ids or []]

    @property
    def last(self) -> Meta:
        return self.metas[-1]


class StreamClient:
    """Calls one Triton. Thread-safe."""

    def __init__(self, address: str, repository_key: str | None = None) -> None:
        """Connect; the key, KEY=VALUE, is needed for statistics where Triton restricts them."""
        name, _, value = (repository_key or "").partition("=")
        self._restricted = ((f"triton-grpc-protocol-{name}", value),) if name else ()
        self._channel = grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def close(self) -> None:
        self._channel.close()

    def ask(
        self, model: str, prompt: str = "", history: list[Any] | None = None, **sampling: Any
    ) -> StreamAnswer:
        """Run one generation to its end."""
        return StreamAnswer(list(self.stream(model, prompt, history, **sampling)))

    def stream(
        self,
        model: str,
        prompt: str = "",
        history: list[Any] | None = None,
        **sampling: Any,
    ) -> Generator[tuple[str, Meta], None, None]:
        """Yield (text, meta) per response; closing the generator cancels the call."""
        call = self.call(model, prompt, history, **sampling)
        with contextlib.closing(call):
            for message in call.responses:
                if message.error_message:
                    raise RuntimeError(message.error_message)
                tensors = {
                    output.name: unpack_strings(raw)[0]
                    for output, raw in zip(
                        message.infer_response.outputs,
                        message.infer_response.raw_output_contents,
                        strict=True,
                    )
                }
                if tensors:
                    yield tensors["response"].decode(), decode_meta(tensors["meta"])

    def call(self, model: str, prompt: str = "", history: list[Any] | None = None, **sampling: Any) -> "Call":
        """Send one request; what `sampling` holds says of which kind it is."""
        turns = "" if history is None else json.dumps(history)
        return Call(self.send(infer_request(model, prompt, turns, json.dumps(sampling))))

    def send(self, request: pb.ModelInferRequest) -> Any:
        """Send one request on a stream of its own and return the call."""
        return self._stub.ModelStreamInfer(iter([request]), timeout=TIMEOUT_S)

    def tokenize(
        self, model: str, text: str | None = None, *, messages: list[Any] | None = None, **request: Any
    ) -> Tokenized:
        """Have a text tokenized, or a conversation, of which the last message is the newest."""
        if text is not None:
            (answer,) = self.stream(model, text, tokenize="text", **request)
        else:
            *history, newest = messages or []
            role = newest["role"]
            (answer,) = self.stream(
                model, newest["content"], history, tokenize="conversation", role=role, **request
            )
        assert answer[1].tokenized is not None
        return answer[1].tokenized

    def detokenize(self, model: str, ids: list[int], **request: Any) -> str:
        """Return the text of `ids`."""
        ((text, _),) = self.stream(model, detokenize=ids, **request)
        return text

    def statistics(self, entry: str) -> tuple[int, int]:
        """Return Triton's (inference count, execution count) of an entry."""
        answer = self._stub.ModelStatistics(
            pb.ModelStatisticsRequest(name=entry), timeout=TIMEOUT_S, metadata=self._restricted
        )
        (stats,) = answer.model_stats
        return stats.inference_count, stats.execution_count


class Call:
    """A running ModelStreamInfer."""

    def __init__(self, responses: Any) -> None:
        self.responses = responses

    def close(self) -> None:
        self.responses.cancel()


def infer_request(
    model: str, prompt: str, history: str, sampling: str, *, version: str = ""
) -> pb.ModelInferRequest:
    """Return a request with these tensors."""
    request = pb.ModelInferRequest(model_name=model, model_version=version)
    for name, value in {"prompt": prompt, "history": history, "sampling": sampling}.items():
        request.inputs.add(name=name, datatype="BYTES", shape=[1, 1])
        request.raw_input_contents.append(pack_strings([value.encode()]))
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    return request
