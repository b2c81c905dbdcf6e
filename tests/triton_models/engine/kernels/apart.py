"""Runs what needs the compiler in a process of its own: this one interprets the kernels, or may."""

import json
import os
import subprocess
import sys
from typing import Any


def printed_by(module: str) -> Any:
    """Return the JSON that a module here prints when it is run without the interpreter, and without a GPU.

    What is compiled for another GPU must not depend on the one that is there.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.triton_models.engine.kernels.{module}"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
