import ctypes
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from triton_models.embedded import installation
from triton_models.embedded.errors import SetupError
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


def test_numpy_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "2.1.0")
    with pytest.raises(SetupError, match=r"numpy 2\.1\.0 breaks .* 'numpy<2'"):
        find_installation()


@pytest.mark.parametrize(
    ("owner", "name", "place"),
    [
        (sys, "prefix", "/home/张三/venv"),
        (installation, "__file__", "/home/张三/a/triton_models/embedded/b.py"),
    ],
)
def test_a_place_from_which_the_stub_cannot_import(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, place: str
) -> None:
    """Without that, the model's process dies while loading, with no word of the path."""
    monkeypatch.setattr(owner, name, place)
    with pytest.raises(SetupError, match=r"from /home/张三/(venv|a), whose path is not ASCII"):
        find_installation()


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", missing("pytriton"))
    with pytest.raises(SetupError, match=r"pip install '\.\[embedded\]' on Linux x86-64"):
        find_installation()


def test_a_missing_libpython(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(library: str) -> None:
        raise OSError(f"{library}: cannot open shared object file")

    monkeypatch.setattr(sysconfig, "get_config_var", lambda _: str(tmp_path))
    monkeypatch.setattr(ctypes, "CDLL", refuse)
    with pytest.raises(SetupError, match=r"libpython3\.\d+\.so\.1\.0, which .* cannot be loaded .*Debian"):
        find_installation()


@pytest.mark.parametrize(
    ("driver", "torch_cuda", "asked", "chosen"),
    [
        ((0, 0), 13, "auto", "cpu"),
        ((2, 13), 13, "auto", "cuda:0"),
        ((2, 13), 12, "auto", "cuda:0"),
        ((2, 12), 13, "auto", "cpu"),
        ((2, 13), 0, "auto", "cpu"),
        ((2, 13), 13, "cpu", "cpu"),
        ((2, 13), 13, "cuda:1", "cuda:1"),
    ],
)
def test_choice(
    monkeypatch: pytest.MonkeyPatch, driver: tuple[int, int], torch_cuda: int, asked: str, chosen: str
) -> None:
    monkeypatch.setattr(installation, "_driver", lambda: driver)
    monkeypatch.setattr(installation, "_torch_cuda", lambda: torch_cuda)
    name, reason = choose_device(asked)
    assert name == chosen
    assert reason


@pytest.mark.parametrize(
    ("line", "major"),
    [
        ("cuda: Optional[str] = '12.8'", 12),
        ("cuda = '11.7'", 11),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '6.2'", 0),
    ],
)
def test_the_cuda_that_torch_is_built_for_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str, major: int
) -> None:
    assert installation._torch_cuda() >= 0  # of the torch that is installed
    (tmp_path / "version.py").write_text(f"from typing import Optional\n__version__ = '2.11.0'\n{line}\n")
    origin = importlib.machinery.ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: origin)
    assert installation._torch_cuda() == major


def test_without_torch_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", missing("torch"))
    assert installation._torch_cuda() == 0


@pytest.mark.parametrize("asked", ["cuda:2", "cuda", "gpu", "cuda:x", ""])
def test_what_there_is_not(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    monkeypatch.setattr(installation, "_driver", lambda: (2, 13))
    with pytest.raises(SetupError, match="--device"):
        choose_device(asked)
