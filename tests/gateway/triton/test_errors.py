import grpc
import pytest

from gateway.core.request import Conversation, Generation, Grammar, TokenIds, Tool, ToolOffer
from gateway.errors import GatewayError
from gateway.triton.errors import MESSAGE_LIMIT, Fault, classify
from tests.gateway.triton.fake_triton import generation
from wire.refusal import RefusalCode, refusal_text

SECRETS = ("/models", "Traceback", "request id", "tritongate:", "m_0")

TABLE = [
    # The texts and statuses of tritonserver 2.51, then grpc's own, then our models' refusals.
    (None, "Request for unknown model: 'nope-stream' is not found", Fault.NOT_READY, 503),
    (None, "Request for unknown model: 'm' has no available versions", Fault.NOT_READY, 503),
    (
        grpc.StatusCode.NOT_FOUND,
        "Request for unknown model: 'm' has no available versions",
        Fault.NOT_READY,
        503,
    ),
    (grpc.StatusCode.UNAVAILABLE, "Server not ready", Fault.NOT_READY, 503),
    (
        None,
        "[request id: r] Server is stopping, scheduler for model has stopped accepting new requests",
        Fault.NOT_READY,
        503,
    ),
    (None, "[request id: rid-1] Exceeds maximum queue size", Fault.QUEUE_FULL, 429),
    (grpc.StatusCode.UNAVAILABLE, "[request id: rid-1] Exceeds maximum queue size", Fault.QUEUE_FULL, 429),
    (grpc.StatusCode.UNAVAILABLE, "[request id: a]b[c]] Exceeds maximum queue size", Fault.QUEUE_FULL, 429),
    (grpc.StatusCode.UNAVAILABLE, "[request id: rid-1] Request timeout expired", Fault.DEADLINE, 504),
    (None, "Request timeout expired", Fault.DEADLINE, 504),
    (
        grpc.StatusCode.INTERNAL,
        "Stub process 'm_0_0' is not healthy.",
        Fault.STUB_DEAD,
        503,
    ),
    (
        grpc.StatusCode.INTERNAL,
        "Failed to process the request(s) for model 'm', message: Exceeds maximum queue size\nAt: /models/m",
        Fault.UNKNOWN,
        502,
    ),
    (
        None,
        "[request id: r] unexpected shape for input 'sampling' for model 'm'. Expected [-1,1], got [1].",
        Fault.UNKNOWN,
        502,
    ),
    (
        grpc.StatusCode.INVALID_ARGUMENT,
        "[request id: r] expected 3 inputs but got 2",
        Fault.TENSORS_REFUSED,
        502,
    ),
    (
        grpc.StatusCode.UNAVAILABLE,
        "explicit model load / unload is not allowed if polling is enabled",
        Fault.NOT_PERMITTED,
        403,
    ),
    (
        grpc.StatusCode.UNAVAILABLE,
        "This protocol is restricted, expecting header 'triton-grpc-protocol-key'",
        Fault.NOT_PERMITTED,
        403,
    ),
    (grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses", Fault.UNREACHABLE, 503),
    (grpc.StatusCode.UNAVAILABLE, "Socket closed", Fault.UNREACHABLE, 503),
    (
        grpc.StatusCode.INTERNAL,
        'Failed "execute_batch": (<SendMessageOperation>,)',
        Fault.UNREACHABLE,
        503,
    ),
    (grpc.StatusCode.INTERNAL, "Internal error from Core", Fault.UNREACHABLE, 503),
    (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", Fault.DEADLINE, 504),
    (grpc.StatusCode.CANCELLED, "", Fault.UNREACHABLE, 503),
    (grpc.StatusCode.RESOURCE_EXHAUSTED, "Received message larger than max (9 vs. 8)", Fault.TOO_LARGE, 400),
    (
        grpc.StatusCode.UNKNOWN,
        "Stream removed (CLIENT: Received message larger than max (9 vs. 8))",
        Fault.TOO_LARGE,
        400,
    ),
    (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "CLIENT: Sent message larger than max (9)",
        Fault.TOO_LARGE,
        400,
    ),
    (grpc.StatusCode.RESOURCE_EXHAUSTED, "out of everything", Fault.UNKNOWN, 502),
    (grpc.StatusCode.UNIMPLEMENTED, "Method not found!", Fault.UNKNOWN, 502),
    (None, "", Fault.UNKNOWN, 502),
    (grpc.StatusCode.INVALID_ARGUMENT, "tritongate:invalid_request: bad seed", Fault.INVALID_REQUEST, 400),
    (None, "tritongate:invalid_grammar: no such keyword", Fault.INVALID_GRAMMAR, 400),
    (
        None,
        "[request id: r] tritongate:context_length_exceeded: 9 tokens are too many",
        Fault.CONTEXT_LENGTH,
        400,
    ),
    (grpc.StatusCode.UNAVAILABLE, "tritongate:queue_full: 512 are waiting", Fault.QUEUE_FULL, 429),
    (grpc.StatusCode.UNAVAILABLE, "tritongate:deadline_exceeded: 3 s", Fault.DEADLINE, 504),
    (grpc.StatusCode.UNAVAILABLE, "tritongate:shutting_down: unloading", Fault.NOT_READY, 503),
    (grpc.StatusCode.CANCELLED, "tritongate:cancelled: by request", Fault.CANCELLED, 503),
    (grpc.StatusCode.INTERNAL, "tritongate:internal: at /models/x.py", Fault.INTERNAL, 502),
    (None, "tritongate:unheard_of: what", Fault.UNKNOWN, 502),
]


@pytest.mark.parametrize(
    ("words", "field", "param"),
    [
        ("prompt has an id outside the vocabulary of 9", None, "prompt"),
        ("prompt has an id outside the vocabulary of 9", "prompt.1", "prompt.1"),
        ("logit_bias has an id outside the vocabulary of 9", None, "logit_bias"),
        ("min_tokens 3 exceeds max_tokens 2", None, "min_tokens"),
        ("something else", None, None),
    ],
)
def test_a_refusal_names_its_field(words: str, field: str | None, param: str | None) -> None:
    request = Generation(request_id="r", model="m", prompt=TokenIds((9,)), deadline=0.0, prompt_field=field)
    refused = classify(refusal_text(RefusalCode.INVALID_REQUEST, words)).to_gateway(request)
    assert (refused.status, refused.message, refused.param) == (400, words, param)


@pytest.mark.parametrize(("code", "text", "fault", "status"), TABLE)
def test_what_triton_says_becomes_one_fault_and_one_status(
    code: grpc.StatusCode | None, text: str, fault: Fault, status: int
) -> None:
    error = classify(text, code)
    assert error.fault is fault
    assert error.detail == text
    told = error.to_gateway()
    assert isinstance(told, GatewayError)
    assert told.status == status
    assert not any(secret in told.message for secret in SECRETS)
    assert (told.retry_after_s is not None) == (status in {429, 503})


def test_every_fault_has_a_code_of_its_own_and_every_refusal_a_fault() -> None:
    assert len({fault.code for fault in Fault}) == len(Fault)
    for code in RefusalCode:
        assert classify(refusal_text(code, "why")).fault.code in {code.value, "not_ready"}


def test_only_refusals_of_the_request_itself_are_passed_on_in_their_own_words() -> None:
    passed_on = {
        code for code in RefusalCode if "own words" in classify(refusal_text(code, "own words")).message
    }
    assert passed_on == {
        RefusalCode.INVALID_REQUEST,
        RefusalCode.INVALID_GRAMMAR,
        RefusalCode.CONTEXT_LENGTH_EXCEEDED,
    }


def test_a_refusal_is_shown_without_what_follows_its_first_line_and_not_at_any_length() -> None:
    shown = classify(
        refusal_text(RefusalCode.INVALID_REQUEST, "no such seed\n\nAt:\n  /models/m.py(1)")
    ).message
    assert shown == "no such seed"
    shown = classify(refusal_text(RefusalCode.INVALID_REQUEST, "x" * 10_000)).message
    assert len(shown) == MESSAGE_LIMIT


def test_a_request_that_may_have_done_harm_or_was_refused_for_itself_is_not_repeated_elsewhere() -> None:
    assert {fault for fault in Fault if fault.value.failover} == {
        Fault.NO_ADAPTER,
        Fault.QUEUE_FULL,
        Fault.UNREACHABLE,
        Fault.NOT_READY,
        Fault.UNLOADED,
        Fault.STUB_DEAD,
        Fault.SILENT,
        Fault.UNKNOWN,
        Fault.CHANNEL_LOST,
        Fault.NO_CHANNEL,
    }
    assert [fault for fault in Fault if fault.value.same_replica] == [Fault.CHANNEL_LOST]


def test_no_restart_is_promised() -> None:
    """Behind `serve` nobody may start a dead process again."""
    assert not [fault for fault in Fault if "restart" in fault.value.message]


async def test_a_refused_grammar_is_blamed_on_the_field_that_it_came_from() -> None:
    tools = (Tool(name=name, description=None, parameters={}, place=at) for at, name in enumerate("ab"))
    offer = ToolOffer(tools=tuple(tools))
    request = generation(prompt=Conversation((), offer))
    for code, words, param in (
        ("invalid_grammar", "no such keyword", "tools"),
        ("invalid_grammar", "tool b: parameters.enum must be a list", "tools.1.function.parameters"),
        ("invalid_grammar", "tool c: nobody's", "tools"),
        ("invalid_request", "tool b: bad seed", None),
    ):
        told = classify(f"tritongate:{code}: {words}").to_gateway(request)
        assert (told.message, told.param) == (words, param)


OFFICIAL = "Error generating stream: "
OURS = "tritongate:invalid_request: "
TENSORRT = "Encountered an error when fetching new request: "
TOO_LONG = [
    "The decoder prompt (length 2000) is longer than the maximum model length of 1024. Make sure that `max",
    "This model's maximum context length is 1024 tokens. However, your prompt contains at least 1025 input",
    "Prompt length of 2000 is longer than the maximum model length of 1024",
    "The prompt (total length 2000) is too long to fit into the model (context length 1024)",
]


@pytest.mark.parametrize(
    ("before", "words", "after"),
    [
        *((before, text, "") for before in (OFFICIAL, OURS, OFFICIAL + "In /x.py: ") for text in TOO_LONG),
        *(
            (TENSORRT, f"Prompt length (9) exceeds maximum {what} length (8)", ". Set (/cpp/llmRequest.h:9)")
            for what in ("input", "sequence")
        ),
    ],
)
def test_a_prompt_beyond_the_context_is_told_in_the_backends_words(
    before: str, words: str, after: str
) -> None:
    """Of a text to be continued and of one to be embedded."""
    error = classify(before + words + after)
    assert (error.fault, error.to_gateway().message) == (Fault.CONTEXT_LENGTH, words)


@pytest.mark.parametrize(
    ("words", "after"),
    [
        ("Failed to transform regex into a grammar", ": [08:00:00] /project/cpp/regex_converter.cc:7: at 3"),
        ("Failed to transform json schema into a grammar", ": why"),
        ("Failed to convert the grammar from Lark to EBNF", "."),
        ("Invalid JSON grammar specification", "."),
        ("The provided JSON schema contains features not supported by xgrammar", "."),
    ],
)
@pytest.mark.parametrize("before", [OFFICIAL, OURS])
async def test_a_grammar_that_vllm_refuses_is_the_requests_fault(before: str, words: str, after: str) -> None:
    asked = generation(grammar=Grammar(kind="regex", text="(", field="structured_outputs.regex"))
    told = classify(before + words + after).to_gateway(asked)
    assert (told.status, told.message, told.param) == (400, words, "structured_outputs.regex")


@pytest.mark.parametrize(
    ("words", "after"),
    [
        ("At most 1 image(s) may be provided in one prompt.", " Set `--limit-mm-per-prompt` to increase it."),
        (
            "Requested sample logprobs of 9, which is greater than max allowed: 5",
            " (parameter=logprobs, value=9)",
        ),
        (
            "token_id(s) [7] in allowed_token_ids are unknown",
            " (parameter=allowed_token_ids, value=[7, (8)])",
        ),
        ("temperature is too low", " (parameter=temperature)"),
        ("allowed_token_ids contains out-of-vocab token id", "!"),
        ("The min_p sampling parameters are not yet supported with speculative decoding", "."),
    ],
)
def test_what_vllm_says_of_a_parameter_is_the_requests_fault(words: str, after: str) -> None:
    told = classify(OFFICIAL + words + after).to_gateway()
    assert (told.status, told.message) == (400, words)


def test_triton_vllm_backend_reads_no_ids_of_a_logit_bias() -> None:
    """It leaves them the strings that JSON has, which newer engines compare with numbers."""
    error = classify(OFFICIAL + "'<' not supported between instances of 'str' and 'int'").to_gateway()
    assert (error.status, error.param) == (400, "logit_bias")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("Error generating stream: CUDA error", Fault.UNKNOWN),
        ("Error generating stream: CUDA error (parameter=x) in a kernel", Fault.UNKNOWN),
        ("a model's own error (parameter=x, value=1)", Fault.UNKNOWN),
        (OURS + "top_p must be in (0, 1]", Fault.INVALID_REQUEST),
        (OFFICIAL + "'NoneType' object has no attribute 'lora_name'", Fault.INVALID_REQUEST),
        ("tritongate:internal: maximum context length is", Fault.INTERNAL),
    ],
)
def test_other_errors_of_backends_are_not_about_the_context(text: str, fault: Fault) -> None:
    assert classify(text).fault is fault
