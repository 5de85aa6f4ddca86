"""The rows that each family measures, by name of the set."""

import functools
import math
import random
from collections.abc import Sequence

from benchmarks.problem import LARGE_M, SMALL_M, GroupedShape, Shape

ROW_SETS = ("all", "small", "large", "held-out", "random", "curve", "short", "narrow")
_SEED = 20261123

# DeepSeek-V3's layers at inference and training sizes.
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
# Rows and f of DeepSeek-V3, Qwen3-235B and Mixtral.
_ACTIVATION = ((16384, 2048), (32768, 1536), (16384, 14336))
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
_GROUPED["ragged_wgrad_square"] = _GROUPED["ragged_wgrad"]

# Held out: no constant of the package was fitted to these.
_HELD_OUT_DENSE = (
    # Odd sizes; Qwen3-32B, Llama-3-70B; vision and audio encoders.
    *((333, 1408, 4304), (333, 18432, 4304), (2999, 4304, 18432), (1000, 5120, 5120)),
    *((700, 10240, 8192), (6000, 3072, 12288), (3000, 7168, 7168), (77, 5120, 2880)),
    *((4096, 576, 7168), (5000, 5000, 5000)),
    *((8192, 10240, 8192), (4096, 8192, 8192), (8192, 57344, 8192), (8192, 8192, 28672)),
    # Few rows, not a multiple of anything.
    *((m, 10240, 8192) for m in (1, 3, 7, 17, 33, 65, 100, 127)),
    *((m, 8192, 28672) for m in (5, 24, 48, 96)),
    *((m, 5120, 5120) for m in (2, 40, 80, 120)),
)
# (hidden, expert intermediate, experts, top-k) of mixtures of experts in use.
MODELS = {
    "deepseek_v3": (7168, 2048, 256, 8),
    "deepseek_v4_flash": (4096, 2048, 256, 6),
    "deepseek_v4_pro": (7168, 3072, 384, 6),
    "kimi_k2": (7168, 2048, 384, 8),
    "glm_5": (6144, 2048, 256, 8),
    "qwen3_235b": (4096, 1536, 128, 8),
    "qwen3_30b": (2048, 768, 128, 8),
    "gpt_oss_120b": (2880, 2880, 128, 4),
}
_SHORT = ((1, 2112, 7168), (8, 7168, 2048), (16, 4096, 7168), (64, 2112, 7168))
_SHORT += ((128, 7168, 2048), (256, 4096, 7168))
# Few rows and columns: a latent of DeepSeek-V3, keys or values of Llama-3-8B, Qwen3-32B and
# Llama-3-70B, and of the last on one of eight GPUs.
_NARROW_NK = ((576, 7168), (1024, 4096), (1024, 5120), (1024, 8192), (128, 8192))
_NARROW = tuple((m, n, k) for n, k in _NARROW_NK for m in (1, 8, 32, 64))
_CURVE_M = (1, 4, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
_CURVE_M += (6144, 8192, 12288, 16384)
_CURVE_GROUPS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_CURVE_ROWS = 8192


def row_shapes(
    family: str, rows: str = "all", *, sustained: bool = False, num_random: int = 0
) -> Sequence[Shape]:
    """The family's rows of that set, one of ROW_SETS. Empty where the family has none of it.

    num_random: how many to draw, for "random".
    """
    if rows == "held-out":
        return _held_out(family)
    if rows == "random":
        return draw_shapes(family, num_random)
    if rows == "curve":
        return _curve(family)
    if rows == "short":
        return [Shape(*dims) for dims in _SHORT] if family == "dense" else []
    if rows == "narrow":
        return [Shape(*dims) for dims in _NARROW] if family == "dense" else []
    shapes = _default_shapes(family, sustained)
    if rows == "small":
        return [shape for shape in shapes if shape.m <= SMALL_M]
    if rows == "large":
        return [shape for shape in shapes if shape.m >= LARGE_M]
    return shapes


def _default_shapes(family: str, sustained: bool) -> Sequence[Shape]:
    if family in _GROUPED:
        return [grouped_shape(*dims) for dims in _GROUPED[family]]
    if family == "quantize":
        return [Shape(m, None, k) for m, k in _QUANTIZE]
    if family == "activation":
        return [Shape(m, None, f) for m, f in _ACTIVATION]
    if family in ("wgrad", "wgrad_square"):
        return [Shape(*shape) for shape in _WGRAD]
    return [Shape(*shape) for shape in (_DENSE_SUSTAINED if sustained else _DENSE)]


def grouped_shape(groups: int, m: int, n: int, k: int, **how: str | int) -> GroupedShape:
    return GroupedShape(m, n, k, groups, **how)  # pyright: ignore[reportArgumentType]


def _held_out(family: str) -> list[Shape]:
    if family == "dense":
        return [Shape(*dims) for dims in _HELD_OUT_DENSE]
    if family not in ("ragged", "masked"):
        return []
    shapes: list[Shape] = []
    for i, (hidden, inter, experts, top_k) in enumerate(MODELS.values()):
        up, down = (2 * inter, hidden), (hidden, inter)
        if family == "ragged":
            # 4096 tokens a GPU in training, 8 GPUs or 32; and 256 tokens of one GPU, Zipf-like.
            for ep, tokens, (n, k) in ((32, 4096, up), (8, 4096, down)):
                groups = experts // ep
                expected = max(1, tokens * top_k // groups)
                shapes.append(grouped_shape(groups, expected, n, k, sizes="zipf" if i % 2 else ""))
            if experts * 3 * hidden * inter < 8e9:  # of one GPU, or of two
                few = (1, 4, 12, 24, 40)[i % 5]
                shapes.append(grouped_shape(experts, few, *down, sizes="zipf"))
        else:
            shapes.append(grouped_shape(experts // 32, (8, 40)[i % 2], *up))
    if family == "ragged":
        shapes += [grouped_shape(512, few, 1536, 2048, sizes="zipf") for few in (2, 16)]
    return shapes


def _curve(family: str) -> Sequence[Shape]:
    if family == "dense":
        return [Shape(m, 4096, 7168) for m in _CURVE_M]
    if family != "ragged":
        return []
    curve = [grouped_shape(g, _CURVE_ROWS // g, 1536, 2048) for g in _CURVE_GROUPS]
    # As many rows and full groups, and empty ones between them.
    empty = [grouped_shape(64, 128, 1536, 2048, empty=e) for e in (0, 64, 192, 448, 960)]
    return curve + empty


def draw_shapes(family: str, num: int) -> list[Shape]:
    """`num` shapes, the same every time: extents are uniform in their logarithms."""
    chance = random.Random(f"{_SEED} {family}")

    extent = functools.partial(_draw_extent, chance)
    shapes: list[Shape] = []
    while len(shapes) < num:
        n, k = extent(512, 16384, 16), extent(512, 16384, 16)
        if family == "dense":
            shapes.append(Shape(extent(1, 16384, 1), n, k))
        elif family == "ragged":
            groups = extent(2, 256, 1)
            if groups * n * k <= 2e9:
                shapes.append(grouped_shape(groups, extent(4, 32768, 1) // groups + 1, n, k))
        else:
            return []
    return shapes


def _draw_extent(chance: random.Random, low: int, high: int, multiple: int) -> int:
    """A multiple, at least one, between these; uniform in its logarithm."""
    value = math.exp(chance.uniform(math.log(low), math.log(high)))
    return max(multiple, round(value / multiple) * multiple)


def draw_shapes_of_classes(num: int, seed: int, most: float = 1e12) -> list[Shape]:
    """`num` dense shapes of at most `most` multiplications, as many of each class of m.

    n and k are multiples of 16, 32, 64 or 128. 16 has two chances of five: k may then be a multiple
    of 16 alone, where loads take longest.
    """
    chance = random.Random(f"{_SEED} {seed}")
    classes = ((1, 16), (17, 64), (65, 256), (257, 1024), (1025, 4096), (4097, 16384))

    extent = functools.partial(_draw_extent, chance)
    shapes: list[Shape] = []
    while len(shapes) < num:
        n, k = (extent(512, 16384, chance.choice((16, 16, 32, 64, 128))) for _ in range(2))
        shape = Shape(extent(*classes[len(shapes) % len(classes)], 1), n, k)
        if shape.m * n * k <= most:
            shapes.append(shape)
    return shapes


def draw_groups_of_classes(num: int, seed: int, most: float = 2e11) -> list[GroupedShape]:
    """`num` shapes of groups of rows, as many of each class of mean rows of a group.

    At most `most` multiplications each, and weights of 1 GB. One of four has sizes by Zipf's law.
    n and k are drawn as in draw_shapes_of_classes.
    """
    chance = random.Random(f"{_SEED} groups {seed}")
    classes = ((1, 8), (9, 32), (33, 64), (65, 160), (161, 640), (641, 8192))

    extent = functools.partial(_draw_extent, chance)
    shapes: list[GroupedShape] = []
    while len(shapes) < num:
        n, k = (extent(512, 16384, chance.choice((16, 16, 32, 64, 128))) for _ in range(2))
        groups, rows = extent(1, 256, 1), extent(*classes[len(shapes) % len(classes)], 1)
        sizes = "zipf" if chance.random() < 0.25 else ""
        if groups * n * k <= 1e9 and groups * rows * n * k <= most:
            shapes.append(grouped_shape(groups, rows, n, k, sizes=sizes))
    return shapes
