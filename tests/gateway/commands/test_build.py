import importlib.util
import os
import sys

import pytest
from click.testing import CliRunner

from gateway.cli import main


def test_everything_goes_to_the_models_side(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _path, words: calls.append(words))
    assert CliRunner().invoke(main, ["build", "--model", "a b", "--help", "-x"]).exit_code == 0
    assert calls == [[sys.executable, "-m", "triton_models.build", "--model", "a b", "--help", "-x"]]


def test_help_is_asked_for_as_of_other_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _path, words: calls.append(words))
    CliRunner().invoke(main, ["build", "-h"])
    assert calls == [[sys.executable, "-m", "triton_models.build", "--help"]]


def test_the_gateway_alone_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    result = CliRunner().invoke(main, ["build"])
    assert result.exit_code == 1
    assert "in the clone, pip install '.[engine]'" in result.output
