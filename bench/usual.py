"""Compares the usual recipe, transformers' `generate` on padded, static batches, with continuous batching.

A static batch begins when the previous one has ended, and ends with its longest answer: shorter answers wait
for that end, and new requests wait for the next batch. Both use the same model, and in this process even the
same matrices. In transformers it runs in the native `Glm` class, since ChatGLM's own code no longer runs
there (see `padded_generate`).
"""

import asyncio
import gc
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bench.engine import MEDIUM, random_model
from bench.gpu.checkpoint import write_checkpoint
from bench.gpu.servers import Server
from bench.serving import running
from bench.usual_work import Job, Run, by_engine, by_server, draw, in_batches, warm_up_batch
from gateway.commands.load_rows import percentile
from triton_models.checkpoint import load_model
from triton_models.engine.engine import Engine
from triton_models.engine.models.decoder import Decoder
from triton_models.engine.settings import EngineSettings
from triton_models.engine.warm_up import warm_up
from triton_models.families import read_shape

Way = Callable[[Sequence[Job], int], Run]
"""A way to serve: takes the requests and the number of clients."""

ALONE, PADDED = "generate, one by one", "generate, padded batches"
ENGINE, SERVED = "our engine alone", "tritongate up"
_CPU = torch.device("cpu")
_CONTEXT = 320
"""Room for the longest prompt and answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The size of a measurement."""

    clients: tuple[int, ...]
    """Padded batches have this size, too; `generate` without batching runs only with the first of these."""
    requests: int
    longest: int
    """Tokens of the longest answer."""
    rounds: int
    limit_s: float
    """Seconds after which `generate` begins no batch; its throughput does not depend on how long it runs."""

    def jobs(self, vocabulary: int, clients: int, turn: int) -> list[Job]:
        """Return the requests of one turn: the same for every way, different from those of other turns."""
        seed = f"{clients} clients, {turn}"
        return draw(self.requests, vocabulary=vocabulary, longest=self.longest, seed=seed)

    @property
    def mean_answer(self) -> float:
        """Mean length of the answers, in tokens."""
        return (1 + self.longest) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class UsualRow:
    """One way to serve at one number of clients; medians over the rounds."""

    model: str
    clients: int
    way: str
    requests: int
    request_s: float
    """Seconds of server time per request: the time for an answer of mean length at this throughput."""
    wait_p50: float
    """Seconds that a client waits for its whole answer."""
    wait_p99: float
    tok_s: float
    to_generate: str
    """Throughput relative to that of `generate` for as many clients: the median of the rounds' ratios."""


@dataclass(slots=True)
class Measured:
    """Runs by clients and way, in the order of the rounds."""

    runs: dict[tuple[int, str], list[Run]] = field(default_factory=dict)

    def measure(self, ways: Mapping[str, Way], plan: Plan, vocabulary: int) -> None:
        """Run every way at every number of clients, in turn within each round."""
        for turn in range(plan.rounds):
            for clients in plan.clients:
                jobs = plan.jobs(vocabulary, clients, turn)
                for name, way in ways.items():
                    if (name == ALONE and clients != plan.clients[0]) or (name == PADDED and clients == 1):
                        continue
                    self.runs.setdefault((clients, name), []).append(way(jobs, clients))

    def rows(self, model: str, plan: Plan) -> Iterator[UsualRow]:
        """Yield the rows of the table."""
        for clients in plan.clients:
            here = {way: runs for (number, way), runs in self.runs.items() if number == clients}
            generate = here.get(PADDED) or here.get(ALONE)
            for way, runs in here.items():
                rate = statistics.median(run.tokens_per_second for run in runs)
                waited = [seconds for run in runs for seconds in run.waited]
                pairs = zip(runs, generate or (), strict=bool(generate))
                ratios = [run.tokens_per_second / base.tokens_per_second for run, base in pairs]
                yield UsualRow(
                    model=model,
                    clients=clients,
                    way=way,
                    requests=len(waited),
                    request_s=plan.mean_answer / rate,
                    wait_p50=percentile(waited, 50),
                    wait_p99=percentile(waited, 99),
                    tok_s=rate,
                    to_generate=f"{statistics.median(ratios):.2f}x" if ratios else "",
                )


def ways_here(model: Decoder, plan: Plan) -> dict[str, Way]:
    """Return the ways that run in this process, each set up and warmed up."""
    # Not at the top: the other measurements do not need transformers.
    from bench.padded_generate import PaddedGenerate  # noqa: PLC0415

    generate = PaddedGenerate(model).answer
    context = min(_CONTEXT, model.max_positions)
    settings = EngineSettings(max_running=max(plan.clients), max_context=context)
    engine = Engine(model, settings)
    warm_up(engine)
    for size in {1, *plan.clients}:
        # On a GPU, attention may be planned anew for each length that a batch of this size reaches, which
        # takes a tenth of a second each. A server in use has met all lengths already.
        generate(warm_up_batch(size, longest=plan.longest))
    limit_s = plan.limit_s
    return {
        ALONE: lambda jobs, clients: in_batches(generate, jobs, clients=clients, size=1, limit_s=limit_s),
        PADDED: lambda jobs, clients: in_batches(
            generate, jobs, clients=clients, size=clients, limit_s=limit_s
        ),
        ENGINE: lambda jobs, clients: by_engine(engine, jobs, clients=clients),
    }


def way_served(url: str, model: str, vocabulary: int) -> Way:
    """Return the way through a running server, warmed up."""

    def ask(jobs: Sequence[Job], clients: int) -> Run:
        return asyncio.run(by_server(url, model, jobs, clients=clients))

    ask(draw(4, vocabulary=vocabulary, longest=8, seed="warm-up"), 2)
    return ask


def measure_on_cpu(checkpoint: Path, plans: Mapping[str, Plan]) -> Iterator[UsualRow]:
    """Measure a real checkpoint and a random model of 100 million parameters, in float32 and bfloat16.

    Args:
        checkpoint: the real checkpoint.
        plans: the plans for `demo` (the real checkpoint) and `random`.
    """
    with tempfile.TemporaryDirectory() as folder:
        medium = Path(folder)
        write_checkpoint(medium, MEDIUM, _CPU)
        for directory, kind in ((medium, "random"), (checkpoint, "demo")):
            for dtype in (torch.float32, torch.bfloat16):
                plan, name = plans[kind], str(dtype).removeprefix("torch.")
                model = load_model(directory, dtype, _CPU)
                measured = Measured()
                with running("--model", f"m={directory}", "--dtype", name) as url:
                    ways = ways_here(model, plan) | {SERVED: way_served(url, "m", model.vocab_size)}
                    measured.measure(ways, plan, model.vocab_size)
                yield from measured.rows(f"{kind} {name}", plan)


def measure_shape(
    measured: Measured,
    checkpoint: Path,
    server: AbstractContextManager[Server],
    plan: Plan,
    *,
    device: str,
    dtype: str,
) -> None:
    """Measure a checkpoint's shape in this process, with random weights, and then the running `server`.

    The ways do not alternate, since a GPU has room for only one of the two. If something fails, `measured`
    still holds the runs before it.

    Raises:
        ServerError: the server did not become ready.
        RuntimeError: a request or transformers failed.
        ImportError: transformers is not installed.
    """
    config = read_shape(checkpoint)
    model = random_model(config, dtype=getattr(torch, dtype), device=torch.device(device))
    measured.measure(ways_here(model, plan), plan, model.vocab_size)
    del model
    gc.collect()
    torch.cuda.empty_cache()
    with server as served:
        vocabulary = config.vocabulary
        way = way_served(served.url, served.model, vocabulary)
        measured.measure({SERVED: way}, plan, vocabulary)
