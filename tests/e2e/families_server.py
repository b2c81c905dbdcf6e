"""The stack that tests of models beside ChatGLM2 and ChatGLM3 share: small, of random weights or scripted."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import openai
import torch
from transformers import PreTrainedModel

from tests.e2e.up_process import UpProcess
from tests.glm4_checkpoint import write_checkpoint
from tests.template_checkpoint import (
    BARE,
    LINES,
    LIST_MARK,
    LISTED,
    SPECIAL,
    template_with,
    write_scripted,
    write_tokenizer,
)
from tests.triton_models.native_checkpoint import write_bloom, write_native

LOGITS = "bloom"
"""With logits for those who choose the tokens themselves."""
VOCABULARY = 20_000
"""Of `LOGITS`: so many that a step's logits are sent in several parts."""
CONTEXT = 512
"""Of `LOGITS`."""
LIMIT = 24 * 2**20
"""Of bytes of logits: 314 positions."""
BASE, CHAT = "bloom-base", "glm-4-0414"
"""Random weights, without a chat template and with one."""
SCRIPTED = "scripted"
"""It has a chat template, thinks and then calls a tool."""
LISTING, BEGINNING, LINE = "as-mistral", "as-llama", "as-glm-4-0414"
"""They call a tool in the notations of these."""
GLM4, CALLER = "glm-4-9b-chat", "glm-4-caller"
"""As published, of random weights; and one that always calls a tool."""
CALLED = '{"city": "襄阳"}'
"""How `CALLER` calls it."""
NAMES = (LOGITS, BASE, CHAT, SCRIPTED, LISTING, BEGINNING, LINE, GLM4, CALLER)
READY_S = 200.0
"""So many models are loaded one after the other."""


@dataclass(frozen=True)
class Families:
    """The running stack."""

    up: UpProcess
    sdk: openai.OpenAI
    folder: Path
    """Of the checkpoints, by their names."""
    references: dict[str, PreTrainedModel]
    """What transformers has of `LOGITS`, `BASE` and `CHAT`."""
    tensors: dict[str, torch.Tensor]
    """Of `GLM4`, by their published names."""


@contextlib.contextmanager
def families_server(folder: Path) -> Iterator[Families]:
    references = {
        LOGITS: write_bloom(folder / LOGITS, vocab_size=VOCABULARY, seq_length=CONTEXT),
        BASE: write_bloom(folder / BASE, seq_length=4096),
        CHAT: write_native(folder / CHAT, "glm4", max_position_embeddings=1024),
    }
    for base in (LOGITS, BASE):
        write_tokenizer(folder / base, template=None)
    write_tokenizer(folder / CHAT)
    write_scripted(folder / SCRIPTED)
    special = (*SPECIAL, LIST_MARK)
    write_scripted(folder / LISTING, LISTED, template_with(LIST_MARK), special=special)
    write_scripted(folder / BEGINNING, BARE, template_with("<|python_tag|>"))
    write_scripted(folder / LINE, LINES, template_with("<|observation|>"))
    tensors = write_checkpoint(folder / GLM4)
    write_checkpoint(folder / CALLER, says=f"get_weather\n{CALLED}")
    models = [word for name in NAMES for word in ("--model", str(folder / name))]
    logits = ("--contract", f"{LOGITS}=logits", "--logits-bytes", str(LIMIT))
    with UpProcess(*models, *logits, "--device", "cpu", "--dtype", "float32") as up:
        up.wait_ready(READY_S)
        with openai.OpenAI(base_url=f"{up.base_url}/v1", api_key="-", max_retries=0) as sdk:
            yield Families(up, sdk, folder, references, tensors)
        assert up.stop() == 0
