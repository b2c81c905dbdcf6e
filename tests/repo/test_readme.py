"""What the READMEs say is true: settings, metrics and the quick start's commands."""

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from gateway.configuration import settings_table
from tests.e2e.up_process import UpProcess

ROOT = Path(__file__).parents[2]
READMES = ("README.md", "README.zh.md")


def blocks(readme: str, language: str) -> list[str]:
    text = (ROOT / readme).read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def settings_as_documented() -> str:
    rows = ["| setting | flag | environment | default | |", "| --- | --- | --- | --- | --- |"]
    for row in settings_table():
        flag = f"`{row.flag}`" if row.flag else "none"
        default = f"`{row.default}`" if row.default else ""
        rows.append(f"| `{row.name}` | {flag} | `{row.env}` | {default} | {row.help} |")
    return "\n".join(rows)


def test_the_settings_table_is_the_settings() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    documented = text.split("<!-- settings -->\n")[1].split("\n<!-- /settings -->")[0]
    assert documented == settings_as_documented()


@pytest.mark.parametrize("readme", READMES)
def test_make_targets_in_the_readme_exist(readme: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    commands = [
        line for block in blocks(readme, "bash") for line in block.splitlines() if line.startswith("make")
    ]
    assert commands
    for command in commands:
        assert re.search(rf"^{command.split()[1]}:", makefile, re.MULTILINE), command


def test_both_readmes_show_the_same_commands() -> None:
    english, chinese = (
        [shlex.split(block, comments=True) for block in blocks(readme, "bash")] for readme in READMES
    )
    assert english == chinese


@pytest.fixture(scope="module")
def quick_start() -> UpProcess:
    process = UpProcess()
    try:
        yield process.wait_ready()
    finally:
        process.close()


def greedy(program: str) -> str:
    """Return a program that asks at temperature 0, unless it has another one."""
    model = 'model="chatglm3-demo",'
    assert model in program
    return program if "temperature" in program else program.replace(model, f"{model} temperature=0,")


@pytest.mark.e2e
def test_the_quick_start_answers(quick_start: UpProcess) -> None:
    """`make up` without a model, the README's curl line and its Python, and Ctrl-C.

    The Python is asked greedily: of a thousand sampled answers, a few are in words that nobody expects.
    """
    here = quick_start.base_url
    (curl,) = [block for block in blocks("README.md", "bash") if block.startswith("curl")]
    done = subprocess.run(
        ["bash", "-c", curl.replace("http://127.0.0.1:8080", here)],
        capture_output=True,
        text=True,
        check=True,
    )
    events = [line.removeprefix("data: ") for line in done.stdout.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events[:-1]]
    assert choices[-1]["finish_reason"] == "stop"
    assert "chatglm3-demo" in "".join(choice["delta"].get("content", "") for choice in choices)
    printed = quick_start.output
    assert f"{here}/v1/chat/completions" in printed
    assert "a few pages by heart" in printed
    for readme in READMES:
        for program, answer in zip(blocks(readme, "python"), ("OpenAI", "sure=", "221"), strict=True):
            answered = subprocess.run(
                [quick_start.python, "-c", greedy(program.replace("http://127.0.0.1:8080", here))],
                capture_output=True,
                text=True,
                check=True,
                timeout=100,
            )
            assert answer in answered.stdout
    assert quick_start.stop() == 0
