import re
from pathlib import Path

import pytest

from triton_models.embedded.errors import OptionsError
from triton_models.embedded.models import (
    BUILT_IN_CHECKPOINT,
    ModelOptions,
    find_models,
    read_model_argument,
    write_models,
)

GOLDEN = Path(__file__).parents[2] / "golden"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "glm"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def test_a_model_is_named_by_its_folder_or_by_name(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_model_argument(str(checkpoint)) == ("glm", checkpoint)
    assert read_model_argument(f"{checkpoint}/") == ("glm", checkpoint)
    assert read_model_argument(f"other={checkpoint}") == ("other", checkpoint)
    monkeypatch.chdir(checkpoint)
    assert read_model_argument(".") == ("glm", checkpoint)


def test_an_equals_sign_in_a_path_is_no_name(tmp_path: Path) -> None:
    folder = tmp_path / "a=b"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert read_model_argument(str(folder)) == ("a=b", folder)


def test_what_is_no_checkpoint_is_refused(tmp_path: Path, checkpoint: Path) -> None:
    with pytest.raises(OptionsError, match="is not a directory"):
        read_model_argument(str(tmp_path / "none"))
    with pytest.raises(OptionsError, match=r"no config\.json"):
        read_model_argument(str(tmp_path))
    with pytest.raises(OptionsError, match="two models are named 'glm'"):
        write_models(tmp_path, (str(checkpoint), f"glm={checkpoint}"), ModelOptions())
    with pytest.raises(OptionsError, match="cannot be a model's name"):
        write_models(tmp_path, (f"a b={checkpoint}",), ModelOptions())


def test_entries_are_written_and_found(tmp_path: Path, checkpoint: Path) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()
    with pytest.raises(OptionsError, match="holds no entry"):
        find_models(repository)
    options = ModelOptions(dtype="float32", max_running=7, max_batched_tokens=99)
    written = write_models(repository, (str(checkpoint), f"b={checkpoint}"), options)
    assert [model.name for model in written] == ["glm", "b"]
    assert written[0].entries == ("glm-tokenizer", "glm-stream", "glm")
    config = (repository / "b-stream" / "config.pbtxt").read_text()
    assert all(f'string_value: "{value}"' in config for value in ("float32", 7, 99))
    assert {model.name for model in find_models(repository)} == {"glm", "b"}


def contract(repository: Path, name: str) -> str:
    config = (repository / name / "config.pbtxt").read_text()
    (found,) = re.findall(r'key: "contract"\s+value {\s+string_value: "(\w+)"', config)
    return str(found)


def test_the_contract_is_the_checkpoints_unless_it_is_chosen(tmp_path: Path) -> None:
    golden = tuple(str(GOLDEN / name) for name in ("chatglm2", "chatglm3"))
    write_models(tmp_path, golden, ModelOptions())
    assert (contract(tmp_path, "chatglm2"), contract(tmp_path, "chatglm3")) == ("chatglm2", "batched")
    write_models(tmp_path, golden, ModelOptions(contracts=("batched", "chatglm3=unbatched")))
    assert (contract(tmp_path, "chatglm2"), contract(tmp_path, "chatglm3")) == ("batched", "unbatched")


@pytest.mark.parametrize(
    ("argument", "words"),
    [("nobody=batched", "no model is named 'nobody'"), ("glm=v2", "batched, unbatched")],
)
def test_a_contract_that_cannot_be_is_refused(
    tmp_path: Path, checkpoint: Path, argument: str, words: str
) -> None:
    with pytest.raises(OptionsError, match=words):
        write_models(tmp_path, (str(checkpoint),), ModelOptions(contracts=(argument,)))


def test_the_built_in_model_is_served_where_none_is_named(tmp_path: Path) -> None:
    (model,) = write_models(tmp_path, (), ModelOptions())
    assert model.name == "chatglm3-demo"
    assert str(BUILT_IN_CHECKPOINT) in (tmp_path / model.stream / "config.pbtxt").read_text()
    for name in ("config.json", "tokenizer.model", "tokenizer_config.json", "model.safetensors", "README.md"):
        assert (BUILT_IN_CHECKPOINT / name).is_file()
