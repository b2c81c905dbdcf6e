"""`tritongate build`: a model repository that needs nothing but a stock Triton, and a Dockerfile for it.

    OUT/Dockerfile                          NVIDIA's Triton with the repository
    OUT/repository/NAME/config.pbtxt        the entry (entries.py), with 1/model.py and warmup/
    OUT/repository/NAME/checkpoint          the checkpoint's files, or a link to its directory
    OUT/repository/NAME/environment.tar.gz  the engine's Python packages (environment.py)

The repository may be moved: whatever the entry names is in its own folder.
"""

import re
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import click

from triton_models.directory import check_checkpoint, find_shards
from triton_models.embedded.errors import SetupError
from triton_models.embedded.models import NO_CONTEXT, private_arguments, read_model_argument
from triton_models.entries import ModelEntry, write_entry
from triton_models.environment import SUFFIX, pack
from triton_models.errors import CheckpointError, EnvironmentPackError
from wire.flags import model_flags

TRITON = "26.07-py3"
"""The tag of NVIDIA's image, as in deploy/docker/triton.Dockerfile."""
_IMAGES_PYTHON = "python3.12"
"""Of NVIDIA's images since 24.11."""
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_ARCHIVE = f"environment{SUFFIX}"
_WEIGHTS = {".safetensors", ".bin", ".pth", ".pt", ".gguf"}
"""What files of weights end with."""

_DOCKERFILE = """\
# Written by `tritongate build`: NVIDIA's Triton, the model {name}, and packages for the image's Python.
# Private, as every Triton behind the gateway: it has no HTTP server, and wants a key for everything but
# health, metadata, configurations and inference: KEY=VALUE, which is the gateway's setting repository_key.
# docker run{gpus} --shm-size 1g --env TRITONGATE_REPOSITORY_KEY{volume} IMAGE
ARG TRITON={triton}
FROM nvcr.io/nvidia/tritonserver:${{TRITON}}
# The engine's kernels are compiled where they run: torch's compiler builds its launchers with gcc.
RUN apt-get update \\
    && apt-get install --yes --no-install-recommends gcc libc6-dev python3-dev \\
    && rm -rf /var/lib/apt/lists/*
COPY repository /models
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 1000:1000
EXPOSE 8001 8002
ENTRYPOINT ["/bin/sh", "-c", "exec {command} \\"$@\\"", "tritonserver"]
"""
_KEY = "${TRITONGATE_REPOSITORY_KEY:?is not set}"


def write_repository(
    out: Path, *, model: ModelEntry, checkpoint: Path, link: bool, environment: Path | None
) -> None:
    """Write the entry and what it names.

    Args:
        out: the repository.
        model: the entry; its `checkpoint` and `environment` are those that are written here.
        checkpoint: the directory that is copied, without hidden files and weights that are not read.
        link: make a symbolic link to it instead.
        environment: moved into the entry; None: it has none.

    Raises:
        OSError: something cannot be read or written.
    """
    write_entry(out, model=model)
    entry = out / model.name
    if link:
        (entry / model.checkpoint).symlink_to(checkpoint)
    else:
        read = find_shards(checkpoint)

        def left_out(folder: str, names: list[str]) -> set[str]:
            paths = (Path(folder, name) for name in names)
            return {
                path.name
                for path in paths
                if path.name.startswith(".") or (path.suffix in _WEIGHTS and path not in read)
            }

        shutil.copytree(checkpoint, entry / model.checkpoint, ignore=left_out)
    if environment is not None:
        shutil.move(environment, entry / _ARCHIVE)


def dockerfile(model: ModelEntry, *, triton: str, linked: Path | None) -> str:
    """Return the Dockerfile for a repository with `model`; `linked` is a directory outside of it."""
    gpus = "" if model.device == "cpu" else " --gpus all"
    volume = "" if linked is None else f" --volume {linked}:{linked}:ro"
    arguments = ["--model-repository=/models", "--disable-auto-complete-config", *NO_CONTEXT]
    command = " ".join(["tritonserver", *arguments, *private_arguments(_KEY)])
    return _DOCKERFILE.format(name=model.name, triton=triton, gpus=gpus, volume=volume, command=command)


def _images_python() -> str:
    """Return a Python of the version that NVIDIA's images have."""
    own = f"python{sys.version_info.major}.{sys.version_info.minor}"
    found = sys.executable if own == _IMAGES_PYTHON else shutil.which(_IMAGES_PYTHON)
    if found is None:
        raise click.UsageError(
            f"{_IMAGES_PYTHON}, which NVIDIA's images have, is not on PATH: name the Python of your Triton's"
            " stub with --python, an archive with --archive, or leave the packages out with --no-environment"
        )
    return found


def _check_out(out: Path, checkpoint: Path) -> None:
    if out.exists() and any(out.iterdir()):
        raise click.UsageError(f"--out {out} is not empty")
    if out.resolve().is_relative_to(checkpoint.resolve()):
        raise click.UsageError(f"--out {out} is in the checkpoint's own folder")


def _tag(_context: click.Context, _parameter: click.Parameter, tag: str) -> str:
    if not _TAG.fullmatch(tag):
        raise click.BadParameter(f"{tag!r} is no tag of an image")
    return tag


def _packed_before(_context: click.Context, _parameter: click.Parameter, archive: Path | None) -> Path | None:
    if archive is not None and not tarfile.is_tarfile(archive):
        raise click.BadParameter(f"{archive} is no archive of tar")
    return archive


@click.command(context_settings={"max_content_width": 110})
@click.option("--model", required=True, metavar="[NAME=]DIR", help="checkpoint directory, as published")
@click.option(
    "--out", required=True, type=click.Path(path_type=Path, file_okay=False), help="a new or empty folder"
)
@click.option("--name", help="of the model  [default: the directory's name]")
@click.option("--device", default="cuda:0", show_default=True, metavar="cpu|cuda:N")
@click.option("--link", is_flag=True, help="link the checkpoint instead of copying it")
@click.option(
    "--triton",
    default=TRITON,
    show_default=True,
    callback=_tag,
    help="tag of NVIDIA's image, for the Dockerfile",
)
@click.option(
    "--python",
    show_default=_IMAGES_PYTHON,
    help="with pip, of the minor version of Triton's stub: whose packages are packed",
)
@click.option(
    "--constraint",
    "constraints",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="a constraints file for pip; repeatable",
)
@click.option(
    "--environment/--no-environment",
    "packed",
    default=True,
    help="pack the engine's Python packages, or leave them to the Triton's own Python",
)
@click.option(
    "--archive",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    callback=_packed_before,
    help=f"an {_ARCHIVE} that was packed before",
)
@model_flags()
def main(
    *,
    model: str,
    out: Path,
    name: str | None,
    device: str,
    link: bool,
    triton: str,
    python: str | None,
    constraints: tuple[Path, ...],
    packed: bool,
    archive: Path | None,
    **options: Any,
) -> None:
    """Write a model repository that needs nothing but a stock Triton, and a Dockerfile for it."""
    if archive is not None and (python or constraints or not packed):
        raise click.UsageError(
            "--archive is used as it is: it excludes --python, --constraint, --no-environment"
        )
    try:
        folder_name, checkpoint = read_model_argument(model)
        _check_out(out, checkpoint)
        # The directory's name may tell the format, and the copy has another.
        options["format"] = check_checkpoint(
            checkpoint, options["format"], any_type=options["engine"] == "transformers"
        )
        entry = ModelEntry(
            name=name or folder_name,
            checkpoint="checkpoint",
            device=device,
            environment=f"$$TRITON_MODEL_DIRECTORY/{_ARCHIVE}" if packed else None,
            options=options,
        )
    except (SetupError, CheckpointError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    if packed and archive is None and python is None:
        python = _images_python()
    try:
        place = out.resolve()  # a link, or `.`, cannot be replaced
        place.parent.mkdir(parents=True, exist_ok=True)
        # Renamed into place, so that what failed leaves nothing behind.
        with tempfile.TemporaryDirectory(prefix=".build-", dir=place.parent) as folder:
            built, environment = Path(folder) / "built", Path(folder) / _ARCHIVE
            if archive is not None:
                shutil.copy(archive, environment)
            elif python is not None:
                summary = pack(environment, python=python, constraints=constraints)
                click.echo(summary.replace(f"{folder}/", ""), err=True)
            write_repository(
                built / "repository",
                model=entry,
                checkpoint=checkpoint,
                link=link,
                environment=environment if packed else None,
            )
            if packed:
                text = dockerfile(entry, triton=triton, linked=checkpoint if link else None)
                (built / "Dockerfile").write_text(text, encoding="utf-8")
            built.rename(place)
    except (EnvironmentPackError, OSError) as error:
        raise click.ClickException(str(error)) from None
    click.echo(
        f"{out}/repository holds the model {entry.name}: tritonserver --model-repository={out}/repository"
    )
    if packed:
        click.echo(f"docker build {out}")


if __name__ == "__main__":
    main(prog_name="tritongate build")
