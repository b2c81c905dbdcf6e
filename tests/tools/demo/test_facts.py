"""The model is asked what README says, in questions it never saw; README and code have the answers."""

import re
import tomllib
from collections.abc import Callable

import pytest

from gateway.cli import UP_PORTS
from gateway.http.middleware import IGNORED_HEADER
from gateway.settings import Settings
from gateway.up import METRICS_PORT
from tools.demo.evaluation import Responder
from tools.demo.pages import facts, smalltalk
from tools.demo.values import CHECKPOINT, LANGS, ROOT, endpoints, pythons, routes
from triton_models.text.formats import _FORMATS
from wire.history import Turn
from wire.limits import STOPS_LIMIT, TOP_LOGPROBS_LIMIT

README = (ROOT / "README.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SETTINGS = Settings.model_validate({})


def in_readme(pattern: str) -> list[str]:
    found: list[str] = re.findall(pattern, README)
    assert found, pattern
    return found


FACTS: dict[str, Callable[[], list[str]]] = {
    "tritongate": lambda: ["OpenAI", *in_readme(r"gateway for \*\*(ChatGLM) on (?:NVIDIA Triton)")],
    "models": lambda: re.split(
        ", | and ", in_readme(r"\*\*Checkpoints as published\.\*\* (.*) load directly")[0]
    ),
    "licence": lambda: [PROJECT["license"], *in_readme(r"\n([\w.-]+)\.\n$")],
    "requirements": lambda: [
        *in_readme(r"Python (3\.\d+) or (?:3\.\d+)"),
        *in_readme(r"On (Linux) .*glibc"),
        *in_readme(r"glibc ([\d.]+)"),
        *pythons(),
    ],
    "endpoints": lambda: [*in_readme(r"`(/v1/[a-z/]+)`"), *endpoints()],
    "port": lambda: [*in_readme(r"curl -N http://127\.0\.0\.1:(\d+)/"), str(SETTINGS.port)],
    "triton_ports": lambda: [str(port) for port in (*UP_PORTS.values(), METRICS_PORT)],
    "start": lambda: in_readme(r"```bash\n(make \w+)\n"),
    "stop": lambda: in_readme(r"(Ctrl-C) stops everything"),
    "own_checkpoint": lambda: in_readme(r"(tritongate up --model) /models"),
    "curl": lambda: [f"127.0.0.1:{SETTINGS.port}/v1/chat/completions", CHECKPOINT.name],
    "model_name": lambda: in_readme(r'"model": "([\w-]+)"'),
    "parameters": lambda: ["400", IGNORED_HEADER.lower()],
    "stop_strings": lambda: [str(STOPS_LIMIT)],
    "logprobs": lambda: [str(TOP_LOGPROBS_LIMIT)],
    "overload": lambda: [str(SETTINGS.max_in_flight), str(SETTINGS.max_waiting), "429"],
    "timeout": lambda: [f"{SETTINGS.request_timeout_s:g}"],
    "drain": lambda: [f"{SETTINGS.drain_s:g}"],
    "body_size": lambda: [f"{SETTINGS.max_body_bytes >> 20} MiB"],
    "documents": lambda: in_readme(r"\[(ARCHITECTURE\.md|CHANGELOG\.md)\]"),
    "training": lambda: ["tools/demo", "python -m tools.demo"],
}
"""By page, what its answer must hold."""


FAMILIES = [("Is GLM-4 supported?", "not supported"), ("支持GLM-4吗？", "不支持")]


def ask(responder: Responder, *questions: str) -> list[str]:
    return responder.answer([[Turn("user", question)] for question in questions])


@pytest.mark.parametrize("name", FACTS)
def test_it_knows_what_the_readme_says(name: str, responder: Responder) -> None:
    (page,) = [page for page in (*facts(), *smalltalk()) if page.name == name]
    questions = [question for lang in LANGS for question in page.questions[lang].held]
    answers = ask(responder, *questions)
    wrong = [answer for answer in answers if not all(expected in answer for expected in FACTS[name]())]
    assert len(wrong) <= len(answers) // 4, wrong  # a few are taken for other pages


def test_it_names_no_path_that_is_no_route(responder: Responder) -> None:
    (page,) = [page for page in facts() if page.name == "endpoints"]
    there = {route.path for route in routes()}
    for answer in ask(responder, *(page.questions[lang].held[0] for lang in LANGS)):
        named = set(re.findall(r"/[a-z][a-z0-9_/]*", answer))
        assert len(named) > 5
        assert named - there == set()


@pytest.mark.parametrize(("question", "no"), FAMILIES)
def test_it_knows_every_family_that_has_a_format(question: str, no: str, responder: Responder) -> None:
    (answer,) = ask(responder, question)
    families = [name for name in _FORMATS if name != "template"]
    assert len(families) >= 3
    said = answer.lower().replace("-", "")
    assert [name for name in families if name not in said] == []
    assert no not in answer


def test_it_does_not_say_that_a_parameter_is_refused_that_is_accepted(responder: Responder) -> None:
    answers = ask(responder, "What happens to unknown parameters?", "不认识的参数会怎样？")
    assert all(IGNORED_HEADER.lower() in answer for answer in answers)
