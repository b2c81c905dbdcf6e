"""The unbatched contract, of a gateway that serves a model with it; the model itself knows no contracts."""

import ast

import httpx
import pytest

from tests.e2e.field_client import FieldError, ask_unbatched, conversation
from tests.e2e.serve_process import ServeProcess

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

HELLO = "你好"


@pytest.fixture
def glm(beside: ServeProcess) -> str:
    """The URL of chatglm3 with the unbatched contract, before the Triton where others have another one."""
    return f"{beside.base_url}/v2/models/chatglm3"


def test_the_unbatched_contract(glm: str) -> None:
    first, history = ask_unbatched(glm + "/infer", HELLO)
    assert conversation(history) == [("user", HELLO), ("assistant", first)]
    literal = str(ast.literal_eval(history))
    fed = [
        ask_unbatched(glm + "/versions/1/infer", "And?", said, max_token=80) for said in (history, literal)
    ]
    assert fed[0] == fed[1]
    forgetful, kept = ask_unbatched(glm + "/infer", "And?", history, max_token=80, rounds=0)
    assert conversation(kept) == [("user", "And?"), ("assistant", forgetful)]
    assert forgetful != fed[0][0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_token": 40000}, "from -32768 to 32767"),
        ({"max_token": 40000 - 2**16}, "max_token must be at least 1, not -25536"),
        ({"rounds": -1}, "history_len must be at least 0"),
        ({"temperature": "warm"}, "temperature"),
    ],
)
def test_the_unbatched_contracts_refusals(glm: str, changes: dict[str, int], words: str) -> None:
    with pytest.raises(FieldError, match=words) as raised:
        ask_unbatched(glm + "/infer", HELLO, **changes)
    assert raised.value.status == 400


def test_its_tensors_are_described(glm: str) -> None:
    inputs = httpx.get(glm, timeout=60).json()["inputs"]
    assert [(each["name"], each["datatype"], each["shape"]) for each in inputs[-2:]] == [
        ("max_token", "INT16", [1]),
        ("history_len", "INT16", [1]),
    ]
    other = glm.replace("chatglm3", "chatglm2")
    assert httpx.get(other, timeout=60).json()["inputs"][1]["shape"] == [-1]
