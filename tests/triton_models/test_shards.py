import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from triton_models.checkpoint import find_shards, open_shard
from triton_models.directory import read_json
from triton_models.errors import CheckpointError

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}


def write_index(directory: Path, weight_map: object, name: str = "model.safetensors") -> None:
    document = {"metadata": {}, "weight_map": weight_map}
    (directory / f"{name}.index.json").write_text(json.dumps(document), encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "write"), [("model.safetensors", save_file), ("pytorch_model.bin", torch.save)]
)
def test_tensors_come_back_as_they_were(tmp_path: Path, name: str, write: Callable[..., None]) -> None:
    write(TENSORS, tmp_path / name)
    assert find_shards(tmp_path) == {tmp_path / name: None}
    with open_shard(tmp_path / name) as shard:
        assert shard.names() == {"a", "b"}
        for key, tensor in TENSORS.items():
            assert torch.equal(shard.read(key), tensor)


def test_an_index_says_what_is_where(tmp_path: Path) -> None:
    for name in ("one.safetensors", "two.safetensors"):
        (tmp_path / name).touch()
    write_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors", "c": "one.safetensors"})
    assert find_shards(tmp_path) == {
        tmp_path / "one.safetensors": {"a", "c"},
        tmp_path / "two.safetensors": {"b"},
    }


def test_safetensors_are_preferred(tmp_path: Path) -> None:
    torch.save(TENSORS, tmp_path / "pytorch_model.bin")
    save_file(TENSORS, tmp_path / "model.safetensors")
    assert list(find_shards(tmp_path)) == [tmp_path / "model.safetensors"]


def test_a_directory_without_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no weights: neither model.safetensors nor pytorch_model.bin"):
        find_shards(tmp_path)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "sub/x", "..\\x", "..", ".", "", 7, None])
def test_an_index_may_not_lead_out_of_its_directory(tmp_path: Path, name: object) -> None:
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    save_file(TENSORS, tmp_path / "x")
    write_index(directory, {"a": name})
    with pytest.raises(CheckpointError, match=r"index\.json: tensor 'a' .* no plain file name"):
        find_shards(directory)


@pytest.mark.parametrize("weight_map", [None, {}, [1]])
def test_an_index_without_a_map(tmp_path: Path, weight_map: object) -> None:
    write_index(tmp_path, weight_map)
    with pytest.raises(CheckpointError, match=r"index\.json: no weight_map"):
        find_shards(tmp_path)


def test_a_shard_that_is_not_there_is_named_with_a_tensor_of_it(tmp_path: Path) -> None:
    write_index(tmp_path, {"a": "gone.bin"}, "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"gone\.bin: missing; .* holds tensor 'a'"):
        find_shards(tmp_path)


@pytest.mark.parametrize(
    ("name", "write"), [("model.safetensors", save_file), ("pytorch_model.bin", torch.save)]
)
@pytest.mark.parametrize("kept", [0, 5, 100, -3])
def test_a_truncated_file_is_named(tmp_path: Path, name: str, write: Callable[..., None], kept: int) -> None:
    path = tmp_path / name
    write(TENSORS, path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=f"{name}: truncated or not a weight file"), open_shard(path):
        pass


def test_whatever_byte_of_a_pickle_is_damaged_the_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save(TENSORS, path)
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        (name,) = [each for each in archive.namelist() if each.endswith("data.pkl")]
        document = archive.read(name)
    first = whole.index(document)
    refusals = []
    for place in range(first, first + len(document)):
        path.write_bytes(whole[:place] + b"\xfe" + whole[place + 1 :])
        try:
            with open_shard(path):
                pass
        except CheckpointError as error:
            refusals.append(str(error))
    assert len(refusals) > len(document) / 2
    assert all(refusal.startswith(f"{path}: ") for refusal in refusals)


class Evil:
    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return Path.touch, (Path("/nonexistent/never"),)  # type: ignore[return-value]


def test_a_pickle_that_asks_for_more_than_tensors_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save({"a": Evil()}, path)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: .*not a weight file"), open_shard(path):
        pass
    path.write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"), open_shard(path):
        pass


@pytest.mark.parametrize(("content", "words"), [([1, 2], "holds a list"), ({"a": 3}, "'a' is a int")])
def test_a_pickle_of_something_else_is_refused(tmp_path: Path, content: object, words: str) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save(content, path)
    with pytest.raises(CheckpointError, match=words), open_shard(path):
        pass


def test_the_callers_own_errors_pass_through(tmp_path: Path) -> None:
    """What is raised while a shard is open is no fault of the shard."""
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    with pytest.raises(RuntimeError, match="the caller's"), open_shard(path):
        raise RuntimeError("the caller's")


@pytest.mark.parametrize(
    ("content", "words"), [(b"{", "not JSON"), (b"\xff\xfe", "not JSON"), (b"[]", "not a JSON object")]
)
def test_json_that_is_none(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"config\.json: {words}"):
        read_json(path)


def test_json_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: No such file"):
        read_json(tmp_path / "config.json")
