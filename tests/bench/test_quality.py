"""Quality: what is compared is what the engine serves, at the tokens that count."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from bench import quality
from bench.engine import random_model
from bench.gpu.checkpoint import TINY, write_checkpoint
from bench.quality import Text, answers, differences, documents, main, measure, sampled
from tools.demo.encoding import load_format
from triton_models.embedded.models import BUILT_IN_CHECKPOINT
from triton_models.engine.engine import Engine
from triton_models.engine.models.decoder import Decoder
from triton_models.engine.sampling import SamplingParams
from triton_models.engine.sequence import Request
from triton_models.engine.settings import EngineSettings
from triton_models.text.tokenizers import load_tokenizer

CPU = torch.device("cpu")
SHAPE = replace(TINY, layers=2, hidden=256, feed_forward=256, head_dim=64, vocabulary=97)
NAMES = ("tiny", "sampled")
TEXT = Text(tuple(range(0, 90, 3)), (1, 2, 28, 29))


def load(dtype: torch.dtype, quantization: str | None) -> Decoder:
    model = random_model(SHAPE, dtype=dtype, device=CPU, quantization=quantization)
    model.embedding.mul_(10)  # or all that a random model expects is nearly the same
    return model


def test_two_known_distributions() -> None:
    half, skewed = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.9, 0.1]]).log()
    [[divergence, same, loss]] = differences(half, skewed + 7, torch.tensor([1])).tolist()
    assert divergence == pytest.approx(0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1))
    assert (same, loss) == (1, pytest.approx(-math.log(0.1)))
    other = differences(skewed, skewed.flip(1), torch.tensor([1])).tolist()
    assert other == [[pytest.approx(0.8 * math.log(9)), 0, pytest.approx(-math.log(0.9))]]


def test_many_places_are_compared_as_each_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    reference, other = (torch.randn((150, 11), generator=generator) for _ in range(2))
    targets = torch.arange(150) % 11
    alone = [
        differences(reference[[place]], other[[place]], targets[[place]]) for place in range(len(targets))
    ]
    torch.testing.assert_close(differences(reference, other, targets), torch.cat(alone))


def test_fewer_bits_are_further_from_the_reference() -> None:
    rows = measure(NAMES, load, lambda _: [TEXT, TEXT], ("none", "int8", "int4"), CPU)
    reference, plain, int8, int4 = rows
    assert [row.weights for row in (reference, plain, int8, int4)] == ["bfloat16", "float32", "int8", "int4"]
    assert (reference.kl_mean, reference.kl_p99, reference.same_top, reference.tokens) == (0, 0, 1, 8)
    assert 0 < plain.kl_mean < int8.kl_mean < int4.kl_mean < int4.kl_p99


def test_the_perplexity_is_that_of_the_engines_log_probabilities() -> None:
    """Of the tokens that count alone, each expected from what stands before it."""
    [_, row] = measure(NAMES, load, lambda _: [TEXT], ("none",), CPU)
    engine = Engine(load(torch.float32, None), EngineSettings(max_running=1, kv_blocks=8))
    params = SamplingParams(temperature=0.0, max_tokens=1)
    engine.add(Request(request_id="text", prompt_ids=TEXT.ids, sampling=params, prompt_logprobs=0))
    while engine.open_requests:
        engine.step()
    known = [each for output in engine.take_outputs() for each in output.prompt_logprobs]
    losses = [-known[place - 1].logprob for place in TEXT.counted]
    assert [known[place - 1].id for place in TEXT.counted] == TEXT.targets.tolist()
    assert row.perplexity == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-4)


def test_what_the_device_is_not_made_for_is_left_out_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    [reference] = measure(NAMES, load, lambda _: [TEXT], ("fp8",), CPU)
    assert reference.weights == "bfloat16"
    assert "left out: quantization fp8 needs a GPU" in capsys.readouterr().err


def test_a_failed_request_is_no_row() -> None:
    def broken(dtype: torch.dtype, quantization: str | None) -> Decoder:
        model = load(dtype, quantization)
        model.embedding[TEXT.ids[3]] = math.nan
        return model

    with pytest.raises(RuntimeError, match="finite"):
        list(measure(NAMES, broken, lambda _: [TEXT], (), CPU))


def test_the_demo_is_asked_what_was_held_back_and_only_its_answers_count() -> None:
    texts = answers(BUILT_IN_CHECKPOINT, 500)
    assert texts == answers(BUILT_IN_CHECKPOINT, 500)
    assert sum(len(text.counted) for text in texts) == 500
    tokenizer = load_tokenizer(BUILT_IN_CHECKPOINT, "chatglm3")
    chat = load_format(BUILT_IN_CHECKPOINT)
    for text in texts[:-1]:
        assert text.counted == tuple(range(text.counted[0], len(text.ids)))
        assert text.ids[text.counted[0] - 1] == tokenizer.special_ids["<|assistant|>"]
        assert text.ids[-1] in chat.stop_ids


def test_another_checkpoint_reads_documents(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, replace(TINY, layers=1), CPU)
    texts = documents(tmp_path, 1000)
    assert sum(len(text.counted) for text in texts) == 1000
    assert len(texts) == 2
    prefix = load_format(tmp_path).render_turns([], add_generation_prompt=False)
    for text in texts:
        assert list(text.ids[: len(prefix)]) == prefix
        assert text.counted == tuple(range(len(prefix), len(text.ids)))


def test_a_random_model_is_given_what_it_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "_LONGEST", 40)
    texts = sampled(decided(torch.bfloat16, None), 100)
    assert [len(text.counted) for text in texts] == [39, 39, 22]
    assert all(text.counted == tuple(range(1, len(text.ids))) for text in texts)
    assert texts == sampled(decided(torch.bfloat16, None), 100)
    # It expects what it sampled, and not what another text has there.
    [row] = measure(NAMES, decided, lambda _: texts, (), CPU)
    [other] = measure(NAMES, decided, lambda _: [TEXT], (), CPU)
    assert row.perplexity < SHAPE.vocabulary < other.perplexity


def decided(dtype: torch.dtype, quantization: str | None) -> Decoder:
    model = load(dtype, quantization)
    model.head.weight.mul_(20)
    return model


def test_the_demo_has_a_row_for_each_kind_of_weights() -> None:
    arguments = ["--tokens", "50", "--quantization", "none", "--quantization", "int4", "--device", "cpu"]
    done = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    lines = [line.split(" | ") for line in done.output.splitlines()]
    assert lines[0][0] == "| model"
    assert [line[1:4] for line in lines[2:]] == [
        [weights, "answers", "50"] for weights in ("bfloat16", "float32", "int4")
    ]
