"""What vLLM says of prompts beyond its context, as Triton's official backend and ours pass it on."""

import pytest

from gateway.errors import ContextLengthError
from gateway.triton.dialects.vllm import CONTRACT
from gateway.triton.errors import Fault, TritonError

OFFICIAL = "Error generating stream: "
OURS = "tritongate:invalid_request: "
DECODER = (
    "The decoder prompt (length 2000) is longer than the maximum model length of 1024. Make sure that `max"
)
RENDERER = (
    "This model's maximum context length is 1024 tokens. However, your prompt contains at least 1025 input"
)


def explained(text: str) -> TritonError:
    assert CONTRACT.explain is not None
    return CONTRACT.explain(TritonError(Fault.UNKNOWN, text))


@pytest.mark.parametrize("before", [OFFICIAL, OURS, OFFICIAL + "Traceback:\n  File /opt/secret.py: "])
@pytest.mark.parametrize(
    "text",
    [
        DECODER,
        RENDERER,
        "Prompt length of 2000 is longer than the maximum model length of 1024",
        "The prompt (total length 2000) is too long to fit into the model (context length 1024)",
    ],
)
def test_a_prompt_beyond_the_context_is_told_in_vllms_words(before: str, text: str) -> None:
    error = explained(before + text).to_gateway()
    assert isinstance(error, ContextLengthError)
    assert error.message == text


@pytest.mark.parametrize(
    "text", ["Error generating stream: CUDA error", OURS + "top_p must be in (0, 1]", ""]
)
def test_other_errors_stay_what_they_are(text: str) -> None:
    assert explained(text).fault is Fault.UNKNOWN
