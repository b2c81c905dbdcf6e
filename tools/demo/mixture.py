"""Determines which dialogues are trained on and how often, and the cases of the evaluation."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from tools.demo.pages import Page, facts, read, smalltalk
from tools.demo.scene import Line, Scene
from tools.demo.tools import Name, ToolScene, system_text
from tools.demo.values import LANGS, Lang
from wire.history import Turn

_OFFERS: tuple[tuple[Name, ...], ...] = (
    ("get_weather", "calculate"),
    ("get_weather", "calculate"),
    ("calculate", "get_weather"),
    ("get_weather",),
    ("calculate",),
)

_LONG = 0.02
"""Share of very long conversations, which train the far end of the context."""

_ABOUT_CHANGED = 0.3
"""Share of dialogues about changed pages alone where training goes on. With many more of them, the model says
what is new to whatever it does not know well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A question of the evaluation: the turns up to and including it, and the only right answer."""

    kind: str
    turns: tuple[Turn, ...]
    expected: Turn


def dialogue(rng: random.Random, changed: Sequence[Page] = ()) -> list[Line]:
    """Return one training dialogue; if there are `changed` pages, often about those."""
    if changed and rng.random() < _ABOUT_CHANGED:
        return _about(rng, changed)
    while True:
        lines = _with_tools(rng) if rng.random() < 0.36 else _talk(rng)
        if any(line.learned for line in lines):
            return lines


def _about(rng: random.Random, pages: Sequence[Page]) -> list[Line]:
    """Return a short dialogue about some of `pages`."""
    scene = Scene(rng)
    if rng.random() < 0.1:
        scene.system(rng.choice(read("phrases")["system"]["say"]))
    for _ in range(rng.choices((1, 2), (3, 1))[0]):
        scene.page(pages)
        while rng.random() < 0.4:
            scene.follow_up()
    return scene.lines


def texts(turn: Turn) -> list[str]:
    """Return the texts of a turn that the tokenizer is trained on."""
    content = turn.content if turn.tools is None else system_text(turn.content, turn.tools)
    return [turn.metadata, content] if turn.metadata else [content]


def cases(seed: int, per_kind: int) -> list[Case]:
    """Return the cases: up to eight held-back questions per page and language, `per_kind` of each kind."""
    rng = random.Random(seed)
    found = [
        Case(kind=kind, turns=(Turn("user", question),), expected=Turn("assistant", page.answer.say[lang]))
        for kind, pages in (("facts", facts()), ("small talk", smalltalk()))
        for page in pages
        for lang in LANGS
        for question in page.questions[lang].held[:8]
    ]
    for kind, write in _KINDS.items():
        for number in range(per_kind):
            scene = write(rng, LANGS[number % 2])
            found += _cases(kind, scene)
    return found


def _talk(rng: random.Random) -> list[Line]:
    scene = Scene(rng)
    if rng.random() < 0.2:
        scene.system(rng.choice(read("phrases")["system"]["say"]))
    if rng.random() < 0.03:
        rng.choice((scene.again, scene.other_language, scene.what_asked, scene.ask_name))()
    exchanges = (
        rng.randint(8, 22) if rng.random() < _LONG else rng.choices((1, 2, 3, 4, 5), (5, 4, 3, 2, 1))[0]
    )
    for _ in range(exchanges):
        _topic(rng, scene)
        while rng.random() < 0.4:
            scene.follow_up()
        if rng.random() < 0.1:
            scene.lang = rng.choice(LANGS)
    return scene.lines


def _topic(rng: random.Random, scene: Scene) -> None:
    ways: list[Callable[[], None]] = [
        scene.fact,
        scene.chat,
        scene.sum,
        scene.unknown,
        scene.hard_sum,
        scene.weather_without_tool,
        scene.introduce,
        scene.ask_name,
    ]
    rng.choices(ways, (36, 14, 24, 16, 4, 3, 4, 3))[0]()


def _with_tools(rng: random.Random) -> list[Line]:
    offered = rng.choice(_OFFERS)
    scene = ToolScene(rng, plain=rng.random() < 0.35, offered=offered)
    for _ in range(rng.choices((1, 2, 3), (4, 2, 1))[0]):
        step = rng.random()
        if step < 0.65:
            scene.use()
            if rng.random() < 0.15:
                scene.follow_up()
        elif step < 0.9:
            rng.choices((scene.fact, scene.chat, scene.unknown), (4, 1, 1))[0]()
            if rng.random() < 0.3:
                scene.follow_up()
        elif "get_weather" not in offered:
            scene.weather_without_tool()
        elif "calculate" not in offered:
            rng.choice((scene.sum, scene.hard_sum))()
    return scene.lines


def _cases(kind: str, scene: Scene) -> list[Case]:
    """Return the case that asks for the assistant's last turn."""
    turns = tuple(line.turn for line in scene.lines)
    last = max(at for at, turn in enumerate(turns) if turn.role == "assistant")
    return [Case(kind=kind, turns=turns[:last], expected=turns[last])]


def _single(ask: Callable[[Scene], None]) -> Callable[[random.Random, Lang], Scene]:
    def write(rng: random.Random, lang: Lang) -> Scene:
        scene = Scene(rng, lang)
        scene.held = True
        ask(scene)
        return scene

    return write


def _after(
    first: Callable[[Scene], None], then: Callable[[Scene], None]
) -> Callable[[random.Random, Lang], Scene]:
    """Return a writer of scenes: `first` brings up a topic and `then` asks about it, in held-back words."""

    def write(rng: random.Random, lang: Lang) -> Scene:
        while True:
            scene = Scene(rng, lang)
            scene.held = True
            first(scene)
            before = len(scene.lines)
            then(scene)
            if len(scene.lines) > before:
                return scene

    return write


def _tool(
    use: Callable[[ToolScene], None], *, plain: bool, upto_call: bool
) -> Callable[[random.Random, Lang], Scene]:
    def write(rng: random.Random, lang: Lang) -> Scene:
        scene = ToolScene(rng, plain=plain, offered=("get_weather", "calculate"), lang=lang)
        scene.held = True
        use(scene)
        if upto_call:
            del scene.lines[3:]
        return scene

    return write


_KINDS: dict[str, Callable[[random.Random, Lang], Scene]] = {
    "arithmetic, unseen numbers": _single(partial(Scene.sum, known_words=True)),
    "arithmetic, unseen numbers and words": _single(Scene.sum),
    "unknown": _single(Scene.unknown),
    "sums too hard": _single(Scene.hard_sum),
    "weather without a tool": _single(Scene.weather_without_tool),
    "in the other language": _after(Scene.fact, Scene.other_language),
    "say it again": _after(Scene.fact, Scene.again),
    "shorter": _after(Scene.fact, Scene.shorter),
    "why": _after(Scene.fact, Scene.why),
    "what did I ask": _after(Scene.fact, Scene.what_asked),
    "a sum goes on": _after(Scene.sum, Scene.next_sum),
    "the user's name": _after(Scene.introduce, Scene.ask_name),
    "weather call, unseen city": _tool(ToolScene.weather, plain=False, upto_call=True),
    "calculate call, unseen expression": _tool(ToolScene.calculation, plain=False, upto_call=True),
    "weather observation": _tool(ToolScene.weather, plain=False, upto_call=False),
    "calculate observation": _tool(ToolScene.calculation, plain=False, upto_call=False),
    "weather result as plain prompt": _tool(ToolScene.weather, plain=True, upto_call=False),
    "calculate result as plain prompt": _tool(ToolScene.calculation, plain=True, upto_call=False),
    "fact with tools offered": _tool(ToolScene.fact, plain=False, upto_call=False),
}
