"""Writes conversations: who says what, and what a follow-up question refers to."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tools.demo import arithmetic, names
from tools.demo.expressions import expression
from tools.demo.pages import Answer, Page, answer, facts, is_held_back, read, smalltalk, split
from tools.demo.values import LANGS, Lang
from tools.demo.wording import random_words, vary
from wire.history import Turn

_HELD_TOOLS = 3
_HELD_UNKNOWN = 5
"""One in this many phrases about unknown things is held back."""


@dataclass(frozen=True, slots=True)
class Line:
    """A turn, and whether the model is trained to say it."""

    turn: Turn
    learned: bool = False


class Scene:
    """Writes a dialogue exchange by exchange.

    If `held` is true, the next exchange is for the evaluation: it has held-back phrases, names and numbers.
    """

    def __init__(self, rng: random.Random, lang: Lang | None = None) -> None:
        self.rng = rng
        self.lang: Lang = rng.choice(LANGS) if lang is None else lang
        self.held = False
        self.lines: list[Line] = []
        self._answer: Answer | None = None
        self._said = ""
        self._asked = ""
        self._short = False
        self._result: int | None = None
        self._name = ""

    def system(self, content: str, tools: list[dict[str, Any]] | None = None) -> None:
        """Begin with a system turn."""
        self.lines.append(Line(Turn("system", content, tools=tools)))

    def user(self, text: str) -> None:
        """Add a turn of the user."""
        self.lines.append(Line(Turn("user", text)))
        self._asked = text

    def assistant(self, text: str) -> None:
        """Add a turn of the model, which is learned."""
        self.lines.append(Line(Turn("assistant", text), learned=True))
        self._said = text

    def exchange(self, question: str, reply: Answer, *, exact: bool = False) -> None:
        """Add a question that begins a new topic, and its answer."""
        self.user(self.vary(question, exact=exact))
        self._tell(reply)
        self._result = None

    def fact(self) -> None:
        """Ask about a page of the project or the field."""
        self.page(facts())

    def chat(self) -> None:
        """Greet, thank, or ask who the model is."""
        self.page(smalltalk())

    def sum(self, *, known_words: bool = False) -> None:
        """Ask a small sum; if held, with held-back numbers, and held-back words unless `known_words`."""
        asked = arithmetic.small_sum(self.rng, self.lang, held=self.held, known_words=known_words)
        self.exchange(asked.question, asked.answer, exact=True)
        self._result = asked.result

    def hard_sum(self) -> None:
        """Ask a calculation that is too hard without the tool."""
        asked = expression(self.rng, self.lang, held=self.held, hard=True).asked
        forms = split(read("tools")["calculate"][self.lang], _HELD_TOOLS).get(held=self.held)
        self.exchange(self.rng.choice(forms).format(asked), answer(read("unknown")["sums"]), exact=True)

    def unknown(self) -> None:
        """Ask something that the model cannot know."""
        pages = read("unknown")
        kind = self.rng.random()
        if kind < 0.25:
            question = self._part(pages["questions"][self.lang])
        elif kind < 0.4 and not self.held:
            question = self._nonsense()
        else:
            slots = {name: self._slot(words[self.lang]) for name, words in pages["slots"].items()}
            question = self._part(pages["templates"][self.lang]).format(**slots)
        self.exchange(question, answer(pages))

    def weather_without_tool(self) -> None:
        """Ask for the weather where no tool for it was offered."""
        city = names.city(self.rng, self.lang, held=self.held)
        self.exchange(self.weather_question(city), answer(read("unknown")["weather"]), exact=True)

    def introduce(self) -> None:
        """Tell the user's name."""
        self._name = names.person(self.rng, self.lang)
        table = read("phrases")["my_name"]
        say: dict[Lang, str] = {lang: table["say"][lang].format(self._name) for lang in LANGS}
        phrase = self._phrase(table[self.lang])
        if not self.held and self.rng.random() < 0.3:
            phrase = phrase.rstrip(".。")
        self.user(phrase.format(self._name))
        self._tell(Answer(say=say, short=say))

    def ask_name(self) -> None:
        """Ask for the user's name, whether or not it was told."""
        table = read("phrases")["name_asked"]
        say: dict[Lang, str] = {
            lang: table["say"][lang].format(self._name) if self._name else table["alone"][lang]
            for lang in LANGS
        }
        self.user(self._phrase(table[self.lang]))
        self._tell(Answer(say=say, short=say))

    def again(self) -> None:
        """Ask for the last answer once more."""
        table = read("phrases")["again"]
        self.user(self._phrase(table[self.lang]))
        self.assistant(self._said or table["alone"][self.lang])

    def shorter(self) -> None:
        """Ask for a shorter answer; there must be an answer already."""
        self.user(self._phrase(read("phrases")["shorter"][self.lang]))
        self._short = True
        self._retell()

    def other_language(self) -> None:
        """Ask for the last answer in the other language; without an answer, ask to speak that language."""
        self.lang = "zh" if self.lang == "en" else "en"
        table = read("phrases")[f"to_{self.lang}"]
        self.user(self._phrase(table["say"]))
        if self._answer is None:
            self.assistant(table["alone"])
        else:
            self._retell()

    def why(self) -> None:
        """Ask for the reason behind the last answer; does nothing if that has none."""
        if self._answer is None or self._answer.why is None:
            return
        reason = self._answer.why
        self.user(self._phrase(read("phrases")["why"][self.lang]))
        self._tell(Answer(say=reason, short=reason))

    def what_asked(self) -> None:
        """Ask what the last question was."""
        table = read("phrases")["asked"]
        before = self._asked
        say: dict[Lang, str] = {"en": f"You asked: {before}", "zh": f"你问的是：{before}"}
        self.user(self._phrase(table[self.lang]))
        self._tell(Answer(say=say, short=say)) if before else self.assistant(table["alone"][self.lang])

    def next_sum(self) -> None:
        """Continue from the last result, if the last answer was a sum."""
        if self._result is None:
            return
        asked = arithmetic.next_sum(self.rng, self._result, self.lang, held=self.held)
        if asked is not None:
            self.user(asked.question)
            self._tell(asked.answer)
            self._result = asked.result

    def follow_up(self) -> None:
        """Ask a random follow-up question that fits what was said before."""
        ways = [
            self.again,
            self.again,
            self.shorter,
            self.other_language,
            self.other_language,
            self.what_asked,
        ]
        if self._answer is None:
            ways = [self.again, self.what_asked]
        elif self._answer.why is not None:
            ways += [self.why, self.why]
        if self._result is not None:
            ways += [self.next_sum] * 3
        self.rng.choice(ways)()

    def forget(self) -> None:
        """Forget the last answer: it can then be repeated, but not shortened or translated."""
        self._answer = None
        self._result = None

    def weather_question(self, city: str) -> str:
        """Return a question about the weather of a city."""
        forms = split(read("tools")["get_weather"][self.lang], _HELD_TOOLS).get(held=self.held)
        moment = "" if self.held else self.rng.choice(read("words")["moments"][self.lang])
        return self.rng.choice(forms).format(city + moment)

    def page(self, pages: Sequence[Page]) -> None:
        """Ask about one of `pages`."""
        page = self.rng.choice(pages)
        question = self.rng.choice(page.questions[self.lang].get(held=self.held))
        self.exchange(question, page.answer)

    def _tell(self, reply: Answer) -> None:
        self._answer = reply
        self._short = False
        self._retell()

    def _retell(self) -> None:
        if self._answer is None:
            raise ValueError("nothing was said that could be said otherwise")
        self.assistant((self._answer.short if self._short else self._answer.say)[self.lang])

    def _phrase(self, phrases: Sequence[str]) -> str:
        phrase = self.rng.choice(split(phrases).get(held=self.held))
        return phrase if self.held or self.rng.random() < 0.6 else self.vary(phrase, exact="{}" in phrase)

    def _part(self, phrases: Sequence[str]) -> str:
        """Choose one of the phrases, of which the last fifth is held back."""
        return self.rng.choice(split(phrases, len(phrases) // _HELD_UNKNOWN).get(held=self.held))

    def _nonsense(self) -> str:
        if self.rng.random() < 0.2:
            return names.invented(self.rng, self.lang).lower()
        return random_words(self.rng, self.lang, self.rng.randint(1, 6)) + self.rng.choice("?. ？。")

    def _slot(self, words: Sequence[str]) -> str:
        """Choose a name for an unknown thing: one from the page, an everyday word, or an invented name."""
        kind = 0.0 if self.held else self.rng.random()
        if kind < 0.4:
            return self._part(words)
        if kind < 0.8:
            return random_words(self.rng, self.lang, 1)
        return names.invented(self.rng, self.lang)

    def vary(self, question: str, *, exact: bool) -> str:
        """Return a variation of a question, as people might write it; if held, the question unchanged."""
        if self.held:
            return question
        while is_held_back(varied := vary(self.rng, question, self.lang, exact=exact)):
            pass
        return varied
