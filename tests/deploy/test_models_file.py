"""The example of a models file is one, and says all that can be said."""

import re
from pathlib import Path
from typing import Any

import yaml

from gateway.settings import load_settings
from gateway.settings.models import Defaults, Limits, ModelSettings
from gateway.settings.values import Contract
from gateway.triton.dialects import DIALECTS

EXAMPLE = Path(__file__).parents[2] / "deploy" / "models.yaml"


def test_the_example_can_be_used(tmp_path: Path) -> None:
    text = EXAMPLE.read_text(encoding="utf-8").replace("/models/Qwen2.5-7B-Instruct", str(tmp_path))
    (tmp_path / "models.yaml").write_text(text, encoding="utf-8")
    keys = [{"name": "support", "key": "k"}]
    settings = load_settings({"models_file": str(tmp_path / "models.yaml"), "api_keys": keys})
    assert list(settings.models) == ["chatglm3-6b", "qwen", "qwen-support"]
    assert settings.model("qwen-support").entry == settings.model("qwen").entry


def test_the_example_has_every_key() -> None:
    models: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))["models"]
    assert {key for model in models.values() for key in model} == set(ModelSettings.model_fields)
    assert set(models["qwen-support"]["limits"]) == set(Limits.model_fields)
    assert set(models["qwen-support"]["defaults"]) == set(Defaults.model_fields)


def test_the_example_names_every_dialect_and_contract() -> None:
    text = EXAMPLE.read_text(encoding="utf-8")
    for key, known in (("dialect", ("auto", *DIALECTS)), ("contract", Contract)):
        (named,) = re.findall(rf"^ +{key}: \S+ +# (.+)$", text, re.MULTILINE)
        assert set(re.split(r", | or ", named.rpartition(": ")[2])) == set(known)
