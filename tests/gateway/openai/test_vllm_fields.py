"""Every field of vLLM's requests, at the value that does nothing there, does nothing here, without a word."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from gateway.openai.chat_request import ChatRequest
from gateway.openai.completions import CompletionRequest
from gateway.openai.document import Reading

COMMON: dict[str, Any] = {
    "add_special_tokens": None,  # true for texts, false for chats
    "allowed_token_ids": None,
    "bad_words": [],
    "best_of": None,
    "cache_salt": None,
    "detokenize": True,
    "early_stopping": False,
    "ec_transfer_params": None,
    "echo": False,
    "frequency_penalty": 0.0,
    "guided_choice": None,
    "guided_decoding_backend": None,
    "guided_grammar": None,
    "guided_json": None,
    "guided_regex": None,
    "guided_whitespace_pattern": None,
    "ignore_eos": False,
    "include_stop_str_in_output": False,
    "kv_transfer_params": None,
    "length_penalty": 1.0,
    "logit_bias": {},
    "logits_processors": [],
    "logprob_token_ids": None,
    "max_tokens": None,  # of completions it is 16, which is a bound
    "min_p": 0.0,
    "min_tokens": 0,
    "n": 1,
    "presence_penalty": 0.0,
    "priority": 0,
    "prompt_embeds": None,
    "prompt_logprobs": None,
    "repetition_detection": None,
    "repetition_penalty": 1.0,
    "request_id": None,  # vLLM makes one up
    "response_format": {"type": "text"},
    "return_mm_kwargs": True,
    "return_token_ids": False,
    "return_token_offsets": False,
    "return_tokens_as_token_ids": False,
    "routed_experts_prompt_start": 0,
    "seed": None,
    "session_id": None,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "stop": [],
    "stop_token_ids": [],
    "stream": False,
    "stream_interval": None,
    "stream_options": {"include_usage": False, "continuous_usage_stats": False},
    "structured_outputs": None,
    "temperature": 1.0,
    "thinking_token_budget": -1,
    "top_k": 0,
    "top_p": 1.0,
    "truncate_prompt_tokens": None,
    "truncation_side": "left",
    "use_beam_search": False,
    "user": "",
    "vllm_xargs": {},
    "watermarking": False,
}
CHAT: dict[str, Any] = COMMON | {
    "add_generation_prompt": True,
    "add_special_tokens": False,
    "chat_template": None,
    "chat_template_kwargs": {},
    "continue_final_message": False,
    "documents": [],
    "include_reasoning": True,
    "logprobs": False,
    "max_completion_tokens": None,
    "media_io_kwargs": {},
    "mm_processor_kwargs": {},
    "parallel_tool_calls": True,
    "reasoning_effort": None,
    "return_prompt_text": False,
    "tool_choice": "none",
    "tools": [],
    "top_logprobs": 0,
}
COMPLETION: dict[str, Any] = COMMON | {"add_special_tokens": True, "logprobs": None, "suffix": ""}
ANOTHER: list[tuple[str, Any]] = [
    ("parallel_tool_calls", False),
    ("top_k", -1),
    ("documents", None),
    ("prompt_embeds", []),
    ("stream_options", {}),
    ("tool_choice", "auto"),
    ("tools", None),
]
"""Other values of the same fields that do nothing."""

Read = Callable[[bytes, Reading], Any]
READERS: list[tuple[Read, dict[str, Any], dict[str, Any]]] = [
    (ChatRequest.read, {"model": "m", "messages": [{"role": "user", "content": "hi"}]}, CHAT),
    (CompletionRequest.read, {"model": "m", "prompt": "hi"}, COMPLETION),
]
CASES: list[Any] = [
    pytest.param(reader, base, document, id=f"{next(iter(base.keys() - {'model'}))}-{name}")
    for reader, base, fields in READERS
    for name, document in (
        *((name, {name: value}) for name, value in fields.items()),
        *((f"{name}={value}", {name: value}) for name, value in ANOTHER if name in fields),
        ("all", fields),
        ("null", dict.fromkeys(fields)),
    )
]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("reader", "base", "document"), CASES)
def test_it_does_nothing(reader: Read, base: dict[str, Any], document: dict[str, Any], strict: bool) -> None:
    def generations(body: dict[str, Any], reading: Reading) -> Any:
        return reader(json.dumps(body).encode(), reading).generations(request_id="r", deadline=0)

    reading = Reading(strict=strict)
    with_it, without = (generations({**base, **more}, reading) for more in (document, {}))
    assert with_it == without
    assert not reading.ignored
