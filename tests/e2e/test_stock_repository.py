"""The committed repository on a tritonserver of anybody's, spoken to directly."""

import json
import threading
import time
from collections.abc import Iterator

import pytest

from tests.e2e.channel_client import open_channel
from tests.e2e.stock_server import StockServer
from tests.e2e.stream_client import StreamClient, infer_request
from tests.e2e.up_process import wait_until
from wire.meta import Meta

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

MODEL = "chatglm3-demo"
GREEDY = {"temperature": 0, "ignore_eos": True}
AT_ONCE_S = 10.0
"""Far less than the wait behind a busy engine, far more than a busy machine needs."""


@pytest.fixture(scope="module")
def client(stock: StockServer) -> Iterator[StreamClient]:
    client = StreamClient(stock.grpc)
    yield client
    client.close()


def test_a_generation_comes_alike_whole_and_over_a_channel(client: StreamClient) -> None:
    whole = client.ask(MODEL, "Who are you?", max_tokens=300, **GREEDY)
    accepted, *counts, last = whole.responses
    assert accepted[1].accepted is not None
    assert all(count == ("", Meta(tokens=count[1].tokens)) for count in counts)
    assert last[1].usage.completion_tokens == 300
    channel = open_channel(client, MODEL, "stock")
    where = {"id": "stock", "stream": 5}
    own = client.ask(MODEL, "Who are you?", max_tokens=300, channel=where, **GREEDY)
    wait_until(lambda: channel.frames[-1].frame >= own.last.delivered.frame)
    assert channel.text(5) + own.text == whole.text
    assert channel.deltas(5) == own.last.delivered.deltas > 5
    assert own.last.usage == whole.last.usage
    assert [frame.frame for frame in channel.frames] == list(range(len(channel.frames)))
    channel.close()


def test_tokens_are_counted_by_the_same_entry(client: StreamClient) -> None:
    accepted = client.ask(MODEL, "你好", max_tokens=1, return_token_ids=True).metas[0].accepted
    conversation = [{"role": "user", "content": "你好"}]
    assert client.tokenize(MODEL, messages=conversation).ids == accepted.prompt_token_ids
    tokenized = client.tokenize(MODEL, "Who are you?", strings=True)
    assert client.detokenize(MODEL, tokenized.ids) == "Who are you?"
    assert len(tokenized.strings) == len(tokenized.ids)


def test_a_full_engine_answers_probes_cancels_and_requests_to_tokenize(
    stock: StockServer, client: StreamClient
) -> None:
    channel = open_channel(client, MODEL, "full")
    owns = [
        client.stream(
            MODEL,
            "Who are you?",
            request_id=f"full {stream}",
            max_tokens=1500,
            channel={"id": "full", "stream": stream},
            ignore_eos=True,  # and sampled: what repeats itself is guessed, and soon over
        )
        for stream in range(200)
    ]
    assert all(next(own)[1].accepted is not None for own in owns)
    started = time.monotonic()
    ((_, probe),) = client.stream(MODEL, probe=True)
    assert probe.probe.running + probe.probe.waiting > 100
    assert probe.probe.heartbeat_age_s < AT_ONCE_S
    assert client.tokenize(MODEL, "hello").ids
    for stream in range(200):
        ((_, meta),) = client.stream(MODEL, cancel=f"full {stream}")
        assert meta.cancelled is True
    assert time.monotonic() - started < 2 * AT_ONCE_S
    for own in owns:
        with pytest.raises(RuntimeError, match="tritongate:cancelled:"):
            list(own)
    wait_until(lambda: stock.gauge("tritongate_engine_requests_running") == 0)
    channel.close()


def test_what_cannot_be_honoured_is_refused_by_name(client: StreamClient) -> None:
    for sampling, words in (({"temperature": 3}, "temperature"), ({"priorty": 1}, "priorty")):
        with pytest.raises(RuntimeError, match=f"tritongate:invalid_request: .*{words}"):
            client.ask(MODEL, "hi", **sampling)
    with pytest.raises(RuntimeError, match="tritongate:context_length_exceeded:"):
        client.ask(MODEL, "x" * 2**20)


def test_open_requests_leave_the_memory_shared_with_triton(stock: StockServer, client: StreamClient) -> None:
    """Each has inputs of 1 MiB. Kept for as long as they are open, these would take 300 MiB.

    2,048 of them have to fit the 1 GiB that a container usually has. (Triton's regions never shrink.)
    """
    before = stock.shared_memory_bytes()
    channel = open_channel(client, MODEL, "memory")
    calls = []
    for stream in range(300):
        where = {"id": "memory", "stream": stream}
        sampling = json.dumps({"max_tokens": 400, "channel": where, **GREEDY})
        calls.append(client.send(infer_request(MODEL, "你好", "", sampling + " " * 2**20)))
        assert not next(iter(calls[-1])).error_message
    assert stock.gauge("tritongate_engine_requests_running") > 50
    assert stock.shared_memory_bytes() - before < 64 * 2**20
    for call in calls:
        call.cancel()
    wait_until(lambda: stock.gauge("tritongate_engine_requests_running") == 0)
    channel.close()


def test_tokenizing_long_texts_does_not_hold_up_streams(client: StreamClient) -> None:
    """The frames of 8 answers keep coming beside a flood of texts of 1 MB."""
    channel = open_channel(client, MODEL, "beside")
    over = threading.Event()

    def flood() -> None:
        while not over.is_set():
            assert client.tokenize(MODEL, "The quick brown fox jumps. " * 40_000).ids

    flooding = threading.Thread(target=flood)
    flooding.start()
    rounds = [range(first, first + 8) for first in (0, 8, 16)]
    for streams in rounds:
        owns = [
            client.stream(MODEL, "你好", max_tokens=300, channel={"id": "beside", "stream": stream}, **GREEDY)
            for stream in streams
        ]
        for own in owns:
            assert list(own)[-1][1].finish_reason == "length"
    over.set()
    flooding.join()
    # Held up for as long as a text takes, each answer would come as what has gathered in a few large deltas.
    assert all(sum(map(channel.deltas, answers)) > 15 for answers in zip(*rounds, strict=True))
    channel.close()
