from dataclasses import fields
from typing import Any

import click
import pytest
from click.testing import CliRunner

from deploy.docker import start_triton
from triton_models.embedded import __main__ as embedded
from triton_models.embedded.model_flags import model_flags
from triton_models.embedded.models import ModelOptions


@click.command()
@model_flags
def command(**flags: Any) -> None:
    click.echo(ModelOptions(**flags))


def test_there_is_a_flag_for_each_option() -> None:
    options = {field.name for field in fields(ModelOptions)}
    assert [parameter.name for parameter in command.params if parameter.name not in options] == []
    assert options - {parameter.name for parameter in command.params} == {"device"}


@pytest.mark.parametrize("program", [embedded.main, start_triton.main])
def test_both_programs_have_them_all(program: click.Command) -> None:
    assert {parameter.name for parameter in command.params} < {each.name for each in program.params}


@pytest.mark.parametrize(("given", "dtype"), [((), None), (("auto",), None), (("bfloat16",), "bfloat16")])
def test_auto_leaves_the_choice_to_the_engine(given: tuple[str, ...], dtype: str | None) -> None:
    said = CliRunner().invoke(command, ["--dtype", *given] if given else []).output
    assert f"dtype={dtype!r}" in said
