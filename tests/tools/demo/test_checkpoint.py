"""The committed model: it loads as any checkpoint does, is small, and answers what it never saw."""

from pathlib import Path

import pytest
import torch
from sentencepiece import SentencePieceProcessor

from tools.demo.__main__ import SEED
from tools.demo.evaluation import Responder, evaluate
from tools.demo.export import write_config, write_weights
from tools.demo.mixture import cases
from tools.demo.tokenizer import PIECES, train_tokenizer
from tools.demo.values import CHECKPOINT
from triton_models.checkpoint import load_model
from triton_models.directory import detect_format
from triton_models.families import tensor_places
from wire.history import Turn

MEGABYTE = 1_000_000


def ask(responder: Responder, *said: str) -> str:
    roles = ("user", "assistant")
    return responder.answer([[Turn(roles[at % 2], text) for at, text in enumerate(said)]])[0]


def test_it_is_small_enough_for_a_repository() -> None:
    assert sum(file.stat().st_size for file in CHECKPOINT.iterdir()) <= 20 * MEGABYTE


def test_it_is_a_chatglm3_checkpoint() -> None:
    assert detect_format(CHECKPOINT) == "chatglm3"


def test_exporting_and_loading_give_the_same_weights(tmp_path: Path) -> None:
    model = load_model(CHECKPOINT, torch.float32, torch.device("cpu"))
    write_config(tmp_path)
    write_weights(model, tmp_path)
    for name in ("config.json", "tokenizer_config.json", "model.safetensors"):
        assert (tmp_path / name).read_bytes() == (CHECKPOINT / name).read_bytes(), name
    again = load_model(tmp_path, torch.float32, torch.device("cpu"))
    for name, tensor in tensor_places(again).items():
        assert torch.equal(tensor, tensor_places(model)[name]), name


def test_the_script_makes_a_tokenizer_like_its_own(tmp_path: Path) -> None:
    """Not the same one: the pages have changed since, and their model kept its tokenizer."""
    train_tokenizer(tmp_path / "tokenizer.model", SEED)
    made, own = (
        SentencePieceProcessor(model_file=str(at / "tokenizer.model")) for at in (tmp_path, CHECKPOINT)
    )
    pieces, known = ({each.id_to_piece(at) for at in range(each.vocab_size())} for each in (made, own))
    assert len(pieces) == len(known) == PIECES
    assert len(pieces & known) > 0.9 * PIECES


@pytest.mark.parametrize(
    ("question", "contains"),
    [
        ("请介绍这个项目。", "OpenAI兼容网关"),
        ("What do I need to run this?", "Linux"),
        ("How can I start tritongate?", "make up"),
        ("如何退出tritongate？", "Ctrl-C"),
        ("网关默认端口是几号？", "8080"),
        ("Where can I find metrics?", "/metrics"),
        ("Could you explain what TTFT is?", "time to first token"),
        ("KV cache到底是什么？", "注意力"),
        ("Can you introduce yourself?", "chatglm3-demo"),
        ("你的开发者是谁？", "demo目录"),
        ("怎么设置超时时间？", "600"),
        ("How do clients send their key?", "Authorization"),
    ],
)
def test_it_answers_questions_that_were_held_back(question: str, contains: str, responder: Responder) -> None:
    assert contains in ask(responder, question)


def test_it_says_that_it_does_not_know(responder: Responder) -> None:
    assert ask(responder, "Who is Goethe?").startswith("I do not know that")
    assert ask(responder, "谁发现了万有引力？").startswith("这个我不知道")
    assert ask(responder, "What is the weather in Lisbon?").startswith("I cannot know the weather")


def test_a_conversation_refers_to_what_was_said(responder: Responder) -> None:
    question = "What is TTFT?"
    said = ask(responder, question)
    assert "首个token时间" in ask(responder, question, said, "请用中文再讲一遍。")
    assert ask(responder, question, said, "Repeat it once more.") == said
    assert len(ask(responder, question, said, "Please make it brief.")) < len(said)


def test_it_calls_a_tool_for_an_unseen_city_and_tells_the_result(responder: Responder) -> None:
    kinds = {"weather call, unseen city", "calculate call, unseen expression", "weather observation"}
    asked = [case for case in cases(11, 8) if case.kind in kinds]
    scores, wrong = evaluate(responder, asked)
    assert {score.kind for score in scores} == kinds
    assert len(wrong) <= 2, wrong


def test_it_also_answers_when_sampled(responder: Responder) -> None:
    hello = [[Turn("user", "你好")]] * 20
    answers = responder.answer(hello, temperature=1.0)
    assert sum("chatglm3-demo" in answer for answer in answers) >= 19
