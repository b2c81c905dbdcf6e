"""Beam searches, as requests ask for them: what becomes of their fields, and which others they exclude."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from gateway.core.request import Generation
from gateway.errors import InvalidRequestError
from gateway.openai.chat_request import ChatRequest
from gateway.openai.completions import CompletionRequest
from gateway.openai.document import Reading
from tests.gateway.fake_upstream import FakeUpstream, say_choices
from tests.gateway.serving import in_process

Read = Callable[[bytes, Reading], Any]
CHAT: tuple[Read, dict[str, Any]] = ChatRequest.read, {"messages": [{"role": "user", "content": "hi"}]}
COMPLETION: tuple[Read, dict[str, Any]] = CompletionRequest.read, {"prompt": "hi"}
ROUTES = pytest.mark.parametrize("route", [CHAT, COMPLETION], ids=["chat", "completion"])
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def read(route: tuple[Read, dict[str, Any]], *, reading: Reading | None = None, **fields: Any) -> Any:
    reader, base = route
    document = {"model": "m", "use_beam_search": True, **base, **fields}
    return reader(json.dumps(document).encode(), reading or Reading(strict=True))


def generation(route: tuple[Read, dict[str, Any]], **fields: Any) -> Generation:
    (found,) = read(route, **fields).generations(request_id="r", deadline=0)
    assert isinstance(found, Generation)
    return found


@ROUTES
def test_the_width_is_n_or_best_of(route: tuple[Read, dict[str, Any]]) -> None:
    found = generation(route, n=4)
    assert (found.n, found.beam_width, found.length_penalty, found.early_stopping) == (4, 4, 1.0, False)
    found = generation(route, n=2, best_of=16, length_penalty=-0.5, early_stopping="never")
    assert (found.n, found.beam_width, found.sequences) == (2, 16, 16)
    assert (found.length_penalty, found.early_stopping) == (-0.5, "never")
    assert generation(route, best_of=3).n == 1
    assert generation(route, n=4, use_beam_search=False).beam_width == 0
    assert generation(route, n=4, best_of=4, use_beam_search=None).beam_width == 0


@ROUTES
def test_one_beam_is_greedy_for_any_backend(route: tuple[Read, dict[str, Any]]) -> None:
    found = generation(route, length_penalty=2.0, early_stopping=True)
    assert found == generation(route, use_beam_search=False, temperature=0)


@ROUTES
@pytest.mark.parametrize(
    "neutral",
    [
        *({"temperature": value} for value in (None, 0, 1)),
        *({"top_k": value} for value in (0, -1)),
        {"top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "min_tokens": 0},
        {"frequency_penalty": 0.0, "logit_bias": {}, "bad_words": [], "stop": []},
    ],
)
def test_what_changes_nothing_is_accepted(
    route: tuple[Read, dict[str, Any]], neutral: dict[str, Any]
) -> None:
    assert generation(route, n=2, **neutral).sequences == 2


@ROUTES
def test_what_a_search_takes_beside_it(route: tuple[Read, dict[str, Any]]) -> None:
    beside = {"seed": 3, "stop_token_ids": [5], "ignore_eos": True, "include_stop_str_in_output": True}
    found = generation(route, n=2, max_tokens=9, priority=1, stream=True, return_token_ids=True, **beside)
    assert (found.seed, found.stop_token_ids, found.ignore_eos, found.include_stop) == (3, [5], True, True)
    assert (found.max_tokens, found.priority, found.stream, found.return_token_ids) == (9, 1, True, True)


@ROUTES
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 17}, "n"),
        ({"best_of": 17}, "best_of"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 0}, "best_of"),
        ({"length_penalty": 10.5}, "length_penalty"),
        ({"early_stopping": "often"}, "early_stopping"),
        ({"temperature": 0.5}, "temperature"),
        ({"top_p": 0.9}, "top_p"),
        ({"top_k": 5}, "top_k"),
        ({"min_p": 0.1}, "min_p"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"min_tokens": 2}, "min_tokens"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"allowed_token_ids": [5]}, "allowed_token_ids"),
        ({"bad_words": ["no"]}, "bad_words"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"stop": "."}, "stop"),
        ({"guided_regex": "a+"}, "guided_regex"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"use_beam_search": False, "best_of": 2}, "best_of"),
        ({"use_beam_search": False, "length_penalty": 1.5}, "length_penalty"),
        ({"use_beam_search": None, "early_stopping": True}, "early_stopping"),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(
    route: tuple[Read, dict[str, Any]], fields: dict[str, Any], param: str
) -> None:
    """Also with one beam: what a request may have does not depend on how wide its search is."""
    with pytest.raises(InvalidRequestError) as refused:
        read(route, **fields)
    assert refused.value.param == param
    assert param in refused.value.message


def test_what_only_one_route_has() -> None:
    with pytest.raises(InvalidRequestError) as echoed:
        read(COMPLETION, echo=True, logprobs=1)
    assert echoed.value.param == "echo"
    assert generation(COMPLETION, n=2, echo=True).echo
    assert generation(CHAT, n=2, tools=[TOOL]).beam_width == 2
    with pytest.raises(InvalidRequestError) as called:
        read(CHAT, n=2, tools=[TOOL], tool_choice="required")
    assert called.value.param == "tools"


@ROUTES
def test_the_models_defaults_of_sampling_are_not_for_a_search(route: tuple[Read, dict[str, Any]]) -> None:
    reading = Reading(defaults={"temperature": 0.5, "top_k": 3, "seed": 7})
    (found,) = read(route, reading=reading, n=2).generations(request_id="r", deadline=0)
    assert (found.temperature, found.top_k, found.seed) == (1.0, 0, 7)
    asked = read(route, reading=reading, n=2, use_beam_search=False)
    (found,) = asked.generations(request_id="r", deadline=0)
    assert (found.temperature, found.top_k, found.seed) == (0.5, 3, 7)


def test_the_limit_on_answers_is_one_on_beams() -> None:
    for route in (CHAT, COMPLETION):
        asked = read(route, n=2, best_of=5)
        asked.check_choices(5, "it")
        with pytest.raises(InvalidRequestError) as refused:
            asked.check_choices(4, "it")
        assert refused.value.param == "best_of"
    several = read((CompletionRequest.read, {"prompt": ["a", "b"]}), n=2, best_of=5)
    several.check_choices(10, "it")
    with pytest.raises(InvalidRequestError, match="2 prompts with 5 answers or beams each") as refused:
        several.check_choices(9, "it")
    assert refused.value.param == "prompt"


async def test_a_search_takes_a_place_for_each_beam() -> None:
    body = {"model": "glm", "prompt": "a", "n": 2, "best_of": 5, "use_beam_search": True}
    async with in_process(FakeUpstream(say_choices), max_choices=4) as served:
        refused = await served.http.post("/v1/completions", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "best_of")
        taken: list[int] = []
        acquire = served.gateway.admission.acquire

        async def count(permits: int) -> int:
            taken.append(permits)
            return await acquire(permits)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(served.gateway.admission, "acquire", count)
            answer = await served.http.post("/v1/completions", json=body | {"best_of": 3})
        assert (answer.status_code, len(answer.json()["choices"]), taken) == (200, 2, [3])
        (asked,) = served.upstream.requests
        assert (asked.n, asked.beam_width) == (2, 3)
