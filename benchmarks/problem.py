"""What is measured: shapes, their work (FLOP, bytes) and the floors that follow."""

import dataclasses
import re
from collections.abc import Sequence

SMALL_M, LARGE_M = 512, 1024  # rows with m <= 512 and m >= 1024 are judged apart
_FP8_FLOP_PER_CLOCK = 8192  # one sm90 SM, dense wgmma on 8-bit operands
_BOOST_HZ = 1.83e9  # the clock of the data sheet's 1979 TFLOPS: 132 SMs * 8192 * 1.83 GHz

# The rows of benchmarks/h200_peers.json: DeepSeek-V3's layers at inference and training sizes.
_SMALL_NK = ((2112, 7168), (4096, 7168), (7168, 2048), (7168, 16384))
_DENSE = (
    *((m, n, k) for m in (1, 8, 16, 32, 64, 128, 256) for n, k in _SMALL_NK),
    *((64, 24576, 1536), (128, 24576, 1536), (128, 32768, 512), (512, 7168, 2048)),
    *((1024, 4096, 7168), (4096, 576, 7168), (4096, 2112, 7168), (4096, 4096, 7168)),
    *((4096, 7168, 2048), (4096, 7168, 16384), (4096, 24576, 1536), (4096, 32768, 512)),
    *((8192, 8192, 8192), (16384, 6144, 7168)),
)
_DENSE_SUSTAINED = (
    *((4096, 7168, 16384), (8192, 8192, 8192), (16384, 6144, 7168), (4096, 4096, 7168)),
    *((4096, 7168, 2048), (4096, 24576, 1536), (4096, 32768, 512), (4096, 2112, 7168)),
)
_WGRAD = ((2112, 7168, 4096), (7168, 2048, 4096), (4096, 7168, 4096), (7168, 16384, 4096))
_QUANTIZE = ((4096, 7168), (8192, 4096), (8192, 7168), (8192, 14336), (32768, 7168))
# (groups, m, n, k), where m, or k for ragged_wgrad, is what one group is expected to have.
_GROUPED = {
    "ragged": (
        *((4, 8192, 4096, 7168), (4, 8192, 7168, 2048), (8, 4096, 4096, 7168)),
        *((8, 4096, 7168, 2048), (32, 256, 4096, 7168), (32, 256, 7168, 2048)),
        (8, 4096, 6144, 7168),
    ),
    "masked": (
        *((32, 192, 6144, 7168), (32, 192, 7168, 3072), (6, 1024, 4096, 4096)),
        *((32, 20, 6144, 7168), (32, 20, 7168, 3072)),
    ),
    "ragged_wgrad": ((4, 4096, 7168, 8192), (8, 7168, 2048, 4096), (16, 4096, 7168, 2048)),
}
# What --shape looks like; E is the expected m, or k, of one group.
_FORMS = {
    "quantize": "MxK",
    "ragged": "GxExNxK",
    "masked": "GxExNxK",
    "ragged_wgrad": "GxMxNxE",
}


@dataclasses.dataclass(frozen=True)
class Shape:
    """(m, k) x (n, k) -> (m, n); n is None for `quantize`, whose input is (m, k)."""

    m: int
    n: int | None
    k: int

    def __str__(self) -> str:
        return "x".join(str(dim) for dim in (self.m, self.n, self.k) if dim is not None)

    @property
    def size_class(self) -> str | None:
        """The rows that this one is judged with; None if it is left out."""
        if self.m >= LARGE_M:
            return f"m >= {LARGE_M}"
        return f"m <= {SMALL_M}" if self.m <= SMALL_M else None


@dataclasses.dataclass(frozen=True)
class GroupedShape(Shape):
    """`groups` products; m, or k where k is ragged, is what one group is expected to have."""

    groups: int

    def __str__(self) -> str:
        return f"{self.groups}x{super().__str__()}"

    @property
    def size_class(self) -> str | None:
        return "all sizes"


@dataclasses.dataclass(frozen=True)
class Work:
    """What a call must do at least: every input read once, every output written once."""

    flop: int
    num_bytes: int

    def tflops(self, us: float) -> float:
        return self.flop / us / 1e6

    def gbps(self, us: float) -> float:
        return self.num_bytes / us / 1e3

    def hbm_floor_us(self, copy_gbps: float) -> float:
        return self.num_bytes / copy_gbps / 1e3

    def tensor_floor_us(self, num_sms: int) -> float:
        return self.flop / (num_sms * _FP8_FLOP_PER_CLOCK * _BOOST_HZ) * 1e6


def parse_shape(text: str, family: str) -> Shape:
    """Parses `MxNxK`, or what the family has instead.

    Raises: ValueError if the text has another form.
    """
    form = _FORMS.get(family, "MxNxK")
    if not re.fullmatch("x".join([r"[1-9]\d*"] * (form.count("x") + 1)), text):
        raise ValueError(f"bench: --shape must be {form} with positive sizes; got {text}")
    dims = [int(dim) for dim in text.split("x")]
    if len(dims) == 4:
        return _grouped_shape(*dims)
    return Shape(dims[0], dims[1] if len(dims) == 3 else None, dims[-1])


def _grouped_shape(groups: int, m: int, n: int, k: int) -> GroupedShape:
    return GroupedShape(m, n, k, groups)


def default_shapes(family: str, rows: str = "all", sustained: bool = False) -> Sequence[Shape]:
    """The family's own rows. rows: "small" (m <= 512), "large" (m >= 1024) or "all"."""
    if family in _GROUPED:
        shapes = [_grouped_shape(*dims) for dims in _GROUPED[family]]
    elif family == "quantize":
        shapes = [Shape(m, None, k) for m, k in _QUANTIZE]
    elif family == "wgrad":
        shapes = [Shape(*shape) for shape in _WGRAD]
    else:
        shapes = [Shape(*shape) for shape in (_DENSE_SUSTAINED if sustained else _DENSE)]
    if rows == "small":
        return [shape for shape in shapes if shape.m <= SMALL_M]
    if rows == "large":
        return [shape for shape in shapes if shape.m >= LARGE_M]
    return shapes


def gemm_work(shape: Shape, *, is_1d1d: bool, out_bytes: int, accumulate: bool) -> Work:
    """FP8 operands, f32 scales (1x128 on lhs; on rhs 1x128 if 1d1d, else 128x128), one result."""
    m, n, k = shape.m, shape.n or 0, shape.k
    num_blocks = _ceil_div(k, 128)
    rhs_scales = (n if is_1d1d else _ceil_div(n, 128)) * num_blocks
    values = (m + n) * k
    out = m * n * out_bytes * (2 if accumulate else 1)
    return Work(2 * m * n * k, values + 4 * (m * num_blocks + rhs_scales) + out)


def quantize_work(shape: Shape, num_results: int, scales: Sequence[int]) -> Work:
    """bf16 in; `num_results` FP8 arrays of the input's size and `scales` f32 scale counts out."""
    elems = shape.m * shape.k
    return Work(0, 2 * elems + num_results * elems + 4 * sum(scales))


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
