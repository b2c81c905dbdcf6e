from typing import Any

import click
from click.testing import CliRunner

from wire.flags import model_flags
from wire.options import OPTIONS


@click.command()
@model_flags()
def command(**flags: Any) -> None:
    click.echo(flags)


def said(*arguments: str) -> str:
    return CliRunner().invoke(command, arguments).output


def test_flags_are_read_as_their_option_is() -> None:
    given = said("--max-context", "2048", "--kv-memory-gib", "0.5", "--dtype", "bfloat16")
    assert all(
        text in given for text in ("'max_context': 2048", "'kv_memory_gib': 0.5", "'max_running': None")
    )
    assert "max_context must be at least 32, not 8" in said("--max-context", "8")
    assert "'x' is not a whole number" in said("--max-context", "x")
    assert "dtype must be auto, float32" in said("--dtype", "int8")
    assert "[default: 128; 512 on a GPU]" in " ".join(said("--help").split())


def test_there_is_one_for_each_option_but_those_left_out() -> None:
    assert [parameter.name for parameter in command.params] == [option.name for option in OPTIONS]
    few = click.command()(model_flags(without=frozenset({"format"}))(command.callback))
    assert [parameter.name for parameter in few.params] == [option.name for option in OPTIONS[1:]]
