"""The server that the tests of the engine's limits share."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.long_answers import write_long_answers
from tests.e2e.repository_server import RepositoryServer
from tests.e2e.serve_process import ServeProcess
from tests.e2e.stream_client import StreamClient
from tests.e2e.up_process import GOLDEN
from triton_models.entries import ModelEntry, write_entry
from wire.meta import ProbeReport

GIB = 2**30
BLOCK_BYTES = 16 * 3 * 2 * 2 * 16 * 4
"""Of the golden ChatGLM3: tokens, layers, keys and values, heads, numbers in a head, float32."""

AT_ONCE, ANSWER = 16, 200
WANTED_BLOCKS = AT_ONCE * 16
"""What so many answers of that length hold at their ends, with some 40 tokens of prompt."""

RUNNING, WAITING = 2, 60
STEP = 64
"""Tokens in a step of `steps`."""
SHORT_TIMEOUT_S = 4.0


@dataclass
class Mix:
    """One server with five engines.

    They are `ample`, `other` (ChatGLM2), `quarter` of the memory, `line` of two and with room for long
    answers, `steps` of few tokens.
    """

    server: RepositoryServer
    triton: StreamClient
    gateway: ServeProcess
    hasty: ServeProcess
    """One that gives a request only `SHORT_TIMEOUT_S`."""

    def count(self, name: str, **labels: str) -> float:
        return self.server.gauge("tritongate_engine_" + name, **labels)

    def probe(self, model: str) -> ProbeReport:
        ((_, meta),) = self.triton.stream(model, probe=True)
        assert meta.probe is not None
        return meta.probe

    def idle(self, model: str) -> bool:
        return not any(
            (
                *(self.count(name, model=model) for name in ("requests_running", "requests_waiting")),
                self.count("kv_blocks_used", model=model),
                self.gateway.gauge("tritongate_requests_in_flight"),
            )
        )


@contextlib.contextmanager
def mix_server(folder: Path) -> Iterator[Mix]:
    repository, chatglm3, chatglm2 = folder / "repository", GOLDEN / "chatglm3", GOLDEN / "chatglm2"
    long_answers = write_long_answers(folder / "chatglm3")
    quarter = WANTED_BLOCKS // 4 * BLOCK_BYTES / GIB
    for name, checkpoint, limits in (
        ("ample", chatglm3, {"max_running": AT_ONCE}),
        ("other", chatglm2, {"max_running": AT_ONCE}),
        ("quarter", chatglm3, {"max_running": AT_ONCE, "kv_memory_gib": quarter}),
        # A prompt takes as many steps as half of its tokens.
        (
            "line",
            long_answers,
            {"max_running": RUNNING, "max_waiting": WAITING, "max_batched_tokens": RUNNING},
        ),
        ("steps", chatglm3, {"max_running": AT_ONCE, "max_batched_tokens": STEP}),
    ):
        options: dict[str, int | float | str | None] = {"dtype": "float32", **limits}
        write_entry(repository, model=ModelEntry(name=name, checkpoint=str(checkpoint), options=options))
    with (
        RepositoryServer(repository) as server,
        ServeProcess(server.ready.grpc, key=server.ready.repository_key) as gateway,
        ServeProcess(
            server.ready.grpc, "--request-timeout-s", str(SHORT_TIMEOUT_S), key=server.ready.repository_key
        ) as hasty,
    ):
        triton = StreamClient(server.ready.grpc)
        yield Mix(server, triton, gateway, hasty)
        triton.close()
