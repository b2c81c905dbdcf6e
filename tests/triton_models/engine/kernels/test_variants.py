from tests.triton_models.engine.kernels.apart import printed_by


def test_neither_sizes_nor_addresses_compile_a_kernel_again() -> None:
    # Four of the decodes' kernel: with and without new tokens, of few rows, which begin early, and of many;
    # two of the prompts': with and without whole blocks; and two for up to 128 and up to 256 rows.
    expected = {"_decode": 4, "_share_out": 2, "_prefill": 3, "_rotate_store": 1}
    assert printed_by("variants") == expected
