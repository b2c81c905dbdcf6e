"""The quick start of the documents, as it is written: the curl line and the Python of every page."""

import ast
import contextlib
import io
import json
import subprocess
from typing import Any

import pytest

from tests.e2e.up_process import UpProcess
from tests.repo.test_readme import PAGES, blocks

pytestmark = pytest.mark.e2e

HERE = "http://127.0.0.1:8080"
ANSWERS = {
    "getting-started": "OpenAI",
    "structured-output": "sure=",
    "responses": "221",
    "parameters": "gateway for ChatGLM",
}
"""What the program of each page prints, among other things."""


def greedy(program: str) -> str:
    """Return a program that asks at temperature 0, unless it has another one."""
    model = 'model="chatglm3-demo",'
    assert model in program
    return program if "temperature" in program else program.replace(model, f"{model} temperature=0,")


def test_curl_is_answered(demo_up: UpProcess) -> None:
    here = demo_up.base_url
    (curl,) = [block for block in blocks("README.md", "bash") if block.startswith("curl")]
    done = subprocess.run(
        ["bash", "-c", curl.replace(HERE, here)], capture_output=True, text=True, check=True
    )
    events = [line.removeprefix("data: ") for line in done.stdout.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events[:-1]]
    assert choices[-1]["finish_reason"] == "stop"
    assert "chatglm3-demo" in "".join(choice["delta"].get("content", "") for choice in choices)
    assert f"{here}/v1/chat/completions" in demo_up.output
    assert "a few pages by heart" in demo_up.output


def test_python_is_answered(demo_up: UpProcess) -> None:
    """Asked greedily: of a thousand sampled answers, a few are in words that nobody expects."""
    programs = {
        ast.dump(ast.parse(program)): (program, answer)  # one that differs in its comments only is the same
        for page in PAGES
        if not page.startswith("docs/legacy-clients")  # test_logits.py runs that one
        for program in blocks(page, "python")
        for answer in [ANSWERS[page.removeprefix("docs/").split(".")[0]]]
    }
    assert {answer for _, answer in programs.values()} == set(ANSWERS.values())
    for program, answer in programs.values():
        names: dict[str, Any] = {"__name__": "__main__"}
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(greedy(program.replace(HERE, demo_up.base_url)), names)  # noqa: S102 - our own pages
        names["client"].close()
        assert answer in printed.getvalue()
