"""Where the compiled operations come from: a compiler, or what was kept of an earlier time."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from triton_models.engine import ops_cpu
from triton_models.engine.ops_cpu import NotCompiledError, compiled


@pytest.fixture(autouse=True)
def hasty_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is compiled here, nothing has to be fast: `test_ops_cpu` has it as it is used."""
    monkeypatch.setattr(ops_cpu, "_FLAGS", (*ops_cpu._FLAGS, "-O0"))


def compilations(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return the list of those from now on."""
    made: list[object] = []
    run = subprocess.run

    def noted(*args: Any, **options: Any) -> Any:
        made.append(args)
        return run(*args, **options)

    monkeypatch.setattr(subprocess, "run", noted)
    return made


def test_it_is_compiled_once_for_all_processes(caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> int:
        ops_cpu._compiled.cache_clear()
        assert compiled().lanes() > 0
        return len(made)

    made = compilations(monkeypatch)
    assert [load(), load()] == [1, 1]
    assert caches.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(ops_cpu, "_FLAGS", (*ops_cpu._FLAGS, "-g0"))
    assert [load(), load()] == [2, 2]
    other = caches / "cpuinfo"
    monkeypatch.setattr(ops_cpu, "_CPU", other)
    assert [load(), load()] == [3, 3]
    other.write_bytes(b"flags : fpu\nmodel name : \xff\n")
    assert [load(), load()] == [4, 4]
    assert {path.suffix for path in caches.iterdir()} == {".so", ""}  # nothing is left of the copying


@pytest.mark.parametrize("left", [0, 31, -100])
def test_what_was_kept_and_is_damaged_is_compiled_anew(
    caches: Path, monkeypatch: pytest.MonkeyPatch, left: int
) -> None:
    """A file cut short may be refused when it is loaded, or seem whole, or end the process."""
    made = compilations(monkeypatch)
    assert compiled().lanes() > 0
    (kept,) = caches.iterdir()
    whole = kept.read_bytes()
    kept.unlink()  # what is loaded stays as it is
    kept.write_bytes(whole[:left])
    for _ in range(2):
        ops_cpu._compiled.cache_clear()
        assert compiled().lanes() > 0
    assert len(made) == 2
    assert kept.stat().st_size == len(whole)


@pytest.mark.parametrize("home", [True, False])
def test_what_cannot_be_kept_is_compiled_all_the_same(
    caches: Path, monkeypatch: pytest.MonkeyPatch, *, home: bool
) -> None:
    def homeless(_path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    made = compilations(monkeypatch)
    if home:
        caches.parent.mkdir()
        caches.write_text("", encoding="utf-8")
    else:
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "expanduser", homeless)
    for _ in range(2):
        assert compiled().lanes() > 0
        ops_cpu._compiled.cache_clear()
    assert len(made) == 2


@pytest.mark.usefixtures("caches")
def test_without_a_compiler_there_is_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NotCompiledError, match="no C compiler was found"):
        compiled()


@pytest.mark.usefixtures("caches")
def test_the_compiler_is_the_one_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    made = compilations(monkeypatch)
    monkeypatch.setenv("CC", "gcc")
    assert compiled().lanes() > 0
    assert str(made).count("/gcc'") == 1
    ops_cpu._compiled.cache_clear()
    monkeypatch.setenv("CC", "none")
    with pytest.raises(NotCompiledError, match="no C compiler was found"):
        compiled()


@pytest.mark.usefixtures("caches")
def test_a_compiler_may_be_named_with_options(monkeypatch: pytest.MonkeyPatch) -> None:
    made = compilations(monkeypatch)
    for count, named in enumerate(("gcc -g0", "env gcc", "env gcc -g0"), 1):
        ops_cpu._compiled.cache_clear()
        monkeypatch.setenv("CC", named)
        assert compiled().lanes() > 0
        assert len(made) == count


@pytest.mark.usefixtures("caches")
@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'it is broken' >&2; exit 1", "it is broken"),
        ("printf 'In file included from a:\\nfatal error: no b\\374r.h\\n' >&2; exit 1", "no b.r.h"),
        ("exit 1", "it ended with 1"),
        ("exec sleep 60", "timed out"),
        ("while [ $1 != -o ]; do shift; done; echo nothing > $2", "cpu.so"),
    ],
)
def test_a_compiler_that_fails_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, reason: str
) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text(f"#!{shutil.which('sh')}\n{script}\n", encoding="utf-8")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(ops_cpu, "_COMPILERS", ("cc",))
    monkeypatch.setattr(ops_cpu, "_COMPILES_WITHIN_S", 0.5)
    with pytest.raises(NotCompiledError, match=reason):
        compiled()
