"""A checkpoint whose answers outlast what a test does meanwhile, however busy the machine."""

import json
import shutil
from pathlib import Path

from tests.e2e.up_process import GOLDEN

LONG = 8000
"""Tokens in an answer that does not end before somebody leaves. A prompt has room beside them."""
CONTEXT = 8192


def write_long_answers(folder: Path) -> Path:
    """Copy the golden ChatGLM3 there, with room for `CONTEXT` tokens."""
    shutil.copytree(GOLDEN / "chatglm3", folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"seq_length": CONTEXT}), encoding="utf-8")
    return folder
