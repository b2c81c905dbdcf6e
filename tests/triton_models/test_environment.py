import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from triton_models import environment
from triton_models.environment import build_environment, main, own_requirement, pack_environment
from triton_models.errors import EnvironmentPackError

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
PACKAGES = f"lib/python{VERSION}/site-packages"
SEEN = "import sys, numpy; print(sys.prefix, numpy.__file__, sys.base_prefix, numpy.unpacked, sep='\\n')"


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """An environment with as much of numpy as is looked for."""
    folder = tmp_path / "venv"
    build_environment(folder, python=sys.executable, requirements=["--help"])
    (folder / PACKAGES / "numpy").mkdir()
    (folder / PACKAGES / "numpy" / "__init__.py").write_text("unpacked = True\n")
    (folder / PACKAGES / "linked.py").symlink_to("numpy/__init__.py")
    return folder


def unpack(archive: Path, folder: Path) -> Path:
    folder.mkdir()
    subprocess.run(["tar", "-xzf", archive, "-C", folder], check=True)
    return folder


def source(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Activate as Triton does, then run what PATH calls python3: by default the tests' own Python."""
    own = {"PATH": f"{sys.base_prefix}/bin:{os.environ['PATH']}"}
    return subprocess.run(
        ["/bin/bash", "-c", f"source {folder}/bin/activate && exec python3 -c {SEEN!r}"],
        env=os.environ | own | variables,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_archive_holds_the_packages_and_an_activate(venv: Path, tmp_path: Path) -> None:
    summary = pack_environment(venv, tmp_path / "x.tar.gz")
    with tarfile.open(tmp_path / "x.tar.gz") as archive:
        members = {member.name: member for member in archive}
    assert {f"{PACKAGES}/numpy/__init__.py", f"{PACKAGES}/linked.py", "bin/activate"} <= set(members)
    # Scripts of the environment name its own Python; so does its configuration.
    assert [name for name in members if not name.startswith("lib/")] == ["bin/activate"]
    assert members[f"{PACKAGES}/linked.py"].issym()
    assert {(member.uid, member.gid, member.uname) for member in members.values()} == {(0, 0, "")}
    assert all(member.mode & 0o444 == 0o444 for member in members.values())
    assert summary.startswith(f"{tmp_path / 'x.tar.gz'}: 0 MB")
    assert f"python{VERSION} on PATH" in summary


def test_it_runs_wherever_it_is_unpacked_and_moved(venv: Path, tmp_path: Path) -> None:
    archive = tmp_path / "x.tar.gz"
    pack_environment(venv, archive)
    venv.rename(tmp_path / "gone")
    folder = unpack(archive, tmp_path / "unpacked")
    for place in (folder, tmp_path / "moved"):
        folder.rename(place)
        folder = place
        for _ in range(2):  # the second time nothing is left to do
            done = source(place)
            assert done.stderr == ""
            assert done.stdout.splitlines() == [
                str(place),
                f"{place}/{PACKAGES}/numpy/__init__.py",
                sys.base_prefix,
                "True",
            ]


def test_without_its_python_it_says_so_and_lets_the_stub_fail(venv: Path, tmp_path: Path) -> None:
    """A failure would leave Triton waiting for ever."""
    pack_environment(venv, tmp_path / "x.tar.gz")
    folder = unpack(tmp_path / "x.tar.gz", tmp_path / "unpacked")
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("dirname", "readlink", "mv", "ln"):
        (tools / name).symlink_to(f"/usr/bin/{name}")
    (tools / "python3").write_text("#!/bin/bash\necho the stub\n")
    (tools / "python3").chmod(0o755)
    done = source(folder, PATH=str(tools))
    assert f"needs python{VERSION} on PATH" in done.stderr
    assert (done.returncode, done.stdout) == (0, "the stub\n")


def change(venv: Path, path: str, text: str) -> None:
    (venv / path).parent.mkdir(parents=True, exist_ok=True)
    (venv / path).write_text(text)


@pytest.mark.parametrize(
    ("path", "text", "words"),
    [
        ("pyvenv.cfg", "home = /usr/bin\ninclude-system-site-packages = true\n", "packages of the system"),
        ("lib/python3.5/site-packages/x.py", "", "2 folders"),
        (
            f"{PACKAGES}/o-1.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: ours\nVersion: 1\n",
            "ours is",
        ),
    ],
)
def test_what_would_be_missing_is_refused(
    venv: Path, tmp_path: Path, path: str, text: str, words: str
) -> None:
    change(venv, path, text)
    if path.endswith("METADATA"):
        url = json.dumps({"url": "file:///src", "dir_info": {"editable": True}})
        change(venv, str(Path(path).with_name("direct_url.json")), url)
    with pytest.raises(EnvironmentPackError, match=words):
        pack_environment(venv, tmp_path / "x.tar.gz")
    assert not list(tmp_path.glob("*.tar.gz*"))


def test_other_refusals(venv: Path, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentPackError, match=r"must end in \.tar\.gz"):
        pack_environment(venv, tmp_path / "x.zip")
    with pytest.raises(EnvironmentPackError, match="no virtual environment"):
        pack_environment(tmp_path, tmp_path / "x.tar.gz")
    with pytest.raises(EnvironmentPackError, match="No such file"):
        pack_environment(venv, tmp_path / "nowhere" / "x.tar.gz")
    (venv / PACKAGES / "numpy" / "__init__.py").unlink()
    (venv / PACKAGES / "numpy").rmdir()
    with pytest.raises(EnvironmentPackError, match="no numpy"):
        pack_environment(venv, tmp_path / "x.tar.gz")


def test_what_pip_refuses_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentPackError, match="-m pip"):
        build_environment(tmp_path / "e", python=sys.executable, requirements=["./nothing-here"])
    with pytest.raises(EnvironmentPackError, match="no-such-python"):
        build_environment(tmp_path / "f", python="no-such-python", requirements=[])


def test_it_packs_the_tritongate_that_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    assert own_requirement() == f"tritongate[engine] @ {root.as_uri()}"
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "triton_models" / "environment.py"))
    # An installation is packed by what pip noted of it.
    assert own_requirement().startswith("tritongate[engine]")
    assert own_requirement() != f"tritongate[engine] @ {tmp_path.as_uri()}"


def test_the_command_packs_an_environment_that_is_there(venv: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.tar.gz"
    arguments = ["--environment", str(venv), "--out", str(out)]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0
    assert f"{out}: " in done.output
    assert CliRunner().invoke(main, [*arguments, "more"]).exit_code == 2
    failed = CliRunner().invoke(main, [*arguments[:-1], str(tmp_path / "x")])
    assert (failed.exit_code, "must end in" in failed.output) == (1, True)
