"""A repository written by hand: a checkpoint is all an entry must name; versions; the unbatched contract."""

import ast
import contextlib
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.field_client import FieldError, ask_unbatched, conversation
from tests.e2e.stream_client import StreamClient
from tests.e2e.up_process import GOLDEN, metric, wait_until
from triton_models.entries import ModelEntry, write_entries
from wire.events import Ready, decode_event

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

HELLO = "你好"
MINIMAL = 'backend: "python"\nparameters {{ key: "checkpoint" value {{ string_value: "{checkpoint}" }} }}\n'
CONTRACT = 'parameters { key: "contract" value { string_value: "unbatched" } }\n'
VERSIONS = "version_policy { specific { versions: [1, 2] } }\n"


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ready]:
    """Entries with nothing but a checkpoint: glm's two versions are ChatGLM3 and ChatGLM2."""
    repository = tmp_path_factory.mktemp("repository")
    checkpoints = tmp_path_factory.mktemp("checkpoints")
    for version, name in ((1, "chatglm3"), (2, "chatglm2")):
        (checkpoints / str(version)).mkdir()
        (checkpoints / str(version) / "model").symlink_to(GOLDEN / name)
    templates = tmp_path_factory.mktemp("templates")
    write_entries(templates, model=ModelEntry(name="glm", checkpoint="unused"))
    for name in ("glm", "glm-stream", "glm-tokenizer"):
        config = MINIMAL.format(checkpoint=f"{checkpoints}/{{version}}/model") + VERSIONS
        if name == "glm":
            config += CONTRACT
        for version in (1, 2):
            (repository / name / str(version)).mkdir(parents=True)
            code = (templates / name / "1" / "model.py").read_text()
            (repository / name / str(version) / "model.py").write_text(code)
        (repository / name / "config.pbtxt").write_text(config)
    command = [sys.executable, "-m", "triton_models.embedded", "--exit-with-stdin"]
    with contextlib.ExitStack() as stack:
        process = subprocess.Popen(
            [*command, "--repository", str(repository)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        stack.callback(process.stdout.close)
        stack.callback(process.wait, 60)
        stack.callback(process.stdin.close)
        said = []
        for line in process.stdout:
            said.append(decode_event(line))
            if isinstance(said[-1], Ready):
                break
        assert isinstance(said[-1], Ready), said
        yield said[-1]


def url(ready: Ready, version: int) -> str:
    return f"http://{ready.http}/v2/models/glm/versions/{version}/infer"


def config(ready: Ready, entry: str) -> dict[str, object]:
    found: dict[str, object] = httpx.get(f"http://{ready.http}/v2/models/{entry}/config", timeout=60).json()
    return found


def test_what_the_configuration_leaves_out_is_filled_in(by_hand: Ready) -> None:
    stream, tokenizer, field = (config(by_hand, name) for name in ("glm-stream", "glm-tokenizer", "glm"))
    assert stream["max_batch_size"] == 64
    assert "dynamic_batching" in stream
    assert stream["model_transaction_policy"] == {"decoupled": True}
    assert [each["name"] for each in stream["input"]] == ["prompt", "history", "sampling"]
    assert [each["data_type"] for each in tokenizer["output"]] == [
        "TYPE_INT64",
        "TYPE_INT64",
        "TYPE_STRING",
        "TYPE_STRING",
    ]
    assert [(each["name"], each["data_type"]) for each in field["input"]][-2:] == [
        ("max_token", "TYPE_INT16"),
        ("history_len", "TYPE_INT16"),
    ]


def test_the_unbatched_contract(by_hand: Ready) -> None:
    first, history = ask_unbatched(url(by_hand, 1), HELLO)
    assert conversation(history) == [("user", HELLO), ("assistant", first)]
    literal = str(ast.literal_eval(history))
    fed = [ask_unbatched(url(by_hand, 1), "And?", said, max_token=80) for said in (history, literal)]
    assert fed[0] == fed[1]
    forgetful, kept = ask_unbatched(url(by_hand, 1), "And?", history, max_token=80, rounds=0)
    assert conversation(kept) == [("user", "And?"), ("assistant", forgetful)]
    assert forgetful != fed[0][0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_token": 40000}, "max_token must be at least 1, not -25536"),
        ({"rounds": -1}, "history_len must be at least 0"),
        ({"temperature": "warm"}, "temperature"),
    ],
)
def test_the_unbatched_contracts_refusals(by_hand: Ready, changes: dict[str, int], words: str) -> None:
    with pytest.raises(FieldError, match=words) as raised:
        ask_unbatched(url(by_hand, 1), HELLO, **changes)
    assert raised.value.status == 400


def test_each_version_has_its_own_metrics(by_hand: Ready) -> None:
    """Both are loaded; Triton itself would let them overwrite each other's gauges."""
    before = gauge(by_hand, "prompt_tokens_total", version="2")
    ask_unbatched(url(by_hand, 2), HELLO)
    wait_until(lambda: gauge(by_hand, "prompt_tokens_total", version="2") > before)
    assert all(gauge(by_hand, "kv_blocks", model="glm", version=version) > 0 for version in "12")


def gauge(ready: Ready, name: str, **labels: str) -> float:
    exposition = httpx.get(f"http://{ready.metrics}/metrics", timeout=60).text
    return metric(exposition, f"tritongate_engine_{name}", **labels)


def test_each_version_has_its_own_checkpoint(by_hand: Ready) -> None:
    """A field version asks the same version of the stream entry; ChatGLM2's histories are pairs."""
    three, two = (ask_unbatched(url(by_hand, version), HELLO, max_token=80) for version in (1, 2))
    assert three[0] != two[0]
    assert ast.literal_eval(two[1]) == [[HELLO, two[0]]]
    newest = f"http://{by_hand.http}/v2/models/glm/infer"
    assert ask_unbatched(newest, HELLO, max_token=80) == two
    client = StreamClient(by_hand.grpc)
    assert client.ask("glm", HELLO, max_tokens=3).last.usage.completion_tokens > 0
    client.close()
