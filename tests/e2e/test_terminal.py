"""The commands for people in a terminal, against the whole stack."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.e2e.up_process import TRITONGATE, UpProcess

pytestmark = pytest.mark.e2e


def run(demo_up: UpProcess, *arguments: object, text: str = "") -> str:
    command = [str(TRITONGATE), *map(str, arguments), "--url", demo_up.base_url]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True, timeout=100).stdout


def test_chat_in_a_pipe(demo_up: UpProcess) -> None:
    asked_once = run(demo_up, "chat", "-q", "Who are you?", "--temperature", 0)
    assert "chatglm3-demo" in asked_once
    assert run(demo_up, "chat", "--temperature", 0, text="Who are you?\n") == asked_once


def test_batch(demo_up: UpProcess, tmp_path: Path) -> None:
    body = {"model": "chatglm3-demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body}
        for number in range(20)
    ]
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run(demo_up, "batch", source, out)
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert {each["custom_id"] for each in answers} == {line["custom_id"] for line in lines}
    assert {each["response"]["status_code"] for each in answers} == {200}


def test_bench(demo_up: UpProcess) -> None:
    words = ["bench", demo_up.base_url, "--prompt", "4", "--out", "4", "--clients", "1,2", "--processes", "1"]
    done = subprocess.run([TRITONGATE, *words], capture_output=True, text=True, check=False, timeout=100)
    assert (done.returncode, "2 clients" in done.stdout) == (0, True), done.stderr
