"""What is served of each family of checkpoints: each cell of the table in `docs/models.md` is tried here.

With `WRITE_DOCS=1` in the environment the test writes the table.
"""

import asyncio
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from gateway.core.request import Conversation, Generation, Message, Tool, ToolOffer
from gateway.errors import InvalidRequestError
from gateway.triton.dialects import Dialects
from gateway.triton.dialects.base import ModelReport
from gateway.triton.dialects.chatglm import CHATGLM
from gateway.triton.dialects.model_text import RenderedPrompt
from tests.gateway.triton.fake_triton import having
from tests.glm4_checkpoint import CONFIG, write_checkpoint
from tests.template_checkpoint import write_tokenizer
from tests.triton_models.engine.fake_model import ids, request, run
from tests.triton_models.engine.models.native_glm import native
from tests.triton_models.native_checkpoint import write_native
from triton_models.checkpoint import load_model
from triton_models.engine.engine import Engine
from triton_models.engine.linear import Linear
from triton_models.engine.quantised import QuantisedLinear
from triton_models.engine.sampling import SamplingParams
from triton_models.engine.settings import EngineSettings

DOCS = Path(__file__).parents[2] / "docs"
GOLDEN = Path(__file__).parents[1] / "golden"
MARKER = "<!-- written by tests/triton_models/test_models_page.py -->\n"
CPU = torch.device("cpu")
PROMPT = [3, 300, 17, 99, 250, 41, 41, 8, 160, 5, 77]
ANSWER = 8
TALK = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
QUESTION = (Message(role="user", content="the weather"),)
TOOLS = ToolOffer(tools=(Tool(name="weather", description=None, parameters={}),))

Case = tuple[list[int], list[int]]
"""A prompt, and how the reference goes on."""


def reference(model: PreTrainedModel) -> Case:
    """Return what transformers' own implementation answers."""
    sequence = list(PROMPT)
    with torch.inference_mode():
        for _ in range(ANSWER):
            sequence.append(int(model(torch.tensor([sequence])).logits[0, -1].argmax()))
    return PROMPT, sequence[len(PROMPT) :]


def golden(name: str, directory: Path) -> Case:
    """Copy a golden checkpoint; its reference is the original code."""
    shutil.copytree(GOLDEN / name, directory)
    cases = json.loads((directory / "golden.json").read_text(encoding="utf-8"))["cases"]
    return cases[0]["input_ids"], cases[0]["greedy_ids"][:ANSWER]


def original_glm4(directory: Path) -> Case:
    return reference(native(write_checkpoint(directory), CONFIG))


def transformers(family: str, directory: Path) -> Case:
    return reference(write_native(directory, family))


@dataclass(frozen=True)
class Family:
    """A row of the table."""

    name: str
    write: Callable[[Path], Case]
    chat_format: str | None = None
    """The engine's own; None: a template writes conversations."""
    template: str | None = None
    """A short one with the marks of calls that the published ones have; None: a base model."""


FAMILIES = (
    Family("ChatGLM2", partial(golden, "chatglm2"), "chatglm2"),
    Family("ChatGLM3", partial(golden, "chatglm3"), "chatglm3"),
    Family("GLM-4", original_glm4, "glm4"),
    Family("`GlmForCausalLM`", partial(transformers, "glm"), template=TALK + "{# <|observation|> #}"),
    Family("`Glm4ForCausalLM`", partial(transformers, "glm4"), template=TALK + "{# <|observation|> #}"),
    Family("`LlamaForCausalLM`", partial(transformers, "llama"), template=TALK + "{# <|python_tag|> #}"),
    Family("`MistralForCausalLM`", partial(transformers, "mistral"), template=TALK + "{# [TOOL_CALLS] #}"),
    Family("`Qwen2ForCausalLM`", partial(transformers, "qwen2"), template=TALK + "{# <tool_call> #}"),
    Family("`Qwen3ForCausalLM`", partial(transformers, "qwen3"), template=TALK + "{# <tool_call> #}"),
    Family("`BloomForCausalLM`", partial(transformers, "bloom")),
)


class Served:
    """A family's checkpoint."""

    def __init__(self, family: Family, directory: Path) -> None:
        self.family = family
        self.directory = directory
        self.prompt, self.expected = family.write(directory)
        if family.chat_format is None:
            write_tokenizer(directory, family.template)

    def greedy(self, quantization: str | None = None, *, expand: bool = False) -> list[int]:
        """Return an answer; `expand`: by plain matrices of the numbers that quantised ones stand for."""
        model = load_model(self.directory, torch.float32, CPU, quantization=quantization)
        if expand:
            model.convert(_expanded)
        engine = Engine(model, EngineSettings(block_size=4, max_running=4, max_batched_tokens=16))
        engine.add(request("x", self.prompt, SamplingParams(temperature=0.0, max_tokens=ANSWER)))
        return ids(run(engine)["x"])

    def ask(self, offer: ToolOffer | None = None) -> Any:
        """Return the prompt that the gateway prepares for a conversation.

        Raises:
            InvalidRequestError: the model has none, or none with tools.
        """
        named = [] if self.family.chat_format else [f"m={self.directory}"]
        dialect = Dialects(named).of("m", having(CHATGLM.inputs))
        report = ModelReport(chat_format=self.family.chat_format)
        asked = Generation(request_id="r", model="m", prompt=Conversation(QUESTION, offer), deadline=1.0)
        if dialect.prepare is not None:
            asked = asyncio.run(dialect.prepare(asked, report))
        dialect.request(asked, report, 1.0)
        return asked.prompt


def _expanded(matrix: Linear) -> Linear:
    if not isinstance(matrix, QuantisedLinear):
        return matrix
    return Linear(matrix.dense(0, len(matrix.weight)), matrix.bias)


def loads(served: Served) -> None:
    load_model(served.directory, torch.bfloat16, CPU)


def answers(served: Served) -> None:
    assert served.greedy() == served.expected


def converses(served: Served) -> None:
    prompt = served.ask()
    if served.family.chat_format is None:
        assert isinstance(prompt, RenderedPrompt)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(served.directory)
        messages = [{"role": each.role, "content": each.content} for each in QUESTION]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert prompt.text == text


def calls(served: Served) -> None:
    served.ask(TOOLS)


def quantised(name: str, served: Served) -> None:
    assert served.greedy(name) == served.greedy(name, expand=True)


COLUMNS: dict[str, tuple[str, Callable[[Served], None]]] = {
    "loads": ("可加载", loads),
    "greedy answers are the reference's": ("贪心解码与参照一致", answers),
    "conversations": ("对话", converses),
    "tools": ("工具", calls),
    "int8": ("int8", partial(quantised, "int8")),
    "int4": ("int4", partial(quantised, "int4")),
}
"""English headings, with the Chinese ones and what is tried."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], str | Exception]:
    """What came of each column for each family: a cell of the table, or an error."""
    found: dict[tuple[str, str], str | Exception] = {}
    for number, family in enumerate(FAMILIES):
        served = Served(family, tmp_path_factory.mktemp("families") / str(number))
        for name, (_, check) in COLUMNS.items():
            try:
                check(served)
                found[family.name, name] = "✓"
            except InvalidRequestError:
                found[family.name, name] = "400"
            except Exception as error:  # noqa: BLE001 - the family's own test raises it
                found[family.name, name] = error
    return found


@pytest.mark.parametrize("family", FAMILIES, ids=lambda each: each.name)
def test_it_works_or_is_refused(outcomes: dict[tuple[str, str], str | Exception], family: Family) -> None:
    cells = {name: outcomes[family.name, name] for name in COLUMNS}
    assert not {name: repr(cell) for name, cell in cells.items() if isinstance(cell, Exception)}


@pytest.mark.parametrize("language", ["english", "chinese"])
def test_the_table_in_the_documentation_is_what_was_seen(
    outcomes: dict[tuple[str, str], str | Exception], language: str
) -> None:
    assert all(isinstance(cell, str) for cell in outcomes.values())
    file = DOCS / {"english": "models.md", "chinese": "models.zh.md"}[language]
    headings = [name if language == "english" else chinese for name, (chinese, _) in COLUMNS.items()]
    rows = [["", *headings], ["---"] * (len(COLUMNS) + 1)]
    rows += [[each.name, *(str(outcomes[each.name, name]) for name in COLUMNS)] for each in FAMILIES]
    table = "\n".join("| " + " | ".join(cells).strip() + " |" for cells in rows)
    before, marker, rest = file.read_text(encoding="utf-8").partition(MARKER)
    _, end, after = rest.partition("<!-- end -->")
    expected = f"{before}{marker}{table}\n{end}{after}"
    if os.environ.get("WRITE_DOCS"):
        file.write_text(expected, encoding="utf-8")
    assert file.read_text(encoding="utf-8") == expected
