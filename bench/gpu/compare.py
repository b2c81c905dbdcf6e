"""Measures this project and another OpenAI server on one machine with the same load, one after the other.

Prints one table, and writes every row to FOLDER/compare.json and the servers' output to files beside it.
Measurements for which no time is left are left out, with a note. The other server is given by a script
(`--other`), which starts it and returns when it answers, and stops it when called with the single argument
`stop`.
"""

import json
import platform
import shlex
import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import torch

from bench.gpu import servers
from bench.gpu.comparison import ComparedRow, Comparison, Load, Plan, compared
from bench.gpu.engine_steps import SAMPLINGS, StepRow, measure_steps
from bench.rows import table
from bench.usual import Measured, UsualRow, measure_shape
from bench.usual import Plan as UsualPlan
from gateway.commands.bench import COUNT, fields, listed

_PARTS = ("other", "ours", "engine", "usual")
_DEFAULT = "other,ours,engine"


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--checkpoint", required=True, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--only", default=_DEFAULT, show_default=True, help=f"of {', '.join(_PARTS)}")
@click.option("--device", default="cuda:0", show_default=True)
@click.option("--dtype", default="bfloat16", show_default=True)
@click.option("--ours-arguments", multiple=True, help="for `tritongate up`; repeated: measured with each")
@click.option("--other", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="its script")
@click.option("--other-name", default="vllm", show_default=True)
@click.option("--other-url", default="http://127.0.0.1:8100", show_default=True)
@click.option("--other-model", default="glm", show_default=True)
@click.option("--other-arguments", multiple=True, help="for its script; repeated: measured with each")
@click.option("--other-python", default="python3", show_default=True, help="the interpreter that has it")
@listed("--conc", COUNT, default="1,8,32,64,128,256,512", show_default=True)
@click.option("--rounds", default=2, show_default=True, help="requests of each client, one after the other")
@click.option(
    "--repeats", default=3, show_default=True, help="measurements of each setting: the median counts"
)
@click.option("--ids", default=259, show_default=True, help="tokens of each prompt")
@click.option("--ids-below", default=60_000, show_default=True, help="the model's vocabulary, or less")
@click.option("--shared", default=0, show_default=True, help="of them the same in every prompt")
@click.option("--out", default=256, show_default=True, help="tokens of each answer")
@click.option("--spread", default=0.0, show_default=True, help="as of `tritongate bench`; so is the next")
@click.option("--turns", default=1, show_default=True, help="of each conversation")
@click.option("--also", callback=fields, default="{}", help="further fields of the requests")
@click.option(
    "--load",
    "loads",
    multiple=True,
    metavar="JSON",
    callback=lambda context, parameter, given: tuple(fields(context, parameter, each) for each in given),
    help="instead, with what differs: `name`, `conc`, `rounds`, `ids`, `shared`, `out`, `spread`, `turns`, "
    "`also`; repeated: each server is measured with all",
)
@click.option("--open-s", default=0.0, show_default=True, help="seconds of each open loop; 0: none")
@listed(
    "--rates",
    click.FloatRange(0, min_open=True),
    help="of the open loops; default: 50, 70, 90 % of the first's peak",
)
@listed("--batches", COUNT, default="1,32,128,256,512", show_default=True, help="of the engine alone")
@click.option(
    "--quantization", multiple=True, default=("none",), help="of the engine alone; repeated: with each"
)
@listed(
    "--masked", click.IntRange(0), default="0", show_default=True, help="of these, how many have a token mask"
)
@click.option(
    "--sampling",
    "samplings",
    multiple=True,
    type=click.Choice([*SAMPLINGS]),
    default=("plain",),
    show_default=True,
    help="of the engine alone; repeated: with each",
)
@listed("--usual-clients", COUNT, default="4,32", show_default=True, help="and sizes of padded batches")
@click.option("--usual-s", default=8.0, show_default=True, help="seconds of each of them: no batch after")
@click.option("--processes", default=8, show_default=True)
@click.option("--limit-s", default=460.0, show_default=True, help="begin nothing after so many seconds")
def main(
    *,
    folder: Path,
    checkpoint: Path,
    only: str,
    device: str,
    dtype: str,
    ours_arguments: tuple[str, ...],
    other: Path | None,
    other_name: str,
    other_url: str,
    other_model: str,
    other_arguments: tuple[str, ...],
    other_python: str,
    conc: tuple[int, ...],
    rounds: int,
    repeats: int,
    ids: int,
    ids_below: int,
    shared: int,
    out: int,
    spread: float,
    turns: int,
    also: dict[str, Any],
    loads: tuple[dict[str, Any], ...],
    open_s: float,
    rates: tuple[float, ...],
    batches: tuple[int, ...],
    quantization: tuple[str, ...],
    masked: tuple[int, ...],
    samplings: tuple[str, ...],
    usual_clients: tuple[int, ...],
    usual_s: float,
    processes: int,
    limit_s: float,
) -> None:
    """Measure, print, write."""
    parts = only.split(",")
    if unknown := set(parts) - set(_PARTS):
        raise click.UsageError(f"--only knows {', '.join(_PARTS)}, not {', '.join(sorted(unknown))}")
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    requests: dict[str, Any] = {"ids": ids, "ids_below": ids_below, "out": out, "shared": shared}
    requests |= {"spread": spread, "turns": turns, "also": also}
    usual_load = Load(clients=conc, rounds=rounds, requests=requests)
    plan = Plan(
        loads=tuple(_load(usual_load, each) for each in loads) or (usual_load,),
        repeats=repeats,
        open_s=open_s,
        rates=rates,
        processes=processes,
        ends=began + limit_s,
    )
    comparison = Comparison(plan)
    if "other" in parts and other is not None:
        for number, arguments in enumerate(other_arguments or ("",)):
            program = servers.Program(
                script=other,
                arguments=tuple(shlex.split(arguments)),
                url=other_url,
                model=other_model,
                python=other_python,
                log=folder / f"other-{number}.log",
            )
            comparison.run(f"{other_name} {arguments}".strip(), servers.other(program))
    where = ["--device", device, "--dtype", dtype]
    if "ours" in parts:
        for number, arguments in enumerate(ours_arguments or ("",)):
            flags = [*where, *shlex.split(arguments)]
            server = servers.ours(checkpoint, folder / f"ours-{number}.log", flags)
            comparison.run(f"ours {arguments}".strip(), server)
    steps: list[StepRow] = []
    if "engine" in parts:
        for each in quantization:
            form = None if each == "none" else each
            measured = measure_steps(
                checkpoint,
                batches,
                device=device,
                dtype=dtype,
                masked=masked,
                quantization=form,
                samplings=samplings,
            )
            steps += _steps_in_time(comparison, plan, measured)
    usual_rows: list[UsualRow] = []
    if "usual" in parts and plan.in_time:
        usual = UsualPlan(clients=usual_clients, requests=100, longest=256, rounds=1, limit_s=usual_s)
        flags = [*where, *shlex.split(next(iter(ours_arguments), ""))]
        server = servers.ours(checkpoint, folder / "usual.log", flags)
        usually = Measured()
        try:
            measure_shape(usually, checkpoint, server, usual, device=device, dtype=dtype)
        except (servers.ServerError, RuntimeError, ImportError) as error:
            comparison.note(f"the usual recipe: {error}")
        usual_rows = list(usually.rows(f"random weights {dtype}", usual))
    machine = f"{describe()}; {time.monotonic() - began:.0f} s in all"
    click.echo(report(machine, comparison, steps, usual_rows))
    document = {
        "machine": machine,
        "rows": comparison.rows,
        "steps": [asdict(step) for step in steps],
        "usual": [asdict(row) for row in usual_rows],
        "notes": comparison.notes,
    }
    (folder / "compare.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _load(usual: Load, differing: dict[str, Any]) -> Load:
    """Return a load that differs from the usual one in some of its options."""
    given = dict(differing)
    return Load(
        name=given.pop("name", ""),
        clients=tuple(given.pop("conc", usual.clients)),
        rounds=given.pop("rounds", usual.rounds),
        requests={**usual.requests, **given},
    )


def _steps_in_time(comparison: Comparison, plan: Plan, steps: Iterator[StepRow]) -> Iterator[StepRow]:
    for step in steps:
        yield step
        if not plan.in_time:
            comparison.note(f"the engine alone: nothing beyond batch {step.batch}: no time left")
            return


def report(machine: str, comparison: Comparison, steps: list[StepRow], usual: list[UsualRow]) -> str:
    """Return the report for people to read, as Markdown."""
    parts = [machine]
    if comparison.medians:
        parts.append(table(ComparedRow, compared(comparison.medians)))
    if steps:
        parts.append("The engine alone:\n\n" + table(StepRow, steps))
    if usual:
        parts.append("The usual recipe:\n\n" + table(UsualRow, usual))
    return "\n\n".join(["", *parts, *comparison.notes])


def describe() -> str:
    """Return the date, the hardware and the versions of the measurement."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else f"no GPU, {platform.machine()}"
    now = datetime.now(UTC)
    return f"{now:%Y-%m-%d %H:%M} UTC, {gpu}, Python {platform.python_version()}, torch {torch.__version__}"


if __name__ == "__main__":
    main()
