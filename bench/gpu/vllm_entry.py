"""Compares vLLM in Triton's Python backend, behind the gateway, with vLLM's own server on the same GPU.

Both get the same model, engine arguments and load, one after the other; prompts are words, since the vLLM
backend's contract takes text only. Prints one table, then one line for each number of clients: throughput
relative to vLLM's own server. Fails if a request failed or the two counted different tokens. Rows and the
servers' output go to FOLDER.
"""

import contextlib
import json
import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

import click

from bench.gpu import servers
from bench.gpu.comparison import ComparedRow, Comparison, Load, Plan, compared
from bench.rows import table
from gateway.commands.bench import COUNT, listed
from gateway.commands.load_rows import LoadRow
from triton_models.embedded.installation import find_installation

SERVE, ENTRY = "vllm serve", "vllm in Triton, gateway"
_WANTED = 0.95
_CODE = """import sys

sys.path[:0] = {packages!r}
from triton_models.vllm.model import TritonPythonModel

__all__ = ["TritonPythonModel"]
"""
_CONFIG = 'backend: "python"\ninstance_group [ { count: 1 kind: KIND_MODEL } ]\n'
_ENVIRONMENT = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "VLLM_CACHE_ROOT": "/tmp/vllm_cache",  # noqa: S108 - the serve script's: what one compiled, both use
    "TRITON_CACHE_DIR": "/tmp/vllm_cache/triton",  # noqa: S108 - as above
}
_ARGUMENTS = {
    "dtype": "bfloat16",
    "load_format": "dummy",
    "max_model_len": 8192,
    "enable_prefix_caching": False,
    "gpu_memory_utilization": 0.9,
    "generation_config": "vllm",
    "max_num_seqs": 256,
}
"""What the serve script passes, too."""


@contextlib.contextmanager
def _entry(
    folder: Path, arguments: dict[str, object], *, stub: Path, packages: str, workers: int
) -> Iterator[servers.Server]:
    """Run tritonserver on an entry with these engine arguments, and a gateway in front of it."""
    began = time.monotonic()
    version = folder / "repository" / "glm" / "1"
    version.mkdir(parents=True, exist_ok=True)
    (version / "model.json").write_text(json.dumps(arguments), encoding="utf-8")
    tree = str(Path(__file__).parents[2])
    # Both: the stub of tritonserver 2.51 does not look at PYTHONPATH, the processes that vLLM starts do.
    code = _CODE.format(packages=[*filter(None, (packages, tree))])
    (version / "model.py").write_text(code, encoding="utf-8")
    (version.parent / "config.pbtxt").write_text(_CONFIG, encoding="utf-8")
    found = find_installation()
    if not (folder / "backends").exists():
        found.link_backends(folder / "backends")
    environment = found.environment(os.environ | _ENVIRONMENT, temporary=folder)
    environment["PATH"] = f"{stub}:{environment['PATH']}"
    environment["PYTHONPATH"] = ":".join(filter(None, (packages, tree)))
    grpc, port = servers.free_port(), servers.free_port()
    triton = [str(found.server), f"--model-repository={folder / 'repository'}", "--exit-timeout-secs=5"]
    triton += [f"--backend-directory={folder / 'backends'}", "--allow-http=false", "--allow-metrics=false"]
    triton += ["--grpc-address=127.0.0.1", f"--grpc-port={grpc}"]
    gateway = [str(Path(sys.executable).with_name("tritongate")), "serve", "--upstreams", f"127.0.0.1:{grpc}"]
    gateway += ["--port", str(port), "--workers", str(workers), "--log-level", "error"]
    url = f"http://127.0.0.1:{port}"
    with contextlib.ExitStack() as running:
        processes = [
            running.enter_context(servers.process(triton, environment, folder / "triton.log")),
            running.enter_context(servers.process(gateway, dict(os.environ), folder / "gateway.log")),
        ]
        while not servers.answers(url + "/health/ready"):
            ended = any(process.poll() is not None for process in processes)
            if ended or time.monotonic() - began > servers.READY_S:
                log = (folder / "triton.log").read_text(encoding="utf-8", errors="replace")
                raise servers.ServerError(f"the entry is not ready:\n{log[-5000:]}")
            time.sleep(0.2)
        yield servers.Server(url=url, model="glm", started_s=time.monotonic() - began)


def faults(measured: Mapping[str, Mapping[str, LoadRow]], clients: int) -> list[str]:
    """Return what is wrong with a comparison of both servers, so that its figures count for nothing."""
    rows = [[*measured.get(name, {}).values()] for name in (SERVE, ENTRY)]
    if any(len(each) != clients for each in rows):
        return ["not everything was measured"]
    found = [f"{row.failed} requests failed: {row.error}" for each in rows for row in each if row.failed]
    for own, other in zip(*rows, strict=True):
        if (own.prompt_tokens, own.output_tokens) != (other.prompt_tokens, other.output_tokens):
            counts = f"{own.prompt_tokens:g} + {own.output_tokens:g}, {other.prompt_tokens:g} + "
            found.append(f"{own.clients} clients: different tokens: {counts}{other.output_tokens:g}")
    return found


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--serve", required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--serve-arguments", default="--max-num-seqs 256", show_default=True)
@click.option("--serve-python", default="python3", show_default=True)
@click.option("--serve-url", default="http://127.0.0.1:8100", show_default=True)
@click.option("--model", default="/tmp/glm_model_chatglm", show_default=True, help="that the script makes")  # noqa: S108
@click.option("--arguments", default="{}", show_default=True, help="JSON: engine arguments of the entry")
@click.option("--packages", default="", help="folder with vLLM, for the stub and its processes")
@click.option(
    "--stub", type=click.Path(path_type=Path), help="folder of the stub's python3; default: this one's"
)
@listed("--conc", COUNT, default="1,8,32,64,128", show_default=True)
@click.option("--rounds", default=2, show_default=True, help="requests of each client, one after the other")
@click.option("--repeats", default=3, show_default=True, help="the median counts")
@click.option("--words", default=259, show_default=True, help="of each prompt")
@click.option("--out", default=256, show_default=True, help="tokens of each answer")
@click.option("--workers", default=4, show_default=True, help="of the gateway")
@click.option("--processes", default=8, show_default=True, help="that put on the load")
@click.option("--limit-s", default=420.0, show_default=True, help="begin nothing after so many seconds")
def main(
    *,
    folder: Path,
    serve: Path,
    serve_arguments: str,
    serve_python: str,
    serve_url: str,
    model: str,
    arguments: str,
    packages: str,
    stub: Path | None,
    conc: tuple[int, ...],
    rounds: int,
    repeats: int,
    words: int,
    out: int,
    workers: int,
    processes: int,
    limit_s: float,
) -> None:
    """Measure, print, write."""
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    plan = Plan(
        loads=(Load(clients=conc, rounds=rounds, requests={"words": words, "out": out}),),
        repeats=repeats,
        processes=processes,
        ends=began + limit_s,
    )
    comparison = Comparison(plan)
    program = servers.Program(
        script=serve.resolve(),
        arguments=tuple(shlex.split(serve_arguments)),
        url=serve_url,
        model="glm",
        python=serve_python,
        log=folder / "serve.log",
    )
    comparison.run(SERVE, servers.other(program))
    engine = {"model": model} | _ARGUMENTS | json.loads(arguments)
    where = stub or Path(sys.executable).parent
    comparison.run(ENTRY, _entry(folder, engine, stub=where, packages=packages, workers=workers))
    click.echo(table(ComparedRow, compared(comparison.medians)))
    wrong = faults(comparison.medians, len(conc))
    if not wrong:
        for own, other in zip(*map(dict.values, comparison.medians.values()), strict=True):
            ratio = other.tokens_per_second / own.tokens_per_second
            verdict = "" if ratio >= _WANTED else f", below {_WANTED}"
            first = f"TTFT p50 {own.ttft_p50:.1f} -> {other.ttft_p50:.1f} ms"
            click.echo(f"{own.clients} clients: {ratio:.3f}x{verdict}; {first}")
    document = {"rows": comparison.rows, "notes": comparison.notes, "wrong": wrong}
    document["medians"] = {
        name: list(map(asdict, rows.values())) for name, rows in comparison.medians.items()
    }
    (folder / "vllm_entry.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    click.echo(f"{time.monotonic() - began:.0f} s in all; {'; '.join(wrong) or 'every answer as it must be'}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
