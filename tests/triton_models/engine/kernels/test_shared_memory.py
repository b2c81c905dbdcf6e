from tests.triton_models.engine.kernels.apart import printed_by

DESKTOP = 99 * 1024
"""Bytes for one program on GPUs of compute capability 8.6, 8.9 and 12.0 (CUDA C++ Programming Guide,
"Technical Specifications per Compute Capability"). A launch that needs more fails."""


HOPPER = 227 * 1024
"""The same for 9.0."""


def test_attention_fits_gpus_for_desktops_and_hopper() -> None:
    taken = printed_by("shared_memory")
    assert 0 < taken.pop("_attend") <= HOPPER
    assert taken.keys() == {"_decode", "_share_out", "_prefill"}
    assert max(taken.values()) <= DESKTOP
