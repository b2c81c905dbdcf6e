"""Measures ONNX Runtime in a Python-backend entry against our engine: one Triton, equal weights, in turns.

`make bench-onnx` prepares the environment. A checkpoint of random weights is written and exported, and the
graph is checked against the original and quantised. Then one tritonserver has an entry for each kind of
weights, ours and ONNX Runtime's; every entry decodes greedily, one after the other, on the same cores.
The first answer has one token; what the others of a long one take is the decode step.
"""

import contextlib
import logging
import os
import queue
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np
import psutil
import tritonclient.grpc as triton

from bench.gpu import servers
from bench.onnx.checkpoints import SHAPES, TINY, write_checkpoint
from bench.onnx.comparison import Ask, OnnxRow, Prompts, measure
from bench.onnx.export import QUANTISED, exported, size
from bench.rows import table
from triton_models.embedded.installation import find_installation
from triton_models.entries import ModelEntry, write_entry
from wire.meta import decode_meta
from wire.request import Generation, encode_request

_ROOT = Path(__file__).parents[2]
_CODE = """import sys

sys.path.insert(0, {root!r})
from {module} import TritonPythonModel

__all__ = ["TritonPythonModel"]
"""
_CONFIG = """backend: "python"
input [
  {{ name: "ids" data_type: TYPE_INT64 dims: [ -1, -1 ] }},
  {{ name: "count" data_type: TYPE_INT32 dims: [ 1 ] }}
]
output [ {{ name: "answers" data_type: TYPE_INT64 dims: [ -1, -1 ] }} ]
parameters {{ key: "graph" value {{ string_value: "{graph}" }} }}
instance_group [ {{ count: 1 kind: KIND_CPU }} ]
"""


def write_entries(family: str, *, folder: Path, tiny: bool) -> list[str]:
    """Write a repository with all entries; return their names."""
    shape = (TINY if tiny else SHAPES)[family]
    checkpoint, graph = folder / "checkpoint", folder / "float32" / "model.onnx"
    model = write_checkpoint(family, shape, checkpoint)
    began = time.monotonic()
    error = exported(model, graph)
    click.echo(f"{family}: exported in {time.monotonic() - began:.0f} s; largest error {error:.1e}")
    graphs = {"float32": graph}
    for name, quantise in QUANTISED.items():
        graphs[name] = folder / name / "model.onnx"
        quantise(graph, graphs[name])
    names = []
    repository = folder / "repository"
    for name, path in graphs.items():
        click.echo(f"{family}: {name} takes {size(path) / 2**20:,.0f} MiB")
        names += [f"ours-{name}", f"onnx-{name}"]
        own = ModelEntry(
            name=names[-2],
            checkpoint=str(checkpoint),
            options={
                "quantization": None if name == "float32" else name,
                "draft_tokens": 0,
                "max_context": 256,
                "max_running": 8,
                "kv_memory_gib": 0.5,
            },
        )
        write_entry(repository, model=own)
        _write(repository / names[-2], "triton_models.serving.model")
        _write(repository / names[-1], "bench.onnx.entry")
        (repository / names[-1] / "config.pbtxt").write_text(_CONFIG.format(graph=path), encoding="utf-8")
    return names


def _write(entry: Path, module: str) -> None:
    """Write the entry's code: the stub does not look at PYTHONPATH."""
    (entry / "1").mkdir(parents=True, exist_ok=True)
    (entry / "1" / "model.py").write_text(_CODE.format(root=str(_ROOT), module=module), encoding="utf-8")


@contextlib.contextmanager
def served(folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    """Run tritonserver on the repository; yield its gRPC address and its process."""
    found = find_installation()
    found.link_backends(folder / "backends")
    port = servers.free_port()
    command = [str(found.server), f"--model-repository={folder / 'repository'}", "--exit-timeout-secs=5"]
    command += [f"--backend-directory={folder / 'backends'}", "--allow-http=false", "--allow-metrics=false"]
    command += ["--grpc-address=127.0.0.1", f"--grpc-port={port}"]
    address, log = f"127.0.0.1:{port}", folder / "triton.log"
    with (
        servers.process(command, found.environment(os.environ, temporary=folder), log) as process,
        triton.InferenceServerClient(address) as client,
    ):
        began = time.monotonic()
        while not _ready(client):
            if process.poll() is not None or time.monotonic() - began > servers.READY_S:
                end = log.read_text(encoding="utf-8", errors="replace")[-5000:]
                raise servers.ServerError(f"tritonserver is not ready:\n{end}")
            time.sleep(0.5)
        yield address, psutil.Process(process.pid)


def _ready(client: triton.InferenceServerClient) -> bool:
    try:
        return bool(client.is_server_ready())
    except triton.InferenceServerException:
        return False


def cpu_s(process: psutil.Process) -> float:
    """Return the CPU time of a process and those below it."""
    every = [process, *process.children(recursive=True)]
    return sum(sum(each.cpu_times()[:2]) for each in every)


def ask_onnx(client: triton.InferenceServerClient, entry: str) -> Ask:
    """Return what asks an entry of ONNX Runtime: one request with all prompts."""

    def ask(prompts: Prompts, count: int) -> Prompts:
        inputs = [
            triton.InferInput("ids", [len(prompts), len(prompts[0])], "INT64"),
            triton.InferInput("count", [1], "INT32"),
        ]
        inputs[0].set_data_from_numpy(np.array(prompts, dtype=np.int64))
        inputs[1].set_data_from_numpy(np.array([count], dtype=np.int32))
        answers: Prompts = client.infer(entry, inputs).as_numpy("answers").tolist()
        return answers

    return ask


def ask_ours(client: triton.InferenceServerClient, entry: str) -> Ask:
    """Return what asks an entry of our engine: a request for each prompt, all at once."""

    def ask(prompts: Prompts, count: int) -> Prompts:
        answers: dict[str, list[int]] = {}
        done: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

        def take(result: triton.InferResult, error: Exception | None) -> None:
            if error is not None:
                done.put(error)
                return
            response = result.get_response()
            meta = result.as_numpy("meta")
            if meta is not None and (ids := decode_meta(meta.flat[0]).token_ids):
                answers.setdefault(response.id, []).extend(ids)
            if response.parameters["triton_final_response"].bool_param:
                done.put(None)

        client.start_stream(take)
        try:
            for number, prompt in enumerate(prompts):
                _send(client, entry, str(number), prompt, count)
            for _ in prompts:
                if (error := done.get(timeout=600)) is not None:
                    raise error
        finally:
            client.stop_stream()
        return [answers[str(number)] for number in range(len(prompts))]

    return ask


def _send(
    client: triton.InferenceServerClient, entry: str, request_id: str, prompt: list[int], count: int
) -> None:
    sampling = encode_request(
        Generation(
            request_id=request_id,
            prompt_token_ids=prompt,
            raw=True,
            max_tokens=count,
            temperature=0.0,
            ignore_eos=True,
            return_token_ids=True,
        )
    )
    inputs = []
    for name, value in (("prompt", b""), ("history", b""), ("sampling", sampling)):
        inputs.append(triton.InferInput(name, [1, 1], "BYTES"))
        inputs[-1].set_data_from_numpy(np.array([[value]], dtype=np.object_))
    client.async_stream_infer(entry, inputs, request_id=request_id, enable_empty_final_response=True)


@click.command(help=__doc__)
@click.option("--model", "families", multiple=True, type=click.Choice([*SHAPES]), default=[*SHAPES])
@click.option("--tiny", is_flag=True, help="models of a few thousand weights: to try the recipe")
@click.option("--folder", type=click.Path(file_okay=False, path_type=Path), help="keep what is written there")
@click.option("--rounds", default=5, show_default=True, help="of which the median counts")
@click.option("--new-tokens", default=33, show_default=True)
def main(families: tuple[str, ...], *, tiny: bool, folder: Path | None, rounds: int, new_tokens: int) -> None:
    """Export, serve, measure, print."""
    logging.disable(logging.INFO)  # the exporter and the quantisers have a line for each node
    for family in families:
        with tempfile.TemporaryDirectory(prefix="onnx-") as temporary:
            where = (folder or Path(temporary)).resolve() / family
            names = write_entries(family, folder=where, tiny=tiny)
            with served(where) as (address, process), triton.InferenceServerClient(address) as client:
                asks = {
                    name: (ask_ours if name.startswith("ours") else ask_onnx)(client, name) for name in names
                }
                rows = measure(
                    family, asks, lambda: cpu_s(process), batches=(1, 8), rounds=rounds, new_tokens=new_tokens
                )
                click.echo(table(OnnxRow, rows))


if __name__ == "__main__":
    sys.exit(main())
