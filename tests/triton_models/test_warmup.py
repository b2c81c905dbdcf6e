from pathlib import Path

import pytest
from click.testing import CliRunner

from triton_models import warmup
from wire.history import decode_history
from wire.sampling import Generation, decode_sampling
from wire.strings import unpack_strings


def written(folder: Path, entry: str, *arguments: str) -> dict[str, bytes]:
    (folder / entry).mkdir()
    result = CliRunner().invoke(warmup.main, [str(folder / entry), *arguments])
    assert result.exit_code == 0, result.output
    return {path.name: path.read_bytes() for path in (folder / entry / "warmup").iterdir()}


def test_the_files_of_a_stream_entry_hold_one_short_greedy_generation(tmp_path: Path) -> None:
    contents = written(tmp_path, "m-stream")
    assert set(contents) == {"prompt", "history", "sampling"}
    (prompt,), (history,), (document,) = (
        unpack_strings(contents[name]) for name in ("prompt", "history", "sampling")
    )
    assert prompt.decode()
    assert decode_history(history) == []
    sampling = decode_sampling(document)
    assert isinstance(sampling, Generation)
    assert (sampling.max_tokens, sampling.temperature, sampling.ignore_eos) == (2, 0.0, True)


@pytest.mark.parametrize("arguments", [(), ("--contract", "batched")])
def test_the_files_of_the_fields_entry(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    contents = written(tmp_path, "m", *arguments)
    values = {name: unpack_strings(raw) for name, raw in contents.items()}
    assert values == {
        "prompt": ["你好".encode()],
        "history": [b""],
        "temperature": [b"0"],
        "max_token": [b"48"],
    }


def test_the_files_of_the_other_contracts(tmp_path: Path) -> None:
    unbatched = written(tmp_path, "u", "--contract", "unbatched")
    assert (unbatched["max_token"], unbatched["history_len"]) == (b"\x30\0", b"\0\0")
    chatglm2 = written(tmp_path, "c", "--contract", "chatglm2")
    assert (chatglm2["history"], unpack_strings(chatglm2["history_len"])) == (b"", [b"0"])


def test_an_entry_that_is_not_there(tmp_path: Path) -> None:
    result = CliRunner().invoke(warmup.main, [str(tmp_path / "none")])
    assert result.exit_code == 2
    assert "does not exist" in result.output
