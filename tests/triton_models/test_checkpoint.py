import json
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from triton_models.checkpoint import load_model, open_shard, progress_bar
from triton_models.directory import find_shards, read_json
from triton_models.engine.models.decoder import Decoder
from triton_models.engine.quantised import QUANTISATIONS
from triton_models.errors import CheckpointError
from triton_models.families import tensor_places

GOLDEN = Path(__file__).parents[1] / "golden"
CPU = torch.device("cpu")
HEAD = "transformer.output_layer.weight"
DENSE = "transformer.encoder.layers.1.self_attention.dense.weight"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A copy of the golden ChatGLM3 checkpoint, to be damaged."""
    copy = tmp_path / "model"
    shutil.copytree(GOLDEN / "chatglm3", copy)
    return copy


def load(directory: Path) -> Decoder:
    return load_model(directory, torch.float32, CPU)


def respread(directory: Path, shards: int, suffix: str) -> list[Path]:
    """Write the weights again as several shards with an index."""
    single = directory / "model.safetensors"
    tensors = load_file(single)
    single.unlink()
    stem, extension = {"safetensors": ("model", "safetensors"), "bin": ("pytorch_model", "bin")}[suffix]
    paths = [directory / f"{stem}-{number + 1:05}-of-{shards:05}.{extension}" for number in range(shards)]
    parts: list[dict[str, torch.Tensor]] = [{} for _ in paths]
    for number, (name, tensor) in enumerate(sorted(tensors.items())):
        parts[number % shards][name] = tensor
    for path, part in zip(paths, parts, strict=True):
        write(path, part)
    index = {
        "weight_map": {name: path.name for path, part in zip(paths, parts, strict=True) for name in part}
    }
    (directory / f"{stem}.{extension}.index.json").write_text(json.dumps(index), encoding="utf-8")
    return paths


def write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    if path.suffix == ".safetensors":
        save_file(tensors, path)
    else:
        torch.save(tensors, path)


def change(directory: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize("shards", [2, 5])
def test_shards_hold_the_same_model(directory: Path, suffix: str, shards: int) -> None:
    whole = tensor_places(load(GOLDEN / "chatglm3"))
    respread(directory, shards, suffix)
    spread = tensor_places(load(directory))
    assert spread.keys() == whole.keys()
    assert all(torch.equal(spread[name], tensor) for name, tensor in whole.items())


def test_parameters_in_a_file_leave_nothing_to_be_trained(directory: Path) -> None:
    single = directory / "model.safetensors"
    tensors = {name: torch.nn.Parameter(tensor) for name, tensor in load_file(single).items()}
    single.unlink()
    torch.save(tensors, directory / "pytorch_model.bin")
    assert not any(tensor.requires_grad for tensor in tensor_places(load(directory)).values())


def test_weights_become_the_asked_for_dtype_and_norms_stay_single() -> None:
    model = load_model(GOLDEN / "chatglm3", torch.bfloat16, CPU)
    assert (model.dtype, model.head.weight.dtype, model.layers[0].qkv.weight.dtype) == (torch.bfloat16,) * 3
    assert model.final_norm.weight.dtype == torch.float32


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_matrices_of_16_bits_may_stay_so(directory: Path, dtype: torch.dtype, suffix: str) -> None:
    def narrow(tensors: dict[str, torch.Tensor]) -> None:
        # Some tools leave norms in 32 bits.
        norms = ("layernorm.weight", "layer_norm.weight")
        tensors.update({name: each.to(dtype) for name, each in tensors.items() if not name.endswith(norms)})

    change(directory, narrow)
    respread(directory, 3, suffix)
    wide, model = load(directory), load_model(directory, torch.float32, CPU, as_stored=True)
    assert model.dtype == torch.float32
    bias = model.layers[0].qkv.bias
    assert bias is not None
    assert {each.dtype for each in (model.embedding, model.head.weight, bias)} == {dtype}
    assert model.final_norm.weight.dtype == torch.float32
    assert torch.equal(model.layers[1].up.weight.float(), wide.layers[1].up.weight)
    matrices = [wide.embedding, wide.head.weight]
    for layer in wide.layers:
        matrices += [getattr(layer, name).weight for name in wide.config.matrices]
        assert layer.qkv.bias is not None
        matrices.append(layer.qkv.bias)
    assert wide.nbytes - model.nbytes == sum(each.nbytes for each in matrices) / 2


@pytest.mark.parametrize(
    "name", [DENSE, HEAD, "transformer.encoder.layers.0.self_attention.query_key_value.bias"]
)
def test_of_several_dtypes_none_is_rounded(directory: Path, name: str) -> None:
    def narrow_most(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({each: tensor.bfloat16() for each, tensor in tensors.items() if each != name})

    change(directory, narrow_most)
    assert load_model(directory, torch.float32, CPU, as_stored=True).head.weight.dtype == torch.float32


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda tensors: tensors.pop(DENSE), rf"model\.safetensors: tensor '{DENSE}' is missing"),
        (
            lambda tensors: tensors.update({"transformer.extra": torch.ones(1)}),
            r"model\.safetensors: tensor 'transformer\.extra' has no place",
        ),
        (
            lambda tensors: tensors.update({HEAD: torch.ones(1152, 64)}),
            rf"model\.safetensors: tensor '{HEAD}' has shape \[1152, 64\] instead of \[1152, 128\]",
        ),
        (
            lambda tensors: tensors.update({HEAD: torch.ones((1152, 128), dtype=torch.int8)}),
            rf"model\.safetensors: tensor '{HEAD}' is torch\.int8",
        ),
    ],
)
def test_tensors_that_are_wrong_are_named_with_their_file(
    directory: Path, edit: Callable[[dict[str, torch.Tensor]], object], words: str
) -> None:
    change(directory, edit)
    with pytest.raises(CheckpointError, match=words):
        load(directory)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_a_tensor_that_is_not_where_the_index_says(directory: Path, suffix: str) -> None:
    first, second = respread(directory, 2, suffix)
    # The shards change names: the index is wrong for each tensor of either.
    first.rename(directory / "swap")
    second.rename(first)
    (directory / "swap").rename(second)
    with pytest.raises(CheckpointError, match=rf"{first.name}: tensor 'transformer\..*' is not in it"):
        load(directory)


def test_a_tensor_that_the_index_does_not_list(directory: Path) -> None:
    first, _ = respread(directory, 2, "safetensors")
    save_file(load_file(first) | {"stray": torch.ones(1)}, first)
    with pytest.raises(
        CheckpointError, match=f"{first.name}: tensor 'stray' is in it, and the index does not"
    ):
        load(directory)


def test_a_tensor_that_the_index_forgot(directory: Path) -> None:
    respread(directory, 1, "bin")
    index = directory / "pytorch_model.bin.index.json"
    document = json.loads(index.read_text(encoding="utf-8"))
    del document["weight_map"][HEAD]
    index.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(CheckpointError, match=f"tensor '{HEAD}' is in it, and the index does not"):
        load(directory)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_a_truncated_shard_is_named(directory: Path, suffix: str) -> None:
    second = respread(directory, 2, suffix)[1]
    second.write_bytes(second.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=f"{second.name}: truncated"):
        load(directory)


@pytest.mark.parametrize("name", QUANTISATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matrices_are_quantised_while_they_are_read(directory: Path, name: str, dtype: torch.dtype) -> None:
    plain = load_model(directory, torch.float32, CPU)
    respread(directory, 3, "safetensors")
    calls: list[tuple[int, int]] = []
    model = load_model(
        directory, dtype, CPU, lambda filled, total: calls.append((filled, total)), quantization=name
    )
    assert calls[-1][0] == calls[-1][1]
    assert torch.equal(model.embedding, plain.embedding.to(dtype))
    pairs = [(model.head, plain.head)]
    for mine, theirs in zip(model.layers, plain.layers, strict=True):
        assert torch.equal(mine.input_norm.weight, theirs.input_norm.weight)
        assert torch.equal(mine.qkv.bias, theirs.qkv.bias.to(dtype))
        pairs += [(getattr(mine, each), getattr(theirs, each)) for each in plain.config.matrices]
    for quantised, linear in pairs:
        assert isinstance(quantised, QUANTISATIONS[name])
        expected = QUANTISATIONS[name].empty(*linear.weight.shape, bias=False, dtype=dtype, device=CPU)
        expected.place.copy_(linear.weight)
        assert torch.equal(quantised.weight, expected.weight)
        assert torch.equal(quantised.scales, expected.scales)


def test_a_tensor_that_cannot_be_quantised_is_named(directory: Path) -> None:
    change(directory, lambda tensors: tensors[DENSE].fill_(torch.inf))
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: tensor '{DENSE}' holds .*not finite"):
        load_model(directory, torch.float32, CPU, quantization="int8")


def test_progress_ends_at_the_whole_model() -> None:
    calls: list[tuple[int, int]] = []
    load_model(GOLDEN / "chatglm2", torch.float32, CPU, lambda filled, total: calls.append((filled, total)))
    filled = [each for each, _ in calls]
    assert filled == sorted(filled)
    assert len(calls) == 17
    assert calls[-1][0] == calls[-1][1]


def test_the_progress_bar_is_on_stderr_and_silence_is_silent(capfd: pytest.CaptureFixture[str]) -> None:
    load(GOLDEN / "chatglm2")
    assert capfd.readouterr() == ("", "")
    with progress_bar("demo") as progress:
        load_model(GOLDEN / "chatglm2", torch.float32, CPU, progress)
    shown = capfd.readouterr()
    assert shown.out == ""
    assert "loading demo: 100%" in shown.err


def write_old(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write a `.bin` file as torch did before 1.6."""
    torch.save(tensors, path, _use_new_zipfile_serialization=False)


TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}


@pytest.mark.parametrize(
    ("name", "write"),
    [("model.safetensors", save_file), ("pytorch_model.bin", torch.save), ("pytorch_model.bin", write_old)],
)
def test_tensors_come_back_as_they_were(tmp_path: Path, name: str, write: Callable[..., None]) -> None:
    write(TENSORS, tmp_path / name)
    assert find_shards(tmp_path) == {tmp_path / name: None}
    with open_shard(tmp_path / name) as (names, read):
        assert names == {"a", "b"}
        for key, tensor in TENSORS.items():
            assert torch.equal(read(key), tensor)


@pytest.mark.parametrize(
    ("name", "write"),
    [("model.safetensors", save_file), ("pytorch_model.bin", torch.save), ("pytorch_model.bin", write_old)],
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
    def __reduce__(self) -> tuple[Callable[[Path], object], tuple[Path]]:
        return Path.touch, (Path("/nonexistent/never"),)


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
