import base64
import json
from typing import Any

import pytest

from tests.triton_models.vllm.fakes import output
from triton_models.errors import InvalidRequestError
from triton_models.vllm.tensors import EmbeddingRequest, Progress, TextRequest, complete, read_request


class Config:
    """Triton's ModelConfig."""

    def __init__(self, **declared: Any) -> None:
        self.declared: dict[str, Any] = {"input": [], "output": []} | declared

    def as_dict(self) -> dict[str, Any]:
        return self.declared

    def add_input(self, tensor: dict[str, Any]) -> None:
        self.declared["input"].append(tensor)

    def add_output(self, tensor: dict[str, Any]) -> None:
        self.declared["output"].append(tensor)

    def set_max_batch_size(self, size: int) -> None:
        self.declared["max_batch_size"] = size

    def set_model_transaction_policy(self, policy: dict[str, bool]) -> None:
        self.declared["policy"] = policy


def test_a_configuration_is_completed_and_keeps_what_it_says() -> None:
    mine = {"name": "image", "data_type": "TYPE_STRING", "dims": [2]}
    done = complete(Config(input=[mine])).as_dict()
    assert [tensor["name"] for tensor in done["input"]] == [
        "image", "text_input", "stream", "sampling_parameters", "exclude_input_in_output",
        "return_finish_reason", "return_cumulative_logprob", "return_logprobs", "return_num_input_tokens",
        "return_num_output_tokens", "embedding_request",
    ]  # fmt: skip
    assert done["input"][0] == mine
    assert [tensor["name"] for tensor in done["input"] if not tensor.get("optional")] == [
        "image",
        "text_input",
    ]
    assert [tensor["name"] for tensor in done["output"]] == [
        "text_output", "finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens",
        "num_output_tokens",
    ]  # fmt: skip
    assert (done["max_batch_size"], done["policy"]) == (0, {"decoupled": True})


def read(parameters: str = "", **values: Any) -> Any:
    return read_request({"text_input": [b"Hi"]} | values, parameters)


def test_a_plain_request() -> None:
    assert read() == TextRequest(
        prompt="Hi", images=(), stream=False, prepend=True, parameters={}, reports=frozenset()
    )


def test_the_tensor_counts_before_the_requests_own_parameters() -> None:
    assert read('{"top_k": 1}').parameters == {"top_k": 1}
    assert read('{"top_k": 1}', sampling_parameters=[b'{"top_k": 2}']).parameters == {"top_k": 2}


def test_a_stream_never_begins_with_its_prompt() -> None:
    assert not read(stream=[True]).prepend
    with pytest.raises(InvalidRequestError, match="exclude_input_in_output"):
        read(stream=[True], exclude_input_in_output=[False])


def test_images_and_reports() -> None:
    image = b"a file" * 20
    # The second is in lines, as many programs write it.
    images = [base64.b64encode(image), base64.encodebytes(image)]
    request = read(image=images, return_logprobs=[True], return_finish_reason=[False])
    assert request.images == (image, image)
    assert request.reports == {"logprobs"}


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"text_input": [b"\xff"]}, "UTF-8"),
        ({"sampling_parameters": [b"{"]}, "JSON"),
        ({"sampling_parameters": [b"3"]}, "object"),
        ({"sampling_parameters": [b"[" * 100_000]}, "sampling_parameters is not JSON"),
        ({"image": [b"?"]}, "base64"),
        ({"embedding_request": [b"{}"]}, "input"),
        ({"embedding_request": [b'{"input": ["a"]}']}, "input"),
        ({"embedding_request": [b'{"input": "a", "pooling_params": {"dimensions": [1, 2]}}']}, "dimensions"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(values: Any, word: str) -> None:
    with pytest.raises(InvalidRequestError, match=word):
        read(**values)
    with pytest.raises(InvalidRequestError, match="text_input"):
        read_request({}, "")


def test_an_embedding_request() -> None:
    document = b'{"input": [1, 2], "pooling_params": {"dimensions": [64]}}'
    assert read(embedding_request=[document]) == EmbeddingRequest(
        prompt=[1, 2], dimensions=64, reports=frozenset()
    )


def test_choices_without_news_have_an_empty_text_and_keep_their_end() -> None:
    reports = {f"return_{name}": [True] for name in ("finish_reason", "num_output_tokens", "logprobs")}
    progress = Progress(read(stream=[True], **reports), choices=2)
    first = progress.outputs(output("a", None, reason="length"))
    second = progress.outputs(output(None, "bc", finished=True))
    assert first["text_output"] == [b"a", b""]
    assert first["finish_reason"] == [b"length", b"None"]
    assert second["text_output"] == [b"", b"bc"]
    assert second["finish_reason"] == [b"length", b"stop"]
    assert second["num_output_tokens"] == [0, 2]
    assert second["logprobs"][0] == b"null"
    assert json.loads(second["logprobs"][1]) == [
        {str(ord(each)): {"logprob": -0.5, "rank": 1, "decoded_token": each}} for each in "bc"
    ]
    assert "num_input_tokens" not in second
