"""The examples run as their README says, against the built-in model on the real tritonserver."""

import json
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.e2e.up_process import TRITONGATE, UpProcess
from tests.repo.test_readme import ROOT, blocks

pytestmark = pytest.mark.e2e

COMMANDS = [
    shlex.split(line) for block in blocks("examples/README.md", "bash") for line in block.splitlines()
]
PROGRAMS = [words[1] for words in COMMANDS if words[0] == "python"]
PRINTED = {
    "chat.py": ("TTFT is the time to first token", "TTFT是首个token时间"),
    "stream.py": ("tritongate is an OpenAI-compatible gateway", "12 prompt tokens, 88 in the answer"),
    "tools.py": ('get_weather({"city": "Lisbon"})', "The weather in Lisbon: sunny, 21 °C."),
    "json_schema.py": ("city: ", ", sure: "),
    "agent.py": ("37 * (12 + 9) = 777", "The result of 37 * (12 + 9) is 777."),
    "legacy_client.py": ("TTFT is the time to first token", "TTFT是首个token时间"),
}
"""In this order; all but the legacy client ask at temperature 0, and that one at 0.1."""


def run(*command: str | Path) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_readme_runs_every_program() -> None:
    programs = {path.relative_to(ROOT).as_posix() for path in (ROOT / "examples").glob("*.py")}
    assert programs == set(PROGRAMS) == {f"examples/{name}" for name in PRINTED}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_prints_what_it_is_for(program: str, demo_up: UpProcess) -> None:
    name = Path(program).name
    here = (
        demo_up.kserve_http.removeprefix("http://")
        if name == "legacy_client.py"
        else demo_up.base_url + "/v1"
    )
    printed = run(demo_up.python, program, here)
    places = [printed.find(text) for text in PRINTED[name]]
    assert -1 not in places, printed
    assert places == sorted(places), printed


def test_the_batch_is_answered(demo_up: UpProcess, tmp_path: Path) -> None:
    (command,) = [words for words in COMMANDS if words[0] == "tritongate"]
    answers = tmp_path / command[-1]
    run(TRITONGATE, *command[1:-1], answers, "--url", demo_up.base_url)
    lines = [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()]
    said = {line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"] for line in lines}
    assert "chatglm3-demo" in said.pop("greeting")
    assert said.pop("sum").endswith("221.")
    assert "8080" in said.pop("port")
    assert not said
