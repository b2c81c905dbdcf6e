"""A thousand hostile requests at the door, and bodies to choke on: 4xx, and nothing dies."""

import copy
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc.aio
import pytest

from gateway.kserve.contracts import HEADER_LENGTH
from tests.gateway.fake_upstream import FakeUpstream
from tests.gateway.kserve.legacy import body, echo, over_grpc, predict_body, question, tensor, unbatched
from tests.gateway.kserve.test_logits import body as logits_body
from tests.gateway.kserve.test_logits import telling
from tests.gateway.serving import in_process

INFER = "/v2/models/glm/infer"
PREDICT = "/MutilBackendService/Predict"
MANY = 1000

ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1.5,
    2**15,
    2**31,
    2**63,
    2**70,
    10**400,
    -(2**63),
    1e308,
    "",
    "\x00",
    "x" * 5000,
    "你" * 1000,
    [],
    {},
    [[]],
    [None],
    [[["x"], "x"]],
    ["x"] * 2000,
    [1] * 2000,
    {"a": {}},
)
SHAPES: tuple[list[int], ...] = ([], [-1], [0, 1], [2**62] * 8, [1] * 100, [-(2**63), 1])
DEEP = "[" * 100_000
DEEP_ENOUGH = 10
HEADERS = ("0", "1", "-1", "x", "", "99999999999999999999", "½", "1e3", "0x10")


def leaves(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of everything in a document, but for what is nested deeply."""
    if len(path) > DEEP_ENOUGH:
        return [path]
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [path, *(each for key, child in children for each in leaves(child, (*path, key)))]


def change(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    at = document
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return document


def odd_value(_: Any, choose: random.Random) -> Any:
    return copy.deepcopy(choose.choice(ODD))


def doubled(node: Any, _: random.Random) -> Any:
    return [node, node]


def deeper(node: Any, choose: random.Random) -> Any:
    for _ in range(choose.choice((1, 7, 8, 9, 150))):
        node = [node]
    return node


def with_parameters(node: Any, choose: random.Random) -> Any:
    names = ("binary_data_size", "shared_memory_region", "binary_data", "timeout", "classification", "x")
    extra = {"parameters": {choose.choice(names): choose.choice(ODD)}}
    return node | extra if isinstance(node, dict) else extra


MUTATIONS: tuple[Callable[[Any, random.Random], Any], ...] = (odd_value, doubled, deeper, with_parameters)
"""What takes the place of something in a right document."""


Make = Callable[[], dict[str, Any]]
QUESTIONS: tuple[tuple[Make, str], ...] = ((body, INFER), (unbatched, INFER), (predict_body, PREDICT))
TOKENIZE = "/v2/models/glm_tokenizer/infer"


def texts() -> dict[str, Any]:
    return {"inputs": [tensor("TEXT", ["a", "你好"], [2])]}


NUMBERS: tuple[tuple[Make, str], ...] = ((logits_body, INFER), (texts, TOKENIZE))


def hostile(choose: random.Random, kinds: Sequence[tuple[Make, str]]) -> tuple[str, bytes, dict[str, str]]:
    """Make up a request: its path, body and headers."""
    make, path = choose.choice(kinds)
    document = make()
    for _ in range(choose.randint(1, 3)):
        found = leaves(document)
        place = choose.choice(found)
        node = document
        for key in place:
            node = node[key]
        document = change(document, place, choose.choice(MUTATIONS)(node, choose))
        document = json.loads(json.dumps(document))  # nothing is there twice, or within itself
    content = json.dumps(document).encode()
    headers = {"Content-Type": "application/json"}
    kind = choose.randrange(8)
    if kind == 0:
        content = content[: choose.randrange(len(content) + 1)]
    elif kind == 1:
        content += choose.randbytes(choose.choice((1, 4, 1000)))
    elif kind == 2:
        headers[HEADER_LENGTH] = choose.choice((*HEADERS[:6], str(choose.randrange(2 * len(content) + 1))))
    elif kind == 3:
        content = choose.choice((DEEP.encode(), b'{"a":' * 50_000, choose.randbytes(100), b"\x00", b""))
    elif kind == 4:
        model = choose.choice(("..", "%00", "glm%2f..", "a" * 3000, "glm/versions/x", "%ff"))
        path = f"/v2/models/{model}/infer" if path == INFER else path
    return path, content, headers


@pytest.mark.parametrize("contract", ["batched", "logits"])
async def test_a_thousand_hostile_requests_are_the_clients_fault(contract: str) -> None:
    choose = random.Random(20)
    statuses: Counter[int] = Counter()
    script, kinds = (telling(), NUMBERS) if contract == "logits" else (echo, QUESTIONS)
    async with in_process(FakeUpstream(script), contract=contract) as served:
        for number in range(MANY):
            path, content, headers = hostile(choose, kinds)
            answer = await served.http.post(path, content=content, headers=headers)
            assert answer.status_code < 500, (number, path, content[:300], answer.text)
            assert "Traceback" not in answer.text
            statuses[answer.status_code] += 1
        assert statuses[400] > MANY // 2, statuses
        assert set(statuses) <= {200, 400, 404, 413}, statuses
        make, path = kinds[0]
        assert (await served.http.post(path, json=make())).status_code == 200
        await served.until_idle()
        assert served.gateway.bodies.held == served.gateway.logits.in_flight == 0


async def test_tiny_chunks_in_process() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(20_000):
            yield b" "
        yield json.dumps(body()).encode()

    async with in_process(FakeUpstream(echo)) as served:
        assert (await served.http.post(INFER, content=chunks())).status_code == 200


async def test_hostile_messages_are_the_clients_fault() -> None:
    choose = random.Random(21)
    codes: Counter[Any] = Counter()
    async with over_grpc(FakeUpstream(echo)) as (served, stub, address):
        async with grpc.aio.insecure_channel(address) as channel:
            call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            for _ in range(MANY // 4):
                request = question()
                tensor = choose.choice(request.inputs)
                match choose.randrange(7):
                    case 0:
                        tensor.shape[:] = choose.choice(
                            ([], [-1], [0, 1], [2**62] * 8, [1] * 100, [-(2**63), 1])
                        )
                    case 1:
                        tensor.datatype = choose.choice(("", "INT16", "FP32", "x" * 1000))
                    case 2:
                        tensor.name = choose.choice(("", "history", "prompt", "你" * 1000))
                    case 3:
                        request.raw_input_contents[choose.randrange(4)] = choose.randbytes(
                            choose.randrange(9)
                        )
                    case 4:
                        del request.raw_input_contents[choose.randrange(4) :]
                    case 5:
                        tensor.contents.int_contents.extend([choose.randrange(-(2**31), 2**31)] * 3)
                    case _:
                        request.outputs.add(name=choose.choice(("", "x" * 5000, "response")))
                data = request.SerializeToString()
                if choose.randrange(5) == 0:
                    place = choose.randrange(len(data))
                    data = data[:place] + choose.randbytes(3) + data[place + 3 :]
                try:
                    await call(data)
                    codes[grpc.StatusCode.OK] += 1
                except grpc.aio.AioRpcError as error:
                    codes[error.code()] += 1
        assert codes[grpc.StatusCode.INVALID_ARGUMENT] > MANY // 8, codes
        assert set(codes) <= {
            grpc.StatusCode.OK,
            grpc.StatusCode.INVALID_ARGUMENT,
            grpc.StatusCode.NOT_FOUND,
            grpc.StatusCode.DEADLINE_EXCEEDED,
        }, codes
        assert await stub.ModelInfer(question())
        await served.until_idle()
