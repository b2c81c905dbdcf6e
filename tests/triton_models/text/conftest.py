from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.glm4_checkpoint import write_tokenizer
from triton_models.text.tokenizers import Tokenizer, load_tokenizer

GOLDEN = Path(__file__).parents[2] / "golden"
NAMES = ("chatglm2", "chatglm3")


@pytest.fixture(scope="session")
def golden() -> Callable[[str], dict[str, Any]]:
    """What the original code wrote for a checkpoint."""
    return lambda name: msgspec.json.decode((GOLDEN / name / "golden.json").read_bytes())


@pytest.fixture(scope="session")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    directory = tmp_path_factory.mktemp("glm4")
    write_tokenizer(directory)
    golden = {name: load_tokenizer(GOLDEN / name, name) for name in NAMES}
    return golden | {"glm4": load_tokenizer(directory, "glm4")}


@pytest.fixture(scope="session")
def chatglm2(tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    return tokenizers["chatglm2"]


@pytest.fixture(scope="session")
def chatglm3(tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    return tokenizers["chatglm3"]


@pytest.fixture(scope="session")
def glm4(tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    return tokenizers["glm4"]
