from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from triton_models.text.tokenizer import Tokenizer

GOLDEN = Path(__file__).parents[2] / "golden"
NAMES = ("chatglm2", "chatglm3")


@pytest.fixture(scope="session")
def golden() -> Callable[[str], dict[str, Any]]:
    """What the original code wrote for a checkpoint."""
    return lambda name: msgspec.json.decode((GOLDEN / name / "golden.json").read_bytes())


@pytest.fixture(scope="session")
def tokenizers() -> dict[str, Tokenizer]:
    return {name: Tokenizer(GOLDEN / name, name) for name in NAMES}


@pytest.fixture(scope="session")
def chatglm2(tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    return tokenizers["chatglm2"]


@pytest.fixture(scope="session")
def chatglm3(tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    return tokenizers["chatglm3"]
