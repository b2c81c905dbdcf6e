"""Chooses the device for `--device auto`."""

import ctypes
import subprocess
import sys

from triton_models.embedded.errors import PlatformError

_TORCH = "import torch; raise SystemExit(0 if torch.cuda.is_available() else 1)"
_TORCH_TIMEOUT_S = 120.0


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
