"""Writes the data files for the warm-up of an entry `M-stream`: one short generation.

Triton runs the warm-up before it reports the model as READY, so a ready model is warm. `python -m
triton_models.warmup ENTRY_DIR` writes the files into an existing entry.
"""

from pathlib import Path

import click

from wire import history, names, sampling, strings

FOLDER = "warmup"
"""Where Triton looks for a warm-up's `input_data_file`, inside the entry."""

_PROMPT = "你好"
_GENERATION = sampling.Generation(request_id="warmup", max_tokens=2, temperature=0.0, ignore_eos=True)
# Two tokens: one from the prefill, one from a decode step. Greedy, and no stop id ends it early.


def stream_tensors() -> dict[str, bytes]:
    """Return the raw contents of each input of a stream entry's warm-up request (BYTES [1])."""
    values = {
        names.PROMPT: _PROMPT.encode(),
        names.HISTORY: history.encode_history([]),
        names.SAMPLING: sampling.encode_sampling(_GENERATION),
    }
    return {name: strings.pack_strings([value]) for name, value in values.items()}


def write_warmup(entry: Path, tensors: dict[str, bytes]) -> None:
    """Write the data files into the repository entry `entry`: one for each input, named after it.

    Raises:
        OSError: `entry` is not a folder that can be written.
    """
    folder = entry / FOLDER
    folder.mkdir(exist_ok=True)
    for name, raw in tensors.items():
        (folder / name).write_bytes(raw)


@click.command()
@click.argument("entry", type=click.Path(exists=True, file_okay=False, path_type=Path))
def main(entry: Path) -> None:
    """Write the warm-up data files of the repository entry ENTRY, an M-stream."""
    write_warmup(entry, stream_tensors())


if __name__ == "__main__":
    main()
