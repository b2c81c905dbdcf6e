import json
import os
import subprocess
import sys


def test_neither_sizes_nor_addresses_compile_a_kernel_again() -> None:
    # A fresh process: this one interprets the kernels, or may.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.triton_models.engine.kernels.variants"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # Four of the decodes' kernel: with and without new tokens, of few rows, which begin early, and of many;
    # two of the prompts': with and without whole blocks; and two for up to 128 and up to 256 rows.
    assert json.loads(done.stdout) == {"_decode": 4, "_share_out": 2, "_prefill": 2, "_rotate_store": 1}
