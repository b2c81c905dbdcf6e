"""What CONTRIBUTING.md and the forms promise: recipes name what there is, hooks are the pinned tools."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_it_is_short() -> None:
    assert len(TEXT.splitlines()) <= 200


@pytest.mark.parametrize("place", sorted(set(re.findall(r"`(tests/[\w/]+\.py)` \(`(test_\w+)`\)", TEXT))))
def test_a_named_test_exists(place: tuple[str, str]) -> None:
    file, name = place
    assert re.search(rf"^(async )?def {name}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)


def test_recipes_name_tests() -> None:
    recipes = TEXT.split("\n## Recipes\n")[1].split("\n### ")[1:]
    assert len(recipes) == 4
    assert all("tests/" in recipe for recipe in recipes)


def test_folders_and_files_named_exist() -> None:
    named = set(re.findall(r"`((?:gateway|triton_models|tests|docs|deploy)/[\w/.]+)`", TEXT))
    assert {name for name in named if not (ROOT / name).exists()} == set()


def test_hooks_run_the_pinned_tools() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    assert [each["repo"] for each in config["repos"]] == ["local"]
    pins = set((ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines())
    hooks = config["repos"][0]["hooks"]
    assert {pin for hook in hooks for pin in hook["additional_dependencies"]} <= pins
    assert [hook["entry"].split()[:2] for hook in hooks] == [["ruff", "check"], ["ruff", "format"]]


def test_forms_are_forms() -> None:
    check = Path(sys.executable).with_name("check-jsonschema")
    forms = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    assert len(forms) == 2
    done = subprocess.run(
        [check, "--builtin-schema", "vendor.github-issue-forms", *forms],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
