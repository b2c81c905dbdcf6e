"""Writes the data files of an entry's warm-up: one short generation.

Triton runs it before it reports the model ready, so that READY means warm: of `M-stream`, the engine; of `M`,
the whole path through `M-stream`. `python -m triton_models.warmup ENTRY_DIR` writes them into an entry that
is there already.
"""

import struct
from pathlib import Path

import click

from triton_models.signatures import INT16, Contract, choose_contract, field_signature
from wire import history, names, sampling, strings

FOLDER = "warmup"
"""Where Triton looks for a warm-up's `input_data_file`, inside the entry."""

_PROMPT = "你好"
_GENERATION = sampling.Generation(request_id="warmup", max_tokens=2, temperature=0.0, ignore_eos=True)
# Two tokens: one from the prefill, one from a decode step; greedy, and never ended early by a stop id.

_FIELD_VALUES = {
    names.PROMPT: _PROMPT,
    names.HISTORY: "",
    names.TEMPERATURE: "0",
    # Prompt and answer together. The longer prompt, ChatGLM2's, has 17 tokens of the published vocabulary.
    names.MAX_TOKEN: "48",
    names.HISTORY_LEN: "0",
}


def stream_tensors() -> dict[str, bytes]:
    """Return the raw contents of each input of a stream entry's warm-up request (BYTES [1])."""
    values = {
        names.PROMPT: _PROMPT.encode(),
        names.HISTORY: history.encode_history([]),
        names.SAMPLING: sampling.encode_sampling(_GENERATION),
    }
    return {name: strings.pack_strings([value]) for name, value in values.items()}


def field_tensors(contract: Contract) -> dict[str, bytes]:
    """Return the raw contents of each input of an `M`'s warm-up request; one of any size is empty."""
    tensors = {}
    for tensor in field_signature(contract).inputs:
        value = _FIELD_VALUES[tensor.name]
        if tensor.optional:
            continue
        if tensor.data_type == INT16:
            tensors[tensor.name] = struct.pack("<h", int(value))
        else:
            tensors[tensor.name] = strings.pack_strings([value.encode()] if tensor.size == 1 else [])
    return tensors


def write_warmup(entry: Path, tensors: dict[str, bytes]) -> None:
    """Write the data files, one for each input and named as it, into the repository entry `entry`.

    Raises:
        OSError: `entry` is not a folder that can be written.
    """
    folder = entry / FOLDER
    folder.mkdir(exist_ok=True)
    for name, raw in tensors.items():
        (folder / name).write_bytes(raw)


@click.command()
@click.argument("entry", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--contract",
    type=click.Choice([str(each) for each in Contract]),
    help="Of an entry M; without it ENTRY is an M-stream if its name says so, and speaks 'batched' if not.",
)
def main(entry: Path, contract: str | None) -> None:
    """Write the warm-up data files of the repository entry ENTRY."""
    if contract is None and entry.resolve().name.endswith(names.STREAM_SUFFIX):
        write_warmup(entry, stream_tensors())
    else:
        write_warmup(entry, field_tensors(choose_contract(contract, None)))


if __name__ == "__main__":
    main()
