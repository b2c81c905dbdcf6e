"""Where models run when the choice is ours."""

import ctypes
import subprocess
import sys

from triton_models.embedded.errors import PlatformError

_TORCH = "import torch; raise SystemExit(0 if torch.cuda.is_available() else 1)"
_TORCH_TIMEOUT_S = 120.0


def choose_device(asked: str) -> tuple[str, str]:
    """Return the device, `cpu` or `cuda:N`, and the reason; `auto` is the first GPU that torch can use.

    Raises:
        PlatformError: a GPU was asked for and the driver shows none of that number.
    """
    gpus = _gpu_count()
    if asked == "auto":
        if gpus == 0:
            return "cpu", "no NVIDIA driver or GPU was found"
        # The driver alone does not decide: torch may be a CPU build. A process of its own, as torch is large.
        answer = subprocess.run([sys.executable, "-c", _TORCH], timeout=_TORCH_TIMEOUT_S, check=False)  # noqa: S603 - our own command
        if answer.returncode != 0:
            return "cpu", "torch cannot use the GPU here (a CPU build?)"
        return "cuda:0", "the first GPU"
    if asked.startswith("cuda:") and int(asked.removeprefix("cuda:")) >= gpus:
        raise PlatformError(f"--device {asked}: the driver shows {gpus} GPUs")
    return asked, "asked for"


def _gpu_count() -> int:
    """Ask the driver; 0 where there is none."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value
