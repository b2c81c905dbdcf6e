import pytest

from triton_models.embedded import device
from triton_models.embedded.device import choose_device
from triton_models.embedded.errors import PlatformError


@pytest.mark.parametrize(
    ("gpus", "torch_uses_gpu", "asked", "chosen"),
    [
        (0, True, "auto", "cpu"),
        (2, True, "auto", "cuda:0"),
        (2, False, "auto", "cpu"),
        (2, True, "cpu", "cpu"),
        (2, True, "cuda:1", "cuda:1"),
    ],
)
def test_choice(
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    torch_uses_gpu: bool,
    asked: str,
    chosen: str,
) -> None:
    monkeypatch.setattr(device, "_gpu_count", lambda: gpus)
    monkeypatch.setattr(device, "_torch_uses_gpu", lambda: torch_uses_gpu)
    name, reason = choose_device(asked)
    assert name == chosen
    assert reason


@pytest.mark.parametrize("asked", ["cuda:2", "cuda", "gpu", "cuda:x", ""])
def test_what_there_is_not(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    monkeypatch.setattr(device, "_gpu_count", lambda: 2)
    with pytest.raises(PlatformError, match="--device"):
        choose_device(asked)


def test_a_driver_that_hangs_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_gpu_count", lambda: 1)
    monkeypatch.setattr(device, "_TORCH", "import time; time.sleep(60)")
    monkeypatch.setattr(device, "_TORCH_TIMEOUT_S", 0.1)
    with pytest.raises(PlatformError, match="--device"):
        choose_device("auto")
