import importlib.metadata
import importlib.util
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from triton_models.embedded import installation
from triton_models.embedded.errors import PlatformError
from triton_models.embedded.installation import choose_device, find_installation


def missing(*absent: str) -> Callable[[str], Any]:
    real = importlib.util.find_spec
    return lambda name: None if name in absent else real(name)


def test_the_wheel_is_found_and_linked(tmp_path: Path) -> None:
    found = find_installation()
    found.link_backends(tmp_path)
    assert {path.name for path in (tmp_path / "python").iterdir()} == {
        "libtriton_python.so",
        "triton_python_backend_utils.py",
        "triton_python_backend_stub",
    }
    assert all(path.resolve().is_file() for path in (tmp_path / "python").iterdir())


def test_this_interpreter_and_the_wheels_libraries_lead(tmp_path: Path) -> None:
    environment = find_installation().environment(
        {"PATH": "/bin", "LD_LIBRARY_PATH": "/mine", "X": "y"}, temporary=tmp_path
    )
    assert environment["PATH"] == f"{Path(sys.executable).parent}:/bin"
    libraries = environment["LD_LIBRARY_PATH"].split(":")
    assert libraries[0].endswith("nvidia_pytriton.libs")
    assert libraries[-1] == "/mine"
    assert (environment["TMPDIR"], environment["X"]) == (str(tmp_path), "y")


def test_an_old_glibc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.31"))
    with pytest.raises(PlatformError, match=r"needs glibc 2\.35 or newer, not glibc 2\.31"):
        find_installation()
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    with pytest.raises(PlatformError, match="not another libc"):
        find_installation()


def test_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(PlatformError, match="Linux x86-64 only"):
        find_installation()


def test_numpy_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "2.1.0")
    with pytest.raises(PlatformError, match=r"numpy 2\.1\.0 breaks .* 'numpy<2'"):
        find_installation()


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", missing("pytriton"))
    with pytest.raises(PlatformError, match=r"not installed: pip install 'tritongate\[embedded\]'"):
        find_installation()


def test_a_missing_libpython(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(library: str) -> None:
        raise OSError(f"{library}: cannot open shared object file")

    monkeypatch.setattr(installation.sysconfig, "get_config_var", lambda _: str(tmp_path))
    monkeypatch.setattr(installation.ctypes, "CDLL", refuse)
    with pytest.raises(PlatformError, match=r"libpython3\.\d+\.so\.1\.0, which .* cannot be loaded .*Debian"):
        find_installation()


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
    monkeypatch.setattr(installation, "_gpu_count", lambda: gpus)
    monkeypatch.setattr(installation, "_torch_uses_gpu", lambda: torch_uses_gpu)
    name, reason = choose_device(asked)
    assert name == chosen
    assert reason


@pytest.mark.parametrize("asked", ["cuda:2", "cuda", "gpu", "cuda:x", ""])
def test_what_there_is_not(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    monkeypatch.setattr(installation, "_gpu_count", lambda: 2)
    with pytest.raises(PlatformError, match="--device"):
        choose_device(asked)


def test_a_driver_that_hangs_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "_gpu_count", lambda: 1)
    monkeypatch.setattr(installation, "_TORCH", "import time; time.sleep(60)")
    monkeypatch.setattr(installation, "_TORCH_TIMEOUT_S", 0.1)
    with pytest.raises(PlatformError, match="--device"):
        choose_device("auto")
