"""What is trained on: reproducible, and nothing of the evaluation is in it."""

import random

import pytest

from tools.demo import mixture
from tools.demo.arithmetic import is_held
from tools.demo.pages import facts, is_held_back, read, smalltalk
from tools.demo.scene import Line, Scene
from tools.demo.values import LANGS
from wire.history import Turn


@pytest.fixture(scope="module")
def dialogues() -> list[list[Line]]:
    rng = random.Random(7)
    return [mixture.dialogue(rng) for _ in range(3_000)]


def turns(dialogues: list[list[Line]], role: str) -> list[Turn]:
    return [line.turn for lines in dialogues for line in lines if line.turn.role == role]


def test_the_same_seed_writes_the_same_dialogues(dialogues: list[list[Line]]) -> None:
    rng = random.Random(7)
    assert [mixture.dialogue(rng) for _ in range(100)] == dialogues[:100]
    assert mixture.cases(1, 5) == mixture.cases(1, 5)
    assert mixture.cases(1, 5) != mixture.cases(2, 5)


def test_every_dialogue_teaches_something_and_only_what_the_model_says(dialogues: list[list[Line]]) -> None:
    for lines in dialogues:
        learned = [line.turn.role for line in lines if line.learned]
        assert learned
        assert set(learned) == {"assistant"}


def test_every_page_is_asked_in_both_languages_with_two_questions_held_back() -> None:
    pages = (*facts(), *smalltalk())
    assert len({page.name for page in pages}) == len(pages)
    for page in pages:
        for lang in LANGS:
            questions = page.questions[lang]
            assert len(set(questions.trained)) >= 8, page.name
            assert len(set(questions.held)) >= 2, page.name
            assert not set(questions.trained) & set(questions.held), page.name


def test_where_training_goes_on_a_third_is_about_changed_pages_and_the_rest_about_all() -> None:
    (page,) = [page for page in facts() if page.name == "models"]
    rng = random.Random(5)
    made = [mixture.dialogue(rng, [page]) for _ in range(400)]
    about = [lines for lines in made if any(line.turn.content in page.answer.say.values() for line in lines)]
    assert 90 < len(about) < 160
    assert not [turn for turn in turns(made, "user") if is_held_back(turn.content)]
    assert len({turn.content for turn in turns(made, "assistant")}) > 200


def test_no_held_back_question_is_trained_on(dialogues: list[list[Line]]) -> None:
    asked = [turn.content for turn in turns(dialogues, "user")]
    assert not [question for question in asked if is_held_back(question)]
    for case in mixture.cases(3, 2):
        if case.kind in {"facts", "small talk", "shorter", "say it again", "why"}:
            assert is_held_back(case.turns[-1].content), case


def test_no_held_back_city_is_trained_on(dialogues: list[list[Line]]) -> None:
    cities = read("tools")["cities"]
    spoken = "\n".join(turn.content for turn in turns(dialogues, "user") + turns(dialogues, "assistant"))
    kept_back = cities["held_en"] + cities["held_zh"]
    assert len(kept_back) >= 60
    assert not [city for city in kept_back if city in spoken]
    assert not set(kept_back) & set(cities["en"] + cities["zh"])


def test_no_held_back_expression_is_called_in_training(dialogues: list[list[Line]]) -> None:
    calls = [turn.content for turn in turns(dialogues, "assistant") if turn.metadata == "calculate"]
    called = [call.split("expression='")[1].split("')")[0] for call in calls]
    assert len(called) > 100
    assert not [expression for expression in called if is_held(expression.replace(" ", ""))]


def test_a_follow_up_is_about_the_answer_before() -> None:
    scene = Scene(random.Random(1), "en")
    scene.fact()
    scene.other_language()
    scene.again()
    scene.shorter()
    said = [line.turn.content for line in scene.lines if line.learned]
    (page,) = [page for page in facts() if page.answer.say["en"] == said[0]]
    assert said == [page.answer.say["en"], *[page.answer.say["zh"]] * 2, page.answer.short["zh"]]
