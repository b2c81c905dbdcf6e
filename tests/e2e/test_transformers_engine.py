"""A model that transformers computes, from the command line to the answer."""

from pathlib import Path

import openai
import pytest

from tests.e2e.up_process import UpProcess
from tests.template_checkpoint import CALL, write_scripted

pytestmark = pytest.mark.e2e


def test_it_answers_as_it_must(tmp_path: Path) -> None:
    write_scripted(tmp_path / "scripted")
    with (
        UpProcess("--model", str(tmp_path / "scripted"), "--device", "cpu", "--engine", "transformers") as up,
        openai.OpenAI(base_url=f"{up.wait_ready().base_url}/v1", api_key="-", max_retries=0) as client,
    ):
        answer = client.chat.completions.create(
            model="scripted", messages=[{"role": "user", "content": "How is the weather?"}], temperature=0
        )
    assert answer.choices[0].message.content == f"<tool_call>{CALL}</tool_call>"
    assert answer.usage.completion_tokens == 7
