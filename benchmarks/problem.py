"""What is measured: shapes, their work (FLOP, bytes) and the floors that follow."""

import dataclasses
import re
from collections.abc import Sequence

SMALL_M, LARGE_M = 512, 1024  # rows with m <= 512 and m >= 1024 are judged apart
_FP8_FLOP_PER_CLOCK = 8192  # one sm90 SM, dense wgmma on 8-bit operands
_BOOST_HZ = 1.83e9  # the clock of the data sheet's 1979 TFLOPS: 132 SMs * 8192 * 1.83 GHz
FP8_TFLOPS = 1979  # of that data sheet

# What --shape looks like; E is the expected m, or k, of one group.
_FORMS = {
    "quantize": "MxK",
    "activation": "MxK",
    "ragged": "GxExNxK",
    "masked": "GxExNxK",
    "ragged_wgrad": "GxMxNxE",
    "ragged_wgrad_square": "GxMxNxE",
}


@dataclasses.dataclass(frozen=True)
class Shape:
    """(m, k) x (n, k) -> (m, n); n is None for `quantize` and `activation`: (m, k)."""

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
    """`groups` products; m, or k where k is ragged, is what one group is expected to have.

    sizes: how rows are spread: "" for evenly, but for 30 % up or down, or "zipf".
    empty: groups without rows, as many more, between the others.
    """

    groups: int
    sizes: str = ""
    empty: int = 0

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
        groups, m, n, k = dims
        return GroupedShape(m, n, k, groups)
    return Shape(dims[0], dims[1] if len(dims) == 3 else None, dims[-1])


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


def gated_work(shape: Shape, is_grad: bool) -> Work:
    """bf16 gate and up of `shape` in; FP8 rows and columns of h and their scales out.

    is_grad: dh in too, and rows and columns of dgate and dup out.
    """
    m, f = shape.m, shape.k
    width = 2 * f if is_grad else f
    scales = m * _ceil_div(width, 128) + width * _ceil_div(m, 128)
    return Work(0, 2 * m * f * (3 if is_grad else 2) + 2 * m * width + 4 * scales)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
