"""Coverage-guided fuzzing of everything that reads foreign bytes: `python -m bench.fuzz`.

Each reader gets `--executions` inputs, in a process of its own. An error that it does not promise, an input
that takes longer than 20 s, and a process that grows are failures. Prints what was executed and how many of
the inputs took new paths; exits with 1 if a reader failed, and says with which input.
"""

import contextlib
import importlib
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import psutil

_INSTRUMENTED = ("gateway.chat", "gateway.commands", "gateway.kserve", "gateway.triton", "wire")
_LONGEST_INPUT = 4096
_HANG_S = 20
_MEMORY_MIB = 2048
_MOST_GROWTH_MIB = 48
"""After a fifth of the executions, of which the fuzzer's own corpus takes a part."""
_SHARE = 5
_CHATTER = ("INFO:", "WARNING:", "#", "stat::", "memory:", "0x", "Base64:")
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Report:
    """What came of one reader."""

    executions: int
    before: int
    """Edges that the seeds reach."""
    after: int
    new_inputs: int
    """Those that took a new path."""
    growth_mib: int
    seconds: float


def _fuzz(name: str, executions: int, corpus: str) -> None:
    """Fuzz one reader in this process, which ends with it."""
    atheris: Any = importlib.import_module("atheris")  # has no types
    with atheris.instrument_imports(include=list(_INSTRUMENTED)):
        reader = importlib.import_module("bench.fuzz_readers").READERS[name]
    for number, seed in enumerate(reader.seeds):
        Path(corpus, str(number)).write_bytes(seed)
    process, done = psutil.Process(), 0

    def test(data: bytes) -> None:
        nonlocal done
        with contextlib.suppress(*reader.refusals):
            reader.read(data)
        done += 1
        if done % (executions // _SHARE) == 0:
            print(f"memory: {process.memory_info().rss // _MIB}", file=sys.stderr, flush=True)

    flags = [f"-runs={executions}", f"-max_len={_LONGEST_INPUT}", f"-timeout={_HANG_S}", "-seed=1"]
    flags += [f"-rss_limit_mb={_MEMORY_MIB}", "-print_final_stats=1", f"-artifact_prefix={corpus}/failed-"]
    atheris.Setup([sys.argv[0], *flags, corpus], test)
    atheris.Fuzz()


def fuzz(name: str, executions: int) -> Report:
    """Fuzz one reader.

    Raises:
        click.ClickException: it failed.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as corpus:
        command = [sys.executable, "-m", "bench.fuzz", "--executions", str(executions)]
        done = subprocess.run(
            [*command, "--corpus", corpus, name],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        said = done.stdout + done.stderr
        if done.returncode:
            inputs = [repr(each.read_bytes()) for each in Path(corpus).glob("failed-*")]
            lines = [line for line in said.splitlines() if not line.startswith(_CHATTER)]
            raise click.ClickException("\n".join([*lines, *inputs])[-5000:])

    def number(pattern: str) -> int:
        return int(re.findall(pattern, said)[-1])

    memory = [int(each) for each in re.findall(r"memory: (\d+)", said)]
    return Report(
        executions=number(r"stat::number_of_executed_units:\s+(\d+)"),
        before=number(r"INITED +cov: (\d+)"),
        after=number(r"DONE +cov: (\d+)"),
        new_inputs=number(r"stat::new_units_added:\s+(\d+)"),
        growth_mib=memory[-1] - memory[0],
        seconds=time.monotonic() - began,
    )


@click.command()
@click.option("--executions", default=100_000, show_default=True, help="of each reader")
@click.option("--corpus", hidden=True, type=click.Path(file_okay=False))
@click.argument("names", nargs=-1)
def main(executions: int, corpus: str | None, names: tuple[str, ...]) -> None:
    """Fuzz the readers with these NAMES; all of them without any."""
    if corpus is not None:
        _fuzz(names[0], executions, corpus)
        return
    readers = importlib.import_module("bench.fuzz_readers").READERS
    click.echo(f"{'':18}  executions    edges  new paths  growth, MiB  seconds")
    failed = False
    for name in names or readers:
        try:
            report = fuzz(name, executions)
        except click.ClickException as error:
            failed = True
            click.echo(f"{name:18}  FAILED: {error.message}")
            continue
        failed |= report.growth_mib > _MOST_GROWTH_MIB
        click.echo(
            f"{name:18}  {report.executions:10}  {report.before:3} > {report.after:3}  "
            f"{report.new_inputs:9}  {report.growth_mib:11}  {report.seconds:7.0f}"
        )
    sys.exit(failed)


if __name__ == "__main__":
    main()
