"""Dialogues with `get_weather` and `calculate`, in ChatGLM3's own format and as plain prompts.

The plain form is for clients whose API has no tools. There the tools are described in the text of the system
message, which gives the same tokens; the client sends the call back as an ordinary assistant message, and the
result as a user message. The turn in which the model calls a tool is the same in both forms, and is learned
from ChatGLM3's own.
"""

import json
import random
from typing import Any, Literal

from tools.demo import names
from tools.demo.expressions import expression
from tools.demo.pages import read, split
from tools.demo.scene import Line, Scene
from tools.demo.values import LANGS, Lang
from wire.history import Turn

Name = Literal["get_weather", "calculate"]

_ARGUMENTS: dict[Name, str] = {"get_weather": "city", "calculate": "expression"}
_HELD_QUESTIONS = 3
_PLAIN_INSTRUCTIONS = [
    "You can use these tools:",
    "You have these tools:",
    "你可以使用以下工具：",
    "可用工具：",
    "",
]


def offer(rng: random.Random, offered: tuple[Name, ...]) -> list[dict[str, Any]]:
    """Return the definitions of the tools `offered`, as a client might write them."""
    pages = read("tools")
    return [
        {
            "name": name,
            "description": rng.choice(pages[name]["description"]),
            "parameters": {
                "type": "object",
                "properties": {
                    _ARGUMENTS[name]: {
                        "description": rng.choice(pages[name]["argument"]),
                        "type": "string",
                    }
                    if rng.random() < 0.5
                    else {"type": "string", "description": rng.choice(pages[name]["argument"])}
                },
                "required": [_ARGUMENTS[name]],
            },
        }
        for name in offered
    ]


def system_text(instruction: str, tools: list[dict[str, Any]], indent: int | None = 4) -> str:
    """Return the text into which the chat format turns a system turn with tools."""
    return instruction + "\n" + json.dumps(tools, indent=indent, ensure_ascii=False)


def call_text(name: Name, argument: str) -> str:
    """Return the content of a turn that calls a tool."""
    return f"```python\ntool_call({_ARGUMENTS[name]}={argument!r})\n```"


class ToolScene(Scene):
    """A conversation in which tools were offered."""

    def __init__(
        self, rng: random.Random, *, plain: bool, offered: tuple[Name, ...], lang: Lang | None = None
    ) -> None:
        super().__init__(rng, lang)
        self._plain = plain
        self._offered = offered
        self._spaced = rng.random() < 0.7
        instruction = read("tools")["instruction"]
        tools = offer(rng, offered)
        if not plain:
            self.system(instruction, tools)
        elif rng.random() < 0.7:
            self.system(system_text(instruction, tools))
        else:
            self.system(
                system_text(rng.choice(_PLAIN_INSTRUCTIONS), tools, rng.choice((None, 2, 4))).lstrip()
            )

    def use(self) -> None:
        """Ask something that needs one of the offered tools."""
        self.weather() if self.rng.choice(self._offered) == "get_weather" else self.calculation()

    def weather(self) -> None:
        """Ask for the weather of a city, then perhaps of others."""
        city = self._city()
        self._weather(city, self.weather_question(city))
        while not self.held and self.rng.random() < 0.25:
            city = self._city()
            forms = read("tools")["get_weather"][f"next_{self.lang}"]
            self._weather(city, self.rng.choice(forms).format(city))

    def calculation(self) -> None:
        """Ask for an expression's value."""
        rng = self.rng
        asked = expression(rng, self.lang, held=self.held)
        forms = split(read("tools")["calculate"][self.lang], _HELD_QUESTIONS).get(held=self.held)
        self.user(self.vary(rng.choice(forms).format(asked.asked), exact=True))
        self._call("calculate", asked.called)
        if self._fails():
            return
        number: Any = json.loads(asked.result) if rng.random() < 0.8 else asked.result
        self._observe(number if rng.random() < 0.2 else {rng.choice(("result", "result", "value")): number})
        self._conclude(
            f"The result of {asked.called} is {asked.result}."
            if self.lang == "en"
            else f"{asked.called}的结果是{asked.result}。"
        )

    def _city(self) -> str:
        """Return a city's name, sometimes in the other language's script."""
        langs: tuple[Lang, ...] = (self.lang,) if self.rng.random() < 0.9 else LANGS
        return names.city(self.rng, self.rng.choice(langs), held=self.held)

    def _weather(self, city: str, question: str) -> None:
        self.user(self.vary(question, exact=True))
        self._call("get_weather", city)
        if self._fails():
            return
        found, told = self._sky(city)
        self._observe(found)
        self._conclude(
            f"The weather in {city}: {', '.join(told)}."
            if self.lang == "en"
            else f"{city}的天气：{'，'.join(told)}。"
        )

    def _sky(self, city: str) -> tuple[dict[str, Any], list[str]]:
        """Return the tool's result, and the parts of it that the model reports."""
        rng = self.rng
        condition = rng.choice(read("tools")["conditions"]["zh" if rng.random() < 0.5 else "en"])
        if rng.random() < 0.2:
            condition = names.invented(rng, "en").lower()
        degrees = rng.randint(-30, 45)
        shown = rng.choice((degrees, degrees, degrees, f"{degrees}°C", f"{degrees} °C", f"{degrees}度"))
        humidity = rng.randint(5, 99)
        found: dict[str, Any] = {}
        if rng.random() < 0.6:
            found["city"] = city
        told: list[str] = []
        for key in rng.sample(("condition", "temperature"), 2):
            if rng.random() < 0.08 and (found.keys() - {"city"} or key == "condition"):
                continue
            if key == "condition":
                found[rng.choice(("condition", "weather", "condition", "description"))] = condition
                told.insert(0, condition)
            else:
                found[rng.choice(("temperature", "temperature", "temp", "temperature_c"))] = shown
                told.append(f"{degrees} °C")
        if rng.random() < 0.2:
            key = rng.choice(list(read("tools")["beside"]))
            found[key] = rng.choice(read("tools")["beside"][key])
        if rng.random() < 0.2:
            found["humidity"] = humidity
            told.append(f"humidity {humidity}%" if self.lang == "en" else f"湿度{humidity}%")
        return found, told

    def _fails(self) -> bool:
        """Make the tool fail sometimes; return whether it did."""
        if self.held or self.rng.random() >= 0.06:
            return False
        error = self.rng.choice(read("tools")["errors"][self.lang])
        self._observe({"error": error})
        self._conclude(
            f"The tool reports an error: {error}." if self.lang == "en" else f"工具报告错误：{error}。"
        )
        return True

    def _call(self, name: Name, argument: str) -> None:
        content = call_text(name, argument)
        if self._plain:
            text = f"{name}\n{' ' if self._spaced else ''}{content}"
            self.lines.append(Line(Turn("assistant", text)))
        else:
            self.lines.append(Line(Turn("assistant", content, metadata=name), learned=True))

    def _observe(self, found: object) -> None:
        escaped = self.rng.random() < 0.12 and not self.held and _is_plain_sky(found)
        text = json.dumps(found, ensure_ascii=escaped) if not isinstance(found, str) else found
        if self._plain:
            form = self.rng.choice(read("tools")["results"]["say"])
            self.lines.append(Line(Turn("user", form.format(text))))
        else:
            self.lines.append(Line(Turn("observation", text)))

    def _conclude(self, text: str) -> None:
        self.assistant(text)
        self.forget()


def _is_plain_sky(found: object) -> bool:
    """Return whether all values, except a city, are ASCII or known conditions: only these may be escaped."""
    if not isinstance(found, dict):
        return False
    known = read("tools")["conditions"]["zh"]
    return all(str(value).isascii() or value in known for key, value in found.items() if key != "city")
