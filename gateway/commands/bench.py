"""`tritongate bench`: puts load on any OpenAI endpoint, and shows how fast it answers."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, Final, TextIO, TypeVar
from urllib.parse import quote

import click

from gateway.commands import INTERRUPTED
from gateway.commands.chat import models_at
from gateway.commands.endpoint import DEFAULT_URL, ClientError, fetch
from gateway.commands.load import TEXT_IDS, LoadPool, Workload, closed_loop, open_loop
from gateway.commands.load_rows import LoadRow
from gateway.commands.progress import Progress

F = TypeVar("F", bound=Callable[..., Any])

_BAR: Final = 40
"""Characters of the longest bar."""
COUNT: Final = click.IntRange(1)
"""The type of each of so many things."""
_MOST_PROCESSES: Final = 8


def listed(flag: str, each: click.IntRange | click.FloatRange, **options: Any) -> Callable[[F], F]:
    """Add an option that takes numbers separated by commas, each of them one of `each`; unset: ()."""

    def read(context: click.Context, parameter: click.Parameter, given: str | None) -> tuple[Any, ...]:
        texts = () if given is None else given.strip(",").split(",")
        return tuple(each(text, parameter, context) for text in texts)

    return click.option(flag, callback=read, metavar="N,N,...", **options)


def fields(_context: click.Context, _parameter: click.Parameter, given: str) -> dict[str, Any]:
    """Read an object in JSON."""
    found: object = None
    with suppress(ValueError, RecursionError):
        found = json.loads(given)
    if not isinstance(found, dict):
        raise click.BadParameter(f"{given!r} is not an object in JSON")
    return found


@dataclass(frozen=True, slots=True)
class Measured:
    """A row, and what was asked for."""

    prompt: int
    """Words or ids."""
    out: int
    row: LoadRow
    stream: bool = True
    """Of what was not streamed, nothing is known but when all of it was there."""

    @property
    def load(self) -> str:
        """What a person calls it."""
        row = self.row
        return f"{row.rate:g}/s" if row.rate else f"{row.clients} client{'s' * (row.clients > 1)}"

    def cells(self) -> dict[str, str]:
        """Return the columns of the table; times are milliseconds."""
        row = self.row
        return {
            "load": self.load,
            "prompt": f"{row.prompt_tokens:.0f}",
            "answer": f"{row.output_tokens:.0f}",
            "requests": str(row.requests),
            "failed": str(row.failed),
            "tok/s": f"{row.tokens_per_second:,.0f}",
            "req/s": f"{(row.requests - row.failed) / row.seconds:,.1f}",
            "TTFT p50" if self.stream else "time p50": f"{row.ttft_p50:,.0f}",
            "p99": f"{row.ttft_p99:,.0f}",
        } | (
            {"TPOT p50": f"{row.per_token_p50:,.1f}", " p99": f"{row.per_token_p99:,.1f}"}
            if self.stream
            else {}
        )


def table(measured: Sequence[Measured]) -> str:
    """Return the rows as text for a terminal."""
    rows = [each.cells() for each in measured]
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}
    lines = [{name: name.strip() for name in widths}, *rows]
    return "\n".join("  ".join(f"{line[name]:>{width}}" for name, width in widths.items()) for line in lines)


def plot(measured: Sequence[Measured]) -> str:
    """Return bars of the rate and of the time to what came first: to its median solid, to its p99 light."""
    names = [f"{each.load}, {each.prompt} in, {each.out} out" for each in measured]
    wide = max(map(len, names))
    rates = [each.row.tokens_per_second for each in measured]
    waits = [(each.row.ttft_p50, each.row.ttft_p99) for each in measured]
    lines = ["output tokens a second"]
    for name, rate in zip(names, rates, strict=True):
        lines.append(f"  {name:{wide}}  {'█' * _length(rate, max(rates))} {rate:,.0f}")
    first = "first token" if all(each.stream for each in measured) else "whole answer"
    lines += ["", f"time to the {first}, ms (█ p50, ░ p99)"]
    longest = max(late for _, late in waits)
    for name, (half, late) in zip(names, waits, strict=True):
        solid, total = _length(half, longest), _length(late, longest)
        lines.append(f"  {name:{wide}}  {'█' * solid}{'░' * (total - solid)} {half:,.0f}, {late:,.0f}")
    return "\n".join(lines)


def _length(value: float, most: float) -> int:
    return round(_BAR * value / most) if most else 0


def ids_at(url: str, key: str | None, model: str) -> int:
    """Return the number of ids that prompts are drawn from: of `TEXT_IDS`, those that the model has.

    What does not tell its vocabulary is taken to have them all.
    """
    try:
        told = fetch(url, key, f"/tokenizer_info?model={quote(model, safe='')}").get("vocab_size")
    except ClientError:
        told = None
    return min(told, TEXT_IDS.stop) if isinstance(told, int) and told > 0 else TEXT_IDS.stop


def workloads(kind: str, prompts: Sequence[int], outs: Sequence[int], **same: Any) -> Iterator[Workload]:
    """Yield the requests of each pair of lengths."""
    for prompt, out in product(prompts, outs):
        size: dict[str, Any] = {"ids": prompt} if kind == "ids" else {"words": prompt, "chat": kind == "chat"}
        yield Workload(out=out, **size, **same)


def measure(
    pool: LoadPool, work: Sequence[Workload], *, loads: Sequence[int], rates: Sequence[float], **ends: Any
) -> Iterator[Measured]:
    """Yield a row for each workload under each load; in front of each workload, one request is not counted.

    Args:
        pool: sends the requests.
        work: the requests.
        loads: numbers of clients of a closed loop.
        rates: requests a second of an open loop; where there are some, there is no closed loop.
        ends: `rounds`, the requests of each client, and `seconds`, the length of an open loop.
    """
    for each in work:
        size = each.words if each.ids is None else each.ids
        name = f"{size} in, {each.out} out"
        closed_loop(pool, each, f"{name}, warm-up", clients=1, requests=1)
        for rate in rates:
            row = open_loop(pool, each, f"{name}, rate {rate}", rate=rate, seconds=ends["seconds"])
            yield Measured(size or 0, each.out, row, stream=each.stream)
        for clients in () if rates else loads:
            count = clients * ends["rounds"]
            row = closed_loop(pool, each, f"{name}, clients {clients}", clients=clients, requests=count)
            yield Measured(size or 0, each.out, row, stream=each.stream)


@click.command(short_help="Measure an OpenAI endpoint under load.")
@click.argument("url", default=DEFAULT_URL)
@click.option("--model", help="whom to ask  [default: the first that is listed]")
@click.option("--key", envvar="TRITONGATE_KEY", show_envvar=True, help="a key of the endpoint")
@click.option(
    "--kind",
    type=click.Choice(["chat", "text", "ids"]),
    default="chat",
    show_default=True,
    help="prompts of random words, as a chat or a completion, or of random token ids",
)
@listed("--prompt", COUNT, show_default=True, default="64", help="lengths, in words or ids")
@listed("--out", COUNT, show_default=True, default="128", help="tokens of each answer")
@click.option(
    "--spread",
    type=click.FloatRange(0),
    default=0.0,
    show_default=True,
    help="of the lengths: 1, as of mixed traffic; 0: none",
)
@click.option(
    "--shared",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="ids at the beginning common to all prompts",
)
@listed("--clients", COUNT, show_default=True, default="1,8,32", help="of a closed loop")
@click.option(
    "--rounds", type=click.IntRange(1), default=2, show_default=True, help="requests of each client"
)
@listed("--rate", click.FloatRange(0, 1e6, min_open=True), help="requests a second of an open loop, instead")
@click.option(
    "--seconds",
    type=click.FloatRange(0, min_open=True),
    default=20.0,
    show_default=True,
    help="of an open loop",
)
@click.option(
    "--turns",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="of each conversation: later ones repeat what was said",
)
@click.option("--temperature", default=1.0, show_default=True)
@click.option(
    "--also", callback=fields, metavar="JSON", default="{}", help="further fields of the requests, as JSON"
)
@click.option("--stream/--no-stream", default=True, show_default=True)
@click.option(
    "--ignore-eos/--no-ignore-eos",
    default=True,
    show_default=True,
    help="have answers of exactly that length, where the endpoint can be told so",
)
@click.option("--processes", type=click.IntRange(1), help="that send  [default: one a CPU, at most 8]")
@click.option("--json", "file", type=click.File("a", encoding="utf-8"), help="append rows, as lines")
def bench(
    *,
    url: str,
    model: str | None,
    key: str | None,
    kind: str,
    prompt: tuple[int, ...],
    out: tuple[int, ...],
    clients: tuple[int, ...],
    rounds: int,
    rate: tuple[float, ...],
    seconds: float,
    processes: int | None,
    file: TextIO | None,
    **same: Any,
) -> None:
    """Measure the OpenAI endpoint at URL under load; status 1 if a request failed.

    In a closed loop each client sends its next request once it has an answer; in an open loop requests come
    at random moments, however many are being answered. Each pair of lengths is measured under each load.
    """
    model = model or models_at(url, key)[0]
    if kind == "ids":
        same["ids_below"] = ids_at(url, key, model)
    work = list(workloads(kind, prompt, out, url=url, model=model, key=key, **same))
    total = len(work) * len(rate or clients)
    measured: list[Measured] = []
    status, failure = 0, ""
    with Progress() as progress:

        def show(answered: int) -> None:
            progress.show(f"row {min(len(measured) + 1, total)} of {total}: {answered} answers")

        try:
            count = processes or min(_MOST_PROCESSES, os.cpu_count() or 1)
            with LoadPool(count, show) as pool:
                rows = measure(pool, work, loads=clients, rates=rate, rounds=rounds, seconds=seconds)
                for each in rows:
                    measured.append(each)
                    if file is not None:
                        file.write(json.dumps(asdict(each.row)) + "\n")
                        file.flush()
        except KeyboardInterrupt:
            status = INTERRUPTED
        except (RuntimeError, ValueError) as error:
            failure = str(error)
    if measured:
        _show(f"{model} at {url}", measured)
    if failure:
        raise ClientError(failure)
    sys.exit(status or int(any(each.row.failed for each in measured)))


def _show(whom: str, measured: Sequence[Measured]) -> None:
    click.echo(f"{whom}; times in ms\n\n{table(measured)}\n\n{plot(measured)}")
    for each in measured:
        if each.row.failed:
            click.echo(f"{each.load}: the first of {each.row.failed} failures: {each.row.error}")
