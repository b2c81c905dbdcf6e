"""What this machine offers: the tritonserver inside the `nvidia-pytriton` wheel, and a device for models."""

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import runpy
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from triton_models.embedded.errors import SetupError


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """The files of the wheel that are needed to start a server."""

    server: Path
    """The tritonserver executable."""
    backend: tuple[Path, ...]
    """The files of the Python backend, among them the stub for this interpreter's minor version."""
    library_path: tuple[Path, ...]
    """Folders for LD_LIBRARY_PATH: the wheel's libraries, then libpython's."""

    def link_backends(self, folder: Path) -> None:
        """Make `folder` a backend directory that holds the Python backend and this interpreter's stub."""
        target = folder / "python"
        target.mkdir(parents=True)
        for source in self.backend:
            (target / source.name).symlink_to(source)

    def environment(self, inherited: Mapping[str, str], *, temporary: Path) -> dict[str, str]:
        """Return the server's environment variables, based on `inherited`; its TMPDIR is `temporary`.

        The stub starts the first `python3` on PATH, so this interpreter's folder is put first.
        """
        libraries = [*map(str, self.library_path), inherited.get("LD_LIBRARY_PATH", "")]
        return {
            **inherited,
            "PATH": f"{Path(sys.executable).parent}:{inherited.get('PATH', os.defpath)}",
            "LD_LIBRARY_PATH": ":".join(filter(None, libraries)),
            "TMPDIR": str(temporary),
        }


def find_installation() -> Installation:
    """Find the wheel's server and check that this machine can run it.

    Raises:
        SetupError: something is missing; the message says what, and how to get it.
    """
    spec = importlib.util.find_spec("pytriton")
    if spec is None or not spec.submodule_search_locations:
        raise SetupError(
            "nvidia-pytriton, which carries tritonserver, is not installed: "
            "in the clone, pip install '.[embedded]' on Linux x86-64 with glibc 2.35 or newer"
        )
    if not (numpy := importlib.metadata.version("numpy")).startswith("1."):
        # The stub is built against numpy 1: under numpy 2, every string tensor arrives as garbage.
        raise SetupError(
            f"numpy {numpy} breaks the embedded tritonserver's string tensors: pip install 'numpy<2'"
        )
    for place in (sys.prefix, str(Path(__file__).parents[2])):
        if not place.isascii():  # the stub's Python takes names of files for ASCII, whatever the locale
            raise SetupError(
                f"Triton can import nothing from {place}, whose path is not ASCII: "
                "move the clone or the environment"
            )
    package = Path(spec.submodule_search_locations[0])
    root = package / "tritonserver"
    minor = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = root / "python_backend_stubs" / minor / "triton_python_backend_stub"
    if not stub.is_file():
        raise SetupError(f"nvidia-pytriton has no Python backend for Python {minor}: use 3.11 or 3.12")
    backend = tuple(path for path in (root / "backends" / "python").iterdir() if path.is_file())
    libraries = (package.parent / "nvidia_pytriton.libs", *_libpython_folder())
    return Installation(
        server=root / "bin" / "tritonserver", backend=(*backend, stub), library_path=libraries
    )


def _libpython_folder() -> tuple[Path, ...]:
    """Return the folder of the libpython that the stub links; empty if the system's loader finds it.

    It is loaded here as a check, because Triton does not fail without it: the model stays LOADING for ever.

    Raises:
        SetupError: the library cannot be loaded.
    """
    library = f"libpython{sys.version_info.major}.{sys.version_info.minor}.so.1.0"
    folder = Path(sysconfig.get_config_var("LIBDIR") or "/nowhere")
    own = (folder / library).is_file()
    try:
        ctypes.CDLL(str(folder / library) if own else library)
    except OSError as error:
        raise SetupError(
            f"{library}, which Triton's Python backend links, cannot be loaded ({error}): "
            f"install the shared library of Python {platform.python_version()} "
            f"(Debian: libpython3.{sys.version_info.minor}; pyenv: --enable-shared)"
        ) from error
    return (folder,) if own else ()


def choose_device(asked: str) -> tuple[str, str]:
    """Return the device, `cpu` or `cuda:N`, and the reason; `auto` is the first GPU that torch can use.

    Raises:
        SetupError: `asked` is not a device name, or the driver shows no GPU with that number.
    """
    gpus, newest_cuda = _driver()
    if asked == "auto":
        if gpus == 0:
            return "cpu", "no NVIDIA driver or GPU was found"
        if not 0 < _torch_cuda() <= newest_cuda:
            return "cpu", "torch cannot use the GPU here (a CPU build, or an old driver)"
        return "cuda:0", "the first GPU"
    if asked != "cpu":
        number = asked.removeprefix("cuda:")
        if number == asked or not number.isdecimal():
            raise SetupError(f"--device {asked}: it is auto, cpu or cuda:N")
        if int(number) >= gpus:
            raise SetupError(f"--device {asked}: GPUs that the driver shows: {gpus}")
    return asked, "asked for"


def _torch_cuda() -> int:
    """Return the major version of CUDA that torch is built for; 0: none."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return 0
    # Importing torch would take seconds; this file of it imports nothing of it.
    cuda = runpy.run_path(str(Path(spec.origin).with_name("version.py")))["cuda"]
    return int((cuda or "0").partition(".")[0])


def _driver() -> tuple[int, int]:
    """Return the driver's number of GPUs, and the newest major version of CUDA that it runs; 0, 0: none."""
    count, version = ctypes.c_int(), ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0, 0
    calls = (driver.cuInit(0), driver.cuDeviceGetCount(ctypes.byref(count)))
    if any(calls) or driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return 0, 0
    return count.value, version.value // 1000
