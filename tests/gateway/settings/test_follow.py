import asyncio
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gateway.settings import ConfigurationError, Settings, follow, load_settings
from tests.gateway.serving import until


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "LOOK_EVERY_S", 0.01)


class Following:
    def __init__(self, path: Path) -> None:
        self.settings = load_settings({"models_file": str(path)})
        self.applied: list[list[str]] = []
        self.outcomes: list[str] = []

    async def apply(self, settings: Settings) -> None:
        self.applied.append(list(settings.models))

    @asynccontextmanager
    async def running(self, memory: int | None = None) -> AsyncIterator[None]:
        work = follow.follow("models", self.settings, self.apply, self.outcomes.append, memory)
        task = asyncio.create_task(work)
        yield
        assert not task.done()
        task.cancel()

    async def until(self, count: int) -> None:
        await until(lambda: len(self.outcomes) == count)


async def test_good_changes_are_applied_and_bad_ones_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "models.yaml"
    path.write_text("models: {a: {}}")
    following = Following(path)
    async with following.running():
        path.write_text("models: {a: {}, bb: {}}")
        await following.until(1)
        path.write_text("models: {a: {tempo: 1}}")
        await following.until(2)
        path.unlink()
        await following.until(3)
        path.write_text("models: {a: {}, bb: {}}")  # what is served
        await asyncio.sleep(0.1)
        path.write_text("models: {c: {}}")
        await following.until(4)
    assert following.outcomes == ["applied", "refused", "refused", "applied"]
    assert following.applied == [["a", "bb"], ["c"]]
    details = [getattr(record, "detail", "") for record in caplog.records if record.levelname == "ERROR"]
    assert details == [
        f"models.a.tempo: unknown key (from {path})",
        f"cannot read {path}: No such file or directory",
    ]


async def test_a_mounted_config_map_changes_by_a_link(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "models.yaml").write_text(f"models: {{{name}: {{}}}}")
    (tmp_path / "..data").symlink_to("one")
    (tmp_path / "models.yaml").symlink_to("..data/models.yaml")
    following = Following(tmp_path / "models.yaml")
    async with following.running():
        await asyncio.sleep(0.1)
        assert not following.outcomes
        (tmp_path / "..new").symlink_to("two")
        (tmp_path / "..new").rename(tmp_path / "..data")
        await following.until(1)
    assert following.applied == [["two"]]


async def test_a_process_that_replaces_another_reads_what_changed_before(tmp_path: Path) -> None:
    path = tmp_path / "models.yaml"
    path.write_text("models: {a: {}}")
    following = Following(path)
    path.write_text("models: {b: {}}")
    async with following.running():
        await following.until(1)
    assert following.applied == [["b"]]


async def test_a_process_that_replaces_another_serves_what_the_others_do(tmp_path: Path, table: int) -> None:
    path, applied = tmp_path / "models.yaml", {"models": table}
    path.write_text("models: {a: {}}")
    following = Following(path)
    assert follow.as_applied(following.settings, applied) is following.settings
    async with following.running(table):
        path.write_text(f"models: {{{'long' * 99}: {{}}}}")
        await following.until(1)
        path.write_text(
            "models: {b: {entry: e, defaults: {top_p: 0.5}, upstreams: [t:1], contract: batched}}"
        )
        await following.until(2)
        path.write_text("models: {c: {entri: e}}")
        await following.until(3)
    replaced = follow.as_applied(following.settings, applied)
    assert list(replaced.models) == ["b"]
    assert replaced.models["b"].defaults.top_p == 0.5
    os.pwrite(table, b"{\n", 0)
    assert follow.as_applied(following.settings, applied) is following.settings


async def test_a_process_that_replaces_another_knows_the_keys_that_the_others_do(
    tmp_path: Path, table: int
) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("api_keys: [{name: a, key: first}]")
    settings = load_settings({"keys_file": str(path)})
    applied: list[Settings] = []
    outcomes: list[str] = []

    async def apply(changed: Settings) -> None:
        applied.append(changed)

    task = asyncio.create_task(follow.follow("api_keys", settings, apply, outcomes.append, table))
    path.write_text("api_keys: [{name: b, key: second-secret, models: [m], scopes: [admin]}]")
    await until(lambda: outcomes == ["applied"])
    path.write_text("api_keys: [{name: b, key: [}]")
    await until(lambda: outcomes == ["applied", "refused"])
    task.cancel()
    replaced = follow.as_applied(settings, {"api_keys": table})
    assert [key.hashed() for key in applied[0].api_keys] == list(replaced.api_keys)
    assert b"second-secret" not in os.pread(table, 2**16, 0)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "api_keys: a list of keys is needed"),
        ("api_keys: []", "api_keys: a list of keys is needed"),
        ("port: 1", "port: unknown key, only `api_keys` is known"),
        ("api_keys: [{name: a, key: s3cret}, {name: a, key: b}]", "api_keys: two keys have the name 'a'"),
        ("api_keys: [{name: a, key: s3cret, rate: 1}]", "api_keys.0.rate: unknown key"),
    ],
)
def test_files_of_keys_that_cannot_be_used(tmp_path: Path, text: str, fault: str) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=f"^{re.escape(f'{fault} (from {path})')}$"):
        load_settings({"keys_file": str(path)})


def test_keys_are_in_one_place(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("api_keys: [{name: a, key: k}]")
    with pytest.raises(ConfigurationError, match="give one of the two"):
        load_settings({"keys_file": str(path), "api_keys": [{"name": "b", "key": "k"}]})
