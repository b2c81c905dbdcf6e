"""Clients that choose the tokens: logits and tokenizer of a BLOOM on the real Triton, as of transformers."""

import contextlib
import re
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from tritonclient.utils import InferenceServerException

from tests.e2e.families_server import LOGITS as MODEL
from tests.e2e.families_server import NAMES, VOCABULARY, Families
from tests.e2e.logits_client import Forward, beams, forward_by, greedy, nucleus, tokenize
from tests.e2e.up_process import UpProcess, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

TOKENIZER = f"{MODEL}_tokenizer"
TEXTS = ["the weather", "你好，the fox", "he"]
BINARY = ("grpc", "http")
WAYS = (*BINARY, "json")
"""As JSON, logits are compared, and no loop goes through them, which takes five seconds of a processor."""


@pytest.fixture(scope="module")
def folder(families: Families) -> Path:
    return families.folder / MODEL


@pytest.fixture(scope="module")
def reference(families: Families) -> PreTrainedModel:
    return families.references[MODEL]


@pytest.fixture(scope="module")
def up(families: Families) -> UpProcess:
    return families.up


@pytest.fixture(scope="module")
def clients(up: UpProcess) -> Iterator[dict[str, tuple[Any, Any]]]:
    http = httpclient.InferenceServerClient(
        up.kserve_http.removeprefix("http://"), concurrency=4, network_timeout=120
    )
    with http, grpcclient.InferenceServerClient(up.kserve_grpc) as grpc:
        yield {"grpc": (grpcclient, grpc), "http": (httpclient, http), "json": (httpclient, http)}


@pytest.fixture(params=WAYS)
def forward(request: pytest.FixtureRequest, clients: dict[str, tuple[Any, Any]]) -> Forward:
    library, client = clients[request.param]
    return forward_by(
        library, client, MODEL, binary=None if request.param == "grpc" else request.param == "http"
    )


def by_transformers(model: PreTrainedModel) -> Forward:
    def forward(ids: Any, mask: Any) -> Any:
        with torch.inference_mode():
            return model(torch.tensor(ids), attention_mask=torch.tensor(mask)).logits.numpy()

    return forward


def generated(model: PreTrainedModel, ids: Any, mask: Any, count: int, **options: Any) -> Any:
    found = model.generate(
        torch.tensor(ids), attention_mask=torch.tensor(mask), max_new_tokens=count, do_sample=False,
        eos_token_id=None, pad_token_id=3, **options,
    )  # fmt: skip
    return found.numpy()


def prompts(folder: Path) -> tuple[Any, Any]:
    """Return the texts as transformers' tokenizer pads them on the left."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, padding_side="left")
    padded = tokenizer(TEXTS, padding=True, return_tensors="np")
    return padded["input_ids"].astype(np.int64), padded["attention_mask"].astype(np.int64)


@pytest.mark.parametrize("way", ["grpc", "http"])
def test_texts_are_tokenized_as_by_transformers(
    way: str, clients: dict[str, tuple[Any, Any]], folder: Path, reference: PreTrainedModel
) -> None:
    ids, mask = tokenize(*clients[way], TOKENIZER, TEXTS)
    expected_ids, expected_mask = prompts(folder)
    assert ids.dtype == mask.dtype == np.int64
    assert (mask == expected_mask).all()
    assert (ids == expected_ids).all()


@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_logits_are_those_of_transformers(
    side: str, forward: Forward, folder: Path, reference: PreTrainedModel
) -> None:
    dice = np.random.default_rng(7)
    ids = dice.integers(0, VOCABULARY, (2, 90))
    mask = np.ones_like(ids)
    mask[1, {"left": slice(0, 71), "right": slice(19, None), "both": slice(0, 30)}[side]] = 0
    mask[1, 50 if side == "both" else len(mask[1]) :] = 0
    ids[1, mask[1] == 0] = -5  # what stands there is not read
    found = forward(ids, mask)
    assert found.dtype == np.float32
    assert found.shape == (2, 90, VOCABULARY)
    assert not found[mask == 0].any()
    for row in range(2):
        alone = ids[row : row + 1, mask[row] == 1]
        expected = by_transformers(reference)(alone, np.ones_like(alone))[0]
        np.testing.assert_allclose(found[row, mask[row] == 1], expected, atol=1e-4)


@pytest.mark.parametrize("forward", BINARY, indirect=True)
def test_a_greedy_loop_over_padded_rows(forward: Forward, folder: Path, reference: PreTrainedModel) -> None:
    ids, mask = prompts(folder)
    assert (greedy(forward, ids, mask, 8) == generated(reference, ids, mask, 8)).all()


@pytest.mark.parametrize("forward", BINARY, indirect=True)
def test_a_beam_loop(forward: Forward, folder: Path, reference: PreTrainedModel) -> None:
    ids, mask = (each[1:2] for each in prompts(folder))
    expected = generated(reference, ids, mask, 6, num_beams=3)
    assert (beams(forward, ids, mask, 6, width=3) == expected).all()


@pytest.mark.parametrize("forward", BINARY, indirect=True)
def test_a_nucleus_loop_with_a_seed(forward: Forward, folder: Path, reference: PreTrainedModel) -> None:
    ids, mask = prompts(folder)
    found, expected = (
        nucleus(each, ids, mask, 8, top_p=0.8, seed=11) for each in (forward, by_transformers(reference))
    )
    assert (found == expected).all()


def test_the_documented_client(up: UpProcess, reference: PreTrainedModel) -> None:
    page = (Path(__file__).parents[2] / "docs" / "legacy-clients.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(example.replace("127.0.0.1:8000", up.kserve_http.removeprefix("http://")), names)  # noqa: S102 - our own page
    names["client"].close()
    ids = names["ids"]
    prompt = ids[:, :-20]
    assert (ids == generated(reference, prompt, np.ones_like(prompt), 20)).all()


def test_both_names_are_listed_and_described(up: UpProcess, clients: dict[str, tuple[Any, Any]]) -> None:
    http, grpc = clients["http"][1], clients["grpc"][1]
    matrix = [("input_ids", "INT64", [-1, -1]), ("attention_mask", "INT64", [-1, -1])]
    expected = {
        MODEL: (matrix, [("logits", "FP32", [-1, -1, VOCABULARY])]),
        TOKENIZER: ([("TEXT", "BYTES", [-1])], matrix),
    }
    listed = {*NAMES, TOKENIZER}
    assert {each["name"] for each in http.get_model_repository_index()} == listed
    assert {each.name for each in grpc.get_model_repository_index().models} == listed
    for name, (inputs, outputs) in expected.items():
        assert http.is_model_ready(name)
        assert grpc.is_model_ready(name)
        documents = (http.get_model_metadata(name), grpc.get_model_metadata(name, as_json=True))
        for document in documents:
            for kind, tensors in (("inputs", inputs), ("outputs", outputs)):
                told = [
                    (each["name"], each["datatype"], [*map(int, each["shape"])]) for each in document[kind]
                ]
                assert told == tensors
        plain = http.get_model_config(name)
        assert (plain["max_batch_size"], plain["name"]) == (0, name)
        config = grpc.get_model_config(name).config
        for theirs, tensors in ((config.input, inputs), (config.output, outputs)):
            assert [(each.name, list(each.dims)) for each in theirs] == [
                (tensor, dims) for tensor, _, dims in tensors
            ]


ROW = [[5, 6, 7]]
ONES = [[1, 1, 1]]
WRONG: dict[str, tuple[Any, Any, str]] = {
    "outside": ([[5, VOCABULARY, 7]], ONES, "input_ids"),
    "negative": ([[5, -1, 7]], ONES, "input_ids"),
    "largest": ([[5, 2**63 - 1, 7]], ONES, "input_ids"),
    "hole": (ROW, [[1, 0, 1]], "attention_mask"),
    "two": (ROW, [[1, 2, 1]], "attention_mask"),
    "minus": (ROW, [[1, -1, 1]], "attention_mask"),
    "all padding": (ROW, [[0, 0, 0]], "attention_mask"),
    "other rows": (ROW * 2, ONES, "attention_mask"),
    "other length": (ROW, [[1, 1]], "attention_mask"),
    "one dimension": (ROW[0], ONES[0], "input_ids"),
    "empty": (np.zeros((1, 0)), np.zeros((1, 0)), "input_ids"),
    "no rows": (np.zeros((0, 3)), np.zeros((0, 3)), "input_ids"),
    "many rows": (ROW * 65, ONES * 65, "65"),
    "too many bytes": ([[1] * 400], [[1] * 400], "25165824"),
    "over the context": ([[1] * 512], [[1] * 512], ""),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_refused(case: str, forward: Forward) -> None:
    ids, mask, named = WRONG[case]
    with pytest.raises(InferenceServerException) as refused:
        forward(np.array(ids, np.int64), np.array(mask, np.int64))
    assert refused.value.status() in ("400", "StatusCode.INVALID_ARGUMENT")
    assert named in refused.value.message()


@pytest.mark.parametrize("way", ["grpc", "http"])
def test_floats_are_refused(way: str, clients: dict[str, tuple[Any, Any]]) -> None:
    library, client = clients[way]
    inputs = []
    for name, kind in (("input_ids", np.float32), ("attention_mask", np.int64)):
        inputs.append(library.InferInput(name, [1, 3], "FP32" if kind is np.float32 else "INT64"))
        inputs[-1].set_data_from_numpy(np.ones((1, 3), kind))
    with pytest.raises(InferenceServerException, match=r"FP32|datatype") as refused:
        client.infer(MODEL, inputs)
    assert refused.value.status() in ("400", "StatusCode.INVALID_ARGUMENT")
    given = library.InferInput("TEXT", [2], "BYTES")
    given.set_data_from_numpy(np.array([b"\xff\xfe", b"a"], dtype=np.object_))
    with pytest.raises(InferenceServerException, match="UTF-8"):
        client.infer(TOKENIZER, [given])
    with pytest.raises(InferenceServerException, match="TEXT missing"):
        client.infer(TOKENIZER, [])


def test_a_prompt_of_the_context_is_told_in_full(forward: Forward, reference: PreTrainedModel) -> None:
    ids = np.random.default_rng(3).integers(0, VOCABULARY, (1, 300))
    found = forward(ids, np.ones_like(ids))
    np.testing.assert_allclose(found, by_transformers(reference)(ids, np.ones_like(ids)), atol=1e-4)


def test_answers_go_on_while_logits_are_computed(up: UpProcess, clients: dict[str, tuple[Any, Any]]) -> None:
    """Three clients ask for 300 positions again and again beside a stream, which must not be silent."""
    ids = np.ones((1, 300), np.int64)
    over, errors = threading.Event(), []

    def ask() -> None:
        with grpcclient.InferenceServerClient(up.kserve_grpc) as client:
            forward = forward_by(grpcclient, client, MODEL)
            while not over.is_set():
                try:
                    forward(ids, ids)
                except InferenceServerException as error:
                    errors.append(error)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        with openai.OpenAI(base_url=up.base_url + "/v1", api_key="-", max_retries=0) as sdk:
            letters = {"ignore_eos": True, "allowed_token_ids": list(range(40, 80))}
            stream = sdk.completions.create(
                model=MODEL,
                prompt=[5, 6, 7],
                max_tokens=60,
                stream=True,
                stream_options={"include_usage": True},
                extra_body=letters,
            )
            times, usage = [time.monotonic()], None
            for chunk in stream:
                times.append(time.monotonic())
                usage = chunk.usage or usage
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert not errors
    assert usage is not None
    assert usage.completion_tokens == 60
    # How many chunks they come in is the machine's affair: what waits for a busy gateway leaves together.
    assert max(after - before for before, after in pairwise(times)) < 2


def test_a_client_that_hangs_up_frees_the_engine(up: UpProcess) -> None:
    rows = [[[9] * 300], [[1] * 300]]
    body = {
        "inputs": [
            {"name": name, "datatype": "INT64", "shape": [1, 300], "data": data}
            for name, data in zip(("input_ids", "attention_mask"), rows, strict=True)
        ]
    }

    def hangs_up() -> bool:
        """Ask, and leave after 20 ms, unless this process did not get to run and finds the answer there."""
        url, limit = f"{up.kserve_http}/v2/models/{MODEL}/infer", httpx.Timeout(9, read=0.02)
        with contextlib.suppress(httpx.ReadTimeout):
            httpx.post(url, json=body, timeout=limit)
            return False
        return True

    def cancels() -> float:
        return up.gauge("tritongate_client_cancels_total", model=MODEL)

    before = cancels()
    assert any(hangs_up() for _ in range(20))
    wait_until(lambda: cancels() > before)
    wait_until(lambda: up.gauge("tritongate_requests_in_flight", model=MODEL) == 0)
    wait_until(lambda: up.gauge("tritongate_engine_requests_running", model=MODEL) == 0)


def test_each_name_has_its_own_statistics(clients: dict[str, tuple[Any, Any]]) -> None:
    statistics = clients["http"][1].get_inference_statistics(TOKENIZER)["model_stats"]
    assert [each["name"] for each in statistics] == [TOKENIZER]
    assert statistics[0]["inference_stats"]["fail"]["count"] > 0
