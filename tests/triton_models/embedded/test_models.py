import re
import shutil
from pathlib import Path

import click
import pytest

from deploy.docker import start_triton
from triton_models.embedded import command as program
from triton_models.embedded.errors import SetupError
from triton_models.embedded.models import (
    BUILT_IN_CHECKPOINT,
    read_model_argument,
    write_models,
)
from wire.options import OPTIONS

GOLDEN = Path(__file__).parents[2] / "golden"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "glm"
    shutil.copytree(GOLDEN / "chatglm3", folder)
    return folder


@pytest.mark.parametrize("each", [program.main, start_triton.main])
def test_every_program_has_a_flag_for_each_option(each: click.Command) -> None:
    assert {option.name for option in OPTIONS} <= {parameter.name for parameter in each.params}


def test_a_model_is_named_by_its_folder_or_by_name(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_model_argument(str(checkpoint)) == ("glm", checkpoint)
    assert read_model_argument(f"{checkpoint}/") == ("glm", checkpoint)
    assert read_model_argument(f"other={checkpoint}") == ("other", checkpoint)
    monkeypatch.chdir(checkpoint)
    assert read_model_argument(".") == ("glm", checkpoint)
    (checkpoint / "inner").mkdir()
    assert read_model_argument("inner/..") == ("glm", checkpoint)


def test_a_model_in_hugging_faces_cache_has_its_repositorys_name(tmp_path: Path, checkpoint: Path) -> None:
    folder = tmp_path / "models--zai-org--glm-4-9b-chat-hf" / "snapshots"
    folder.mkdir(parents=True)
    for commit, name in (("0" * 39 + "a", "glm-4-9b-chat-hf"), ("main", "main")):
        (folder / commit).symlink_to(checkpoint)
        assert read_model_argument(str(folder / commit))[0] == name
    assert read_model_argument(f"mine={folder}/main")[0] == "mine"


def test_a_model_is_named_by_a_link_to_its_folder(tmp_path: Path, checkpoint: Path) -> None:
    """A hub's folders are named after a commit."""
    (tmp_path / "mine").symlink_to(checkpoint)
    assert read_model_argument(f"{tmp_path}/mine/") == ("mine", checkpoint)


def test_an_equals_sign_in_a_path_is_no_name(tmp_path: Path) -> None:
    folder = tmp_path / "a=b"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert read_model_argument(str(folder)) == ("a=b", folder)


def test_what_is_no_checkpoint_is_refused(tmp_path: Path, checkpoint: Path) -> None:
    with pytest.raises(SetupError, match="is not a directory"):
        read_model_argument(str(tmp_path / "none"))
    with pytest.raises(SetupError, match=r"no config\.json"):
        read_model_argument(str(tmp_path))
    with pytest.raises(SetupError, match="two models are named 'glm'"):
        write_models(tmp_path, (str(checkpoint), f"glm={checkpoint}"), device="cpu", options={})
    with pytest.raises(SetupError, match="cannot be a model's name"):
        write_models(tmp_path, (f"a b={checkpoint}",), device="cpu", options={})


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"params.json": "{}", "consolidated.00.pth": "", "tokenizer.model": ""}, "is in Meta's own layout"),
        ({"consolidated.00.pth": ""}, "the same model in transformers' layout, with config.json"),
        ({"config.json": '{"model_type": "phi3"}'}, "model_type 'phi3' is not supported; chatglm, "),
        ({"config.json": '{"model_type": "llama"}'}, "no weights: neither model.safetensors"),
        (
            {"config.json": '{"model_type": "llama"}', "model.safetensors": "", "tokenizer.model": ""},
            "tokenizer.json: missing",
        ),
        ({"config.json": '{"model_type": "chatglm"'}, "config.json: not JSON"),
    ],
)
def test_what_cannot_be_loaded_gets_no_entry(tmp_path: Path, files: dict[str, str], words: str) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    with pytest.raises(SetupError, match=re.escape(words)) as refused:
        write_models(tmp_path, (f"glm={folder}",), device="cpu", options={})
    assert str(refused.value).startswith(f"--model glm={folder}: ")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_entries_are_written(tmp_path: Path, checkpoint: Path) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()
    options = {"dtype": "float32", "max_running": 7, "max_batched_tokens": 99, "max_context": None}
    models = (str(checkpoint), f"b={checkpoint}")
    written = write_models(repository, models, device="cpu", options=options)
    assert written == ["glm", "b"]
    config = (repository / "b" / "config.pbtxt").read_text()
    assert all(f'string_value: "{value}"' in config for value in ("float32", 7, 99))
    assert "max_context" not in config


def test_the_built_in_model_is_served_where_none_is_named(tmp_path: Path) -> None:
    assert write_models(tmp_path, (), device="cpu", options={}) == ["chatglm3-demo"]
    assert str(BUILT_IN_CHECKPOINT) in (tmp_path / "chatglm3-demo" / "config.pbtxt").read_text()
    for name in ("config.json", "tokenizer.model", "tokenizer_config.json", "model.safetensors", "README.md"):
        assert (BUILT_IN_CHECKPOINT / name).is_file()


def test_a_name_on_a_hub_is_not_a_folder(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"hf download THUDM/chatglm3-6b --local-dir chatglm3-6b"):
        read_model_argument("THUDM/chatglm3-6b")
    with pytest.raises(SetupError, match="is not a directory"):
        read_model_argument(str(tmp_path / "a" / "b"))


def test_pointers_of_git_lfs_are_named(tmp_path: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    (tmp_path / "config.json").write_text("{}")
    read_model_argument(str(tmp_path))
    for name in ("b.bin", "a.model"):
        (tmp_path / name).write_text(pointer)
    with pytest.raises(SetupError, match=r"a\.model, b\.bin: pointers of Git LFS"):
        read_model_argument(str(tmp_path))
