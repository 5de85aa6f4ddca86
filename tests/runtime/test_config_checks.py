"""Configs of no kernel: each is refused in a sentence, and none ends a process."""

import pytest
from ext_program import run

_ext = pytest.importorskip("jax_fp8gemm._ext")

_GEMM = dict(block_m=128, block_n=128, sub_n=128, num_consumers=2, num_accums=1, num_stages=4,
             num_slabs=0, cluster_m=1, cluster_n=1, cluster_k=1, partial_sums=0, is_1d1d=0,
             out_f32=0, accumulate=0, lhs_e5m2=0, rhs_e5m2=0, transpose_out=0, grouping=0,
             num_sms=132, gated=0, activation=0, limit=0, alpha=0, up_offset=0, h_e5m2=0,
             h_pow2_scale=0, quantizes_lhs=0)  # fmt: skip
_QUANTIZE = dict(mode=0, input=0, e5m2=0, pow2_scale=0, ragged=0, padded=0, paired=0, source=1,
                 activation=0, limit=0, alpha=0, up_offset=0)  # fmt: skip

_SEED = 21
# A config that has a kernel, and values near what the rules speak of.
_PROGRAM = """
import random

GEMM = {gemm}
QUANTIZE = {quantize}
LIMITS = [-2**31, -2**30, -1, 0, 2**16, 2**30, 2**31 - 1]
SMALL = [1, 2, 3, 4, 5, 7, 8, 16, 24, 32, 33, 48, 63, 64, 65, 72, 80, 96, 127, 128, 136, 160, 192,
         224, 255, 256, 257]

def outcome(compile_kernel, config):
    try:
        compile_kernel(config)
    except ValueError as error:
        assert "; got " in str(error), error
        return "refused"
    except RuntimeError as error:  # a config that is accepted: there is no NVRTC to compile it
        assert str(error).startswith("NVRTC "), error
        return "accepted"

rng = random.Random({seed})
counts = dict(refused=0, accepted=0)
for i in range({num_calls}):
    valid, compile_kernel = rng.choice([(GEMM, ext.compile_gemm), (QUANTIZE, ext.compile_quantize)])
    config = dict(valid)
    for name in rng.sample(list(valid), rng.randint(1, 4)):
        kind = rng.random()
        config[name] = (rng.choice(SMALL) if kind < 0.6 else rng.choice(LIMITS) if kind < 0.8
                        else rng.randint(-2**31, 2**31 - 1))
    counts[outcome(compile_kernel, config)] += 1
print(counts["refused"], counts["accepted"])
"""


def test_no_config_ends_a_process():
    num_calls = 20_000
    program = _PROGRAM.format(seed=_SEED, num_calls=num_calls, gemm=_GEMM, quantize=_QUANTIZE)
    status, output, error = run(program, nvrtc_paths=["/none/libnvrtc.so"])
    assert status == 0, f"seed {_SEED}: status {status}: {error}"
    refused, accepted = map(int, output.split())
    assert refused + accepted == num_calls and min(refused, accepted) > 100


@pytest.mark.parametrize("sub_n", [136, 160, 192, 256])
def test_a_wgmma_wider_than_the_tile_is_refused(sub_n):
    """The number of wgmmas side by side is 0 then, and a rule divides by it."""
    code = f"""
        try:
            ext.compile_gemm({_GEMM | dict(sub_n=sub_n)})
        except ValueError as error:
            print(error)
        """
    status, output, _ = run(code)
    assert status == 0 and "block_n must be a multiple of sub_n" in output


@pytest.mark.parametrize(
    "bad",
    [
        dict(num_stages=2**31 - 1),
        dict(num_slabs=2**31 - 1),
        dict(num_consumers=-(2**31)),
        dict(block_m=2**31 - 1, block_n=2**31 - 1, num_stages=2**31 - 1),
        dict(cluster_m=2**31 - 1, cluster_n=2**31 - 1),
        dict(grouping=-1),
        dict(lhs_e5m2=2),
    ],
    ids=str,
)
def test_the_error_of_a_config_out_of_range_computes_nothing_from_it(bad):
    with pytest.raises(ValueError, match="config must have block_m, .* 0 or 1; got fp8") as error:
        _ext.compile_gemm(_GEMM | bad)
    assert "bytes of shared memory" not in str(error.value)


_GATED = _GEMM | dict(gated=1, grouping=1, block_n=256, num_slabs=1)


@pytest.mark.parametrize(
    "bad, message",
    [
        (dict(block_n=128), "gated must go with groups of rows.*; got fp8"),
        (dict(grouping=0), "gated must go with groups of rows.*, gated 1"),
        (dict(out_f32=1), "gated must go with groups of rows, bf16.*_f32"),
        (dict(num_slabs=2), "gated must go with .* and a slab; got .*_slabs2"),
        (dict(gated=0, activation=1), "activation, .* must be 0 without gated.* activation 1"),
        (dict(gated=0, h_e5m2=1), "h_e5m2 and h_pow2_scale must be 0 without.* h_e5m2 1"),
        (dict(gated=0, h_pow2_scale=1), "must be 0 without gated.* h_pow2_scale 1"),
        (dict(limit=1), "0 without; got .*, activation 0, limit 1, alpha 0"),
        (dict(activation=4), "limit above 0, with activation 4.*, activation 4, limit 0"),
        (dict(activation=5), "activation 0..4, flags 0 or 1; got .*bad_activation"),
        (dict(gated=2), "activation 0..4, flags 0 or 1; got "),
    ],
    ids=str,
)
def test_a_gated_config_of_no_kernel_is_refused(bad, message):
    with pytest.raises(ValueError, match=message):
        _ext.compile_gemm(_GATED | bad)


_QUANTIZING = _GEMM | dict(block_m=64, num_consumers=1, num_stages=8, quantizes_lhs=1)


@pytest.mark.parametrize(
    "bad, message",
    [
        (dict(quantizes_lhs=2), "flags 0 or 1; got fp8"),
        (dict(is_1d1d=1), "quantizes_lhs must go with dense products with 128x128 scales"),
        (dict(grouping=1), "quantizes_lhs must go with dense products"),
        (dict(transpose_out=1), "quantizes_lhs must go with .* without transpose_out"),
        (dict(accumulate=1, out_f32=1), "quantizes_lhs must go with .* and accumulate"),
        (dict(block_m=128), "quantizes_lhs must go with .* block_m 64.*; got fp8.*_quantizes_lhs"),
        (dict(block_m=128, num_consumers=2), "quantizes_lhs must go with .* one consumer"),
        (dict(cluster_n=4), "quantizes_lhs must go with .* no cluster"),
        (dict(num_stages=7), "quantizes_lhs must go with .* at least 8 stages"),
        # A lone consumer has 255 registers, but 232 where others quantise lhs. These are 240 sums.
        (dict(block_n=160, sub_n=160, num_accums=2), "must fit the registers of a consumer"),
        (dict(sub_n=8, block_m=8, block_n=64, cluster_k=4, num_consumers=2, num_accums=4,
              num_stages=24, partial_sums=1), "must go with block_m 8, without partial_sums"),
        (dict(sub_n=16, block_m=16, block_n=64, cluster_k=8, num_consumers=2, num_accums=4,
              num_stages=24), "cluster_k with quantizes_lhs must go with block_m 8"),
    ],
    ids=str,
)  # fmt: skip
def test_a_quantizing_config_of_no_kernel_is_refused(bad, message):
    with pytest.raises(ValueError, match=message):
        _ext.compile_gemm(_QUANTIZING | bad)


_SPLIT = _GEMM | dict(block_m=8, block_n=64, sub_n=8, num_accums=4, num_stages=24, cluster_k=4)


@pytest.mark.parametrize(
    "bad, message",
    [
        (dict(cluster_k=2), "cluster_k must be 1, 4 or 8 without partial_sums; got fp8"),
        (dict(cluster_k=9), "cluster_k 1..8, .*; got fp8"),
        (dict(partial_sums=2), "flags 0 or 1; got fp8"),
        (dict(partial_sums=1, cluster_k=1), "partial_sums must go with cluster_k above 1"),
        (dict(partial_sums=1, block_m=72, sub_n=72), "of 8, 16 .. 64 rows.*72x64.*_partial_sums"),
        (dict(partial_sums=1, block_m=12, sub_n=12), "of 8, 16 .. 64 rows"),
        (dict(partial_sums=1, num_accums=5), "num_accums <= 4 <= num_stages"),
        (dict(partial_sums=1, grouping=1), "must go with dense products with 128x128 scales"),
        (dict(num_sms=3), "num_sms >= cluster_m . cluster_n . cluster_k, .*; got .* num_sms 3"),
        (dict(block_m=64), "tiles of 8x64 or 16x64.*; got fp8_gemm_1d2d_64x64.*_cluster1x1x4"),
        (dict(sub_n=16), "sub_n = block_m"),
        (dict(num_consumers=1), "2 consumers"),
        (dict(cluster_m=2), "no other cluster"),
        (dict(num_stages=3), "num_accums <= 4 <= num_stages"),
        (dict(num_accums=5), "num_accums <= 4 <= num_stages"),
        (dict(is_1d1d=1), "must go with dense products with 128x128 scales"),
        (dict(grouping=1), "must go with dense products with 128x128 scales"),
        (dict(out_f32=1, accumulate=1), "without transpose_out and accumulate"),
        (dict(transpose_out=1), "without transpose_out and accumulate"),
        (dict(activation=1), "activation, .* must be 0 without gated.* activation 1"),
        (dict(h_e5m2=1), "h_e5m2 and h_pow2_scale must be 0 without.* h_e5m2 1"),
        (dict(partial_sums=1, h_pow2_scale=1), "must be 0 without gated.* h_pow2_scale 1"),
        (dict(limit=1), "0 without; got .*, activation 0, limit 1, alpha 0"),
    ],
    ids=str,
)
def test_a_split_config_of_no_kernel_is_refused(bad, message):
    with pytest.raises(ValueError, match=message):
        _ext.compile_gemm(_SPLIT | bad)


@pytest.mark.parametrize("flag", ["e5m2", "pow2_scale", "ragged", "padded", "paired"])
@pytest.mark.parametrize("value", [2, -1, 2**31 - 1])
def test_a_flag_is_0_or_1(flag, value):
    with pytest.raises(ValueError, match=rf"flags 0 or 1; got .*{flag} {value}"):
        _ext.compile_quantize(_QUANTIZE | dict(mode=2) | {flag: value})


@pytest.mark.parametrize(
    "bad, message",
    [
        (dict(activation=5), "activation must be 0..4, .*; got activation 5, source 1"),
        (dict(activation=-1), "activation must be 0..4, .*; got activation -1, source 1"),
        (dict(activation=1, source=0), "and 0 for a source other than .*; got activation 1, so"),
        (dict(activation=1, source=3), "and 0 for a source other than .*; got activation 1, so"),
        (dict(limit=1), "0 without; got activation 0, limit 1, alpha 0, up_offset 0"),
        (dict(activation=3, up_offset=-1), "0 without; got activation 3, .* up_offset -1"),
        (dict(activation=4), "limit above 0, with activation 4.*; got activation 4, limit 0"),
        (dict(activation=4, limit=-1), "bits of finite f32.*; got activation 4, limit -1"),
        (dict(activation=4, limit=0x7F800000), "bits of finite f32.*; got .*, limit 2139095040"),
        (dict(activation=4, limit=1, alpha=-(2**23)), "bits of finite f32.*, alpha -8388608"),
    ],
    ids=str,
)
def test_an_activation_of_no_kernel_is_refused(bad, message):
    with pytest.raises(ValueError, match=message):
        _ext.compile_quantize(_QUANTIZE | bad)


@pytest.mark.parametrize("value", [2**31, -(2**40), 10**30, 1.5, "1", None])
def test_a_field_is_a_32_bit_integer(value):
    with pytest.raises(ValueError, match="config must have an i32 mode; got "):
        _ext.compile_quantize(_QUANTIZE | dict(mode=value))
