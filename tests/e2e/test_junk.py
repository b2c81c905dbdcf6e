"""What no careful client sends, straight at the entry: each gets its own error, and the engine goes on."""

import json

import httpx
import pytest
from tritonclient.grpc import service_pb2 as pb

from tests.e2e.stream_client import StreamClient
from tests.e2e.up_process import UpProcess
from wire.strings import pack_strings

pytestmark = pytest.mark.e2e

ENTRY = "chatglm3"
DEEP_TOOLS = b'[{"role":"system","content":"","tools":[{"x":' + b"[" * 10_000 + b"]" * 10_000 + b"}]}]"


def raw(values: dict[str, list[bytes]], rows: int = 1) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name=ENTRY)
    for name, strings in values.items():
        request.inputs.add(name=name, datatype="BYTES", shape=[rows, 1])
        request.raw_input_contents.append(pack_strings(strings))
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    return request


def refusal(triton: StreamClient, request: pb.ModelInferRequest) -> str:
    call = triton.send(request)
    try:
        for message in call:
            if message.error_message:
                return str(message.error_message)
    finally:
        call.cancel()
    pytest.fail("the junk was taken")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"prompt": [b"\xff\xfe"], "history": [b""], "sampling": [b""]}, "utf-8"),
        ({"prompt": [b"hi"], "history": [b"{"], "sampling": [b""]}, "invalid_request"),
        ({"prompt": [b"hi"], "history": [b"[" * 10_000], "sampling": [b""]}, "invalid_request"),
        ({"prompt": [b"hi"], "history": [DEEP_TOOLS], "sampling": [b""]}, "invalid_request"),
        ({"prompt": [b"hi"], "history": [b""], "sampling": [b"[" * 100_000]}, "invalid_request"),
        ({"prompt": [b"hi"], "history": [b""], "sampling": [b"\0"]}, "invalid_request"),
        ({"prompt": [b"hi"], "history": [b""], "sampling": [b'{"temperature":1e400}']}, "invalid_request"),
        ({"prompt": [b"hi"], "history": [b""], "sampling": [b'{"seed":1e30}']}, "invalid_request"),
        ({"prompt": [b"x" * 2_000_000], "history": [b""], "sampling": [b""]}, "context_length_exceeded"),
    ],
)
def test_junk_is_refused_in_words(triton: StreamClient, values: dict[str, list[bytes]], words: str) -> None:
    said = refusal(triton, raw(values))
    assert words in said
    assert "Traceback" not in said
    assert ".py" not in said
    assert triton.ask("chatglm3", "hi", max_tokens=2).last.finish_reason is not None


def test_several_strings_in_one_request_are_refused_not_cut(triton: StreamClient) -> None:
    two = {"prompt": [b"a", b"b"], "history": [b"", b""], "sampling": [b"", b""]}
    assert "exactly one string" in refusal(triton, raw(two, rows=2))


def test_a_bad_request_in_a_batch_fails_alone(up: UpProcess, triton: StreamClient) -> None:
    """Sent together, so that Triton may hand them to one `execute`."""
    good = [triton.call("chatglm3", "你好", max_tokens=3) for _ in range(8)]
    bad = [triton.send(raw({"prompt": [b"hi"], "history": [b"?"], "sampling": [b""]})) for _ in range(8)]
    for call in good:
        assert not any(message.error_message for message in call.responses)
    for call in bad:
        assert any("tritongate:invalid_request:" in message.error_message for message in call)
    assert up.is_ready()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b'"x"',
        b"{",
        b"\xff",
        b"[" * 200_000,
        b'{"model": "chatglm3"}',
        b'{"model": "chatglm3", "messages": []}',
        b'{"model": "chatglm3", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "chatglm3", "messages": [{"role": "user", "content": null}]}',
        b'{"model": "chatglm3", "messages": [{"role": "user", "content": "hi"}], "temperature": NaN}',
        b'{"model": "chatglm3", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1e999}',
        b'{"model": "chatglm3", "messages": [{"role": "user", "content": "hi"}], "stop": true}',
        b'{"model": "chatglm3", "messages": [{"role": "user", "content": "hi"}], "seed": 1e30}',
    ],
)
def test_a_junk_body_is_a_400_in_openais_shape(up: UpProcess, body: bytes) -> None:
    answer = httpx.post(
        up.base_url + "/v1/chat/completions",
        content=body,
        headers={"content-type": "application/json"},
        timeout=60,
    )
    assert answer.status_code == 400
    assert set(json.loads(answer.text)["error"]) == {"message", "type", "param", "code"}
