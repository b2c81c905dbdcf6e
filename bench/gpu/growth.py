"""Measures how cost grows with prompt and answer, and what a shared prefix saves, on one `tritongate up`."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import click

from bench.gpu import servers
from bench.gpu.compare import describe
from bench.rows import median_row, table
from gateway.commands.bench import COUNT, listed
from gateway.commands.load import LoadPool, Workload, closed_loop
from gateway.commands.load_rows import LoadRow


@dataclass(frozen=True, slots=True)
class Case:
    """One setting."""

    name: str
    ids: int
    """Tokens of each prompt."""
    out: int
    """Tokens of each answer."""
    shared: int = 0
    """Tokens with which all prompts begin, the same in each."""


@dataclass(frozen=True, slots=True)
class GrowthRow:
    """The result for one setting. Times are milliseconds."""

    setting: str
    prompt: int
    answer: int
    shared: int
    tok_s: float
    """Output tokens per second."""
    in_out_tok_s: float
    """Prompt and output tokens per second."""
    ttft_p50: float
    ttft_p99: float
    token_p50: float
    gap_p99: float
    failed: int


def cases(prompts: tuple[int, ...], answers: tuple[int, ...], shared: int) -> Iterator[Case]:
    """Yield the settings: prompts of several lengths, answers of several lengths, and a shared prefix."""
    yield from (Case("prompt", ids, 128) for ids in prompts)
    yield from (Case("answer", 259, out) for out in answers)
    if shared:
        # A question of 64 tokens after a system prompt: first all have different ones, then all the same.
        yield Case("cold", shared + 64, 128)
        yield Case("shared", shared + 64, 128, shared)


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--checkpoint", required=True, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--arguments", default="--device cuda:0 --dtype bfloat16", show_default=True)
@click.option("--clients", default=32, show_default=True)
@click.option("--repeats", default=3, show_default=True, help="the row of the median throughput counts")
@listed("--prompts", COUNT, default="16,64,259,1024,2051,4096", show_default=True)
@listed("--answers", COUNT, default="16,64,256,1024", show_default=True)
@click.option("--shared", default=1500, show_default=True, help="tokens; 0: not measured")
@click.option("--processes", default=8, show_default=True)
def main(
    *,
    folder: Path,
    checkpoint: Path,
    arguments: str,
    clients: int,
    repeats: int,
    prompts: tuple[int, ...],
    answers: tuple[int, ...],
    shared: int,
    processes: int,
) -> None:
    """Measure, print, write."""
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[GrowthRow] = []
    with (
        servers.ours(checkpoint, folder / "growth.log", arguments.split()) as server,
        LoadPool(processes) as pool,
    ):
        base = Workload(url=server.url, model=server.model)
        for case in cases(prompts, answers, shared):
            workload = replace(base, ids=case.ids, out=case.out, shared=case.shared)
            rows.append(_row(case, measure(pool, workload, case, clients, repeats)))
            click.echo(str(rows[-1]), err=True)
    click.echo(f"{describe()}; {clients} clients\n\n{table(GrowthRow, rows)}")
    document = {"machine": describe(), "clients": clients, "rows": [asdict(row) for row in rows]}
    (folder / "growth.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def measure(pool: LoadPool, workload: Workload, case: Case, clients: int, repeats: int) -> LoadRow:
    """Return the median row. Prompts are drawn by request name; all differ, so nothing else is shared."""
    name = f"{case.name} {case.ids} {case.out}"
    closed_loop(pool, replace(workload, out=8), f"{name} warm-up", clients=clients, requests=clients)
    return median_row(
        [
            closed_loop(pool, workload, f"{name} {repeat}", clients=clients, requests=clients)
            for repeat in range(repeats)
        ]
    )


def _row(case: Case, row: LoadRow) -> GrowthRow:
    return GrowthRow(
        setting=case.name,
        prompt=case.ids,
        answer=case.out,
        shared=case.shared,
        tok_s=row.tokens_per_second,
        in_out_tok_s=row.tokens_per_second * (1 + case.ids / case.out),
        ttft_p50=row.ttft_p50,
        ttft_p99=row.ttft_p99,
        token_p50=row.per_token_p50,
        gap_p99=row.gap_p99,
        failed=row.failed,
    )


if __name__ == "__main__":
    main()
