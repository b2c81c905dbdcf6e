"""docker-compose.yml with a checkpoint whose conversations a chat template writes."""

import json
from pathlib import Path

import openai
import pytest

from tests.deploy.compose_file import CHOSEN, EXAMPLE_ENV, read_env
from tests.deploy.compose_stack import KEY, ComposeStack, keys_in
from tests.template_checkpoint import CALL, REASONING, write_scripted

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def test_a_model_with_a_chat_template_chats(tmp_path: Path) -> None:
    """A checkpoint of one's own, with nothing set but its folder and its name, as in deploy/example.env."""
    write_scripted(tmp_path / "qwen")
    chosen = {"CHECKPOINT": str(tmp_path / "qwen"), "MODEL_NAME": "qwen", "MODEL_DTYPE": "float32"}
    with ComposeStack(tmp_path, read_env(EXAMPLE_ENV) | CHOSEN | chosen, keys_in(tmp_path)) as stack:
        stack.start("triton")
        stack.start("gateway")
        stack.wait_healthy("triton")
        stack.wait_healthy("gateway")
        url = f"http://{stack.address('gateway', '8080')}/v1"
        with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=60) as sdk:
            answer = sdk.chat.completions.create(
                model="qwen",
                messages=[{"role": "user", "content": "The weather?"}],
                tools=[{"type": "function", "function": {"name": "get_weather", "parameters": {}}}],
            )
        message = answer.choices[0].message
        assert message.model_dump()["reasoning_content"] == REASONING
        assert message.tool_calls
        called = message.tool_calls[0].model_dump()["function"]
        assert {**called, "arguments": json.loads(called["arguments"])} == json.loads(CALL)
