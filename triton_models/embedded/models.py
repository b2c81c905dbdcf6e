"""What every Triton of ours is started with: its models, their repository entries, and its privacy.

A program that starts one must be able to report that parts of the engine are not installed: so what writes
entries is imported only when it is needed.
"""

import os
import re
from pathlib import Path
from typing import Final

from triton_models.directory import check_checkpoint
from triton_models.embedded.errors import SetupError
from triton_models.errors import CheckpointError
from triton_models.options import Options

BUILT_IN_NAME = "chatglm3-demo"
BUILT_IN_CHECKPOINT = Path(__file__).parent.parent / "checkpoints" / BUILT_IN_NAME
BUILT_IN_NOTICE = (
    f"{BUILT_IN_NAME} is a demonstration that knows a few pages by heart. "
    "Serve a model of yours with --model DIR"
)

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)
"""Of a model on a hub: owner/name."""
_CACHED = re.compile(r"models--.+?--(?P<name>.+)/snapshots/[0-9a-f]{40}", re.ASCII)
"""A folder of Hugging Face's cache."""
_POINTER, _LONGEST_POINTER = b"version https://git-lfs", 1024
"""How such a file begins, and how long it is, in bytes, by Git LFS's specification."""

_RESTRICTED = "model-repository,shared-memory,statistics,trace,logging"
"""The protocols that need the key: the first loads code, the second maps other processes' memory. Health,
metadata, configurations and inference need none."""

NO_CONTEXT: Final = ("--min-supported-compute-capability=99", "--pinned-memory-pool-byte-size=0")
"""tritonserver's arguments where every entry is ours, and so names no GPU to it. Without them it makes a CUDA
context (582 MiB on an H200), in which nothing is computed: for a memory pool and peer access on each GPU that
it supports, and for a pool of pinned host memory. With them it refuses entries of KIND_GPU. Its metrics of
GPUs stay: they come from DCGM, of every GPU that CUDA shows."""


def private_arguments(key: str) -> list[str]:
    """Return tritonserver's arguments that keep it to those who know `key` (KEY=VALUE), and off HTTP.

    tritonserver (2.51) takes the key from nowhere else, so whoever can list the machine's processes can read
    it: it is a second fence behind the network's.
    """
    return ["--allow-http=false", f"--grpc-restricted-protocol={_RESTRICTED}:{key}"]


def read_model_argument(argument: str) -> tuple[str, Path]:
    """Split `[NAME=]DIR`; without a name, the model is named after the folder, or after the link to it.

    A folder of Hugging Face's cache, named after a commit, has the name of its repository.

    Raises:
        SetupError: there is no such directory, or no config.json in it.
    """
    before, equals, after = argument.partition("=")
    named = equals and "/" not in before
    text = after if named else argument
    given = Path(text).expanduser().absolute()
    path = given.resolve()
    if not path.is_dir():
        if _HUB_NAME.fullmatch(text):
            folder = text.partition("/")[2]
            raise SetupError(
                f"--model {argument}: not fetched; download it first: "
                f"hf download {text} --local-dir {folder}, then --model {folder}"
            )
        raise SetupError(f"--model {argument}: {path} is not a directory")
    if not (path / "config.json").is_file():
        if (path / "params.json").is_file() or any(path.glob("consolidated.*")):
            raise SetupError(
                f"--model {argument}: {path} is in Meta's own layout (params.json, consolidated.*); fetch "
                "the same model in transformers' layout, with config.json, tokenizer.json and safetensors"
            )
        raise SetupError(f"--model {argument}: {path} has no config.json, so it is no checkpoint")
    if pointers := sorted(each.name for each in path.iterdir() if _is_pointer(each)):
        raise SetupError(
            f"--model {argument}: {', '.join(pointers)}: pointers of Git LFS instead of the files; "
            f"fetch them first: git -C {path} lfs pull"
        )
    return before if named else _name_of(Path(os.path.normpath(given))), path


def _name_of(folder: Path) -> str:
    cached = _CACHED.fullmatch("/".join(folder.parts[-3:]))
    return cached["name"] if cached else folder.name


def _is_pointer(path: Path) -> bool:
    """Whether Git LFS has yet to put the file's contents into its place."""
    if not path.is_file() or path.stat().st_size > _LONGEST_POINTER:
        return False
    with path.open("rb") as file:
        return file.read(len(_POINTER)) == _POINTER


def write_models(repository: Path, arguments: tuple[str, ...], *, device: str, options: Options) -> list[str]:
    """Write the entries of the models in `arguments`, or of the built-in model if there are none.

    All models have the same device (`cpu` or `cuda:N`) and the same options; of these, those that are None
    are the engine's to choose.

    Returns:
        The models' names, which are also their entries'.

    Raises:
        SetupError: an argument is not a checkpoint that can be served, or a name is invalid or occurs twice.
    """
    from triton_models.entries import ModelEntry, write_entry  # noqa: PLC0415 - see the module's docstring

    any_type = options.get("engine") == "transformers"
    written: list[str] = []
    for argument in arguments or [str(BUILT_IN_CHECKPOINT)]:
        name, path = read_model_argument(argument)
        if name in written:
            raise SetupError(f"two models are named {name!r}: write --model NAME=DIR to rename one")
        try:
            check_checkpoint(path, options.get("format"), any_type=any_type)
            entry = ModelEntry(name=name, checkpoint=str(path), device=device, options=options)
        except (CheckpointError, ValueError) as error:
            raise SetupError(f"--model {argument}: {error}") from error
        write_entry(repository, model=entry)
        written.append(name)
    return written
