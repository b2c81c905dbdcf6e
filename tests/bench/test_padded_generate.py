import json
from pathlib import Path

import pytest
import torch

from bench.padded_generate import PaddedGenerate
from bench.usual_work import draw
from triton_models.checkpoint import load_model

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.mark.parametrize("name", ["chatglm2", "chatglm3"])
def test_the_native_class_says_what_the_original_said(name: str) -> None:
    """With our weights as they are: what is measured is the same model."""
    generate = PaddedGenerate(load_model(GOLDEN / name, torch.float32, torch.device("cpu")))
    for case in json.loads((GOLDEN / name / "golden.json").read_text(encoding="utf-8"))["cases"]:
        wanted = case["greedy_ids"]
        # It stops at no id; the original stopped at its end-of-text id.
        assert generate.greedy(case["input_ids"], len(wanted)) == wanted


def test_a_row_of_a_padded_batch_has_its_own_length() -> None:
    generate = PaddedGenerate(load_model(GOLDEN / "chatglm3", torch.float32, torch.device("cpu")))
    jobs = draw(5, vocabulary=1152, longest=12, seed="test")
    assert len({len(each.prompt) for each in jobs}) > 1
    answers = generate.answer(jobs)
    assert [len(answer) for answer in answers] == [each.answer for each in jobs]
