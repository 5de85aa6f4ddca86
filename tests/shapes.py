"""Named real shapes and the edges, shared by tests and benchmarks.

m rows (tokens), n output features, k contraction. rhs is (n, k) in the primitives and (k, n) in
`matmul`.
"""

from typing import NamedTuple


class Shape(NamedTuple):
    m: int
    n: int
    k: int

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"


# DeepGEMM's dense test list (tests/generators.py): (n, k) of DeepSeek-V3's projections.
DEEPGEMM_NK = (
    (2112, 7168),
    (576, 7168),
    (24576, 1536),
    (32768, 512),
    (7168, 16384),
    (4096, 7168),
    (7168, 2048),
)
DEEPGEMM_M = (1, 128, 4096)
DENSE_FWD = tuple(Shape(m, n, k) for m in DEEPGEMM_M for n, k in DEEPGEMM_NK)
# Gradient of lhs: dout (4096, n) times rhs^T (k, n).
DENSE_DLHS = tuple(Shape(4096, k, n) for n, k in DEEPGEMM_NK)
# Gradient of rhs, 1d1d into f32: n x 4096 tokens x k, as DeepGEMM lists it.
DENSE_DRHS = tuple(Shape(n, 4096, k) for n, k in DEEPGEMM_NK)

# What each shape is here for.
AWKWARD = {
    "gpt-oss, k = 22.5 blocks": Shape(128, 2880, 2880),
    "n = 16.5 blocks, m one past a half tile": Shape(65, 2112, 7168),
    "n = 4.5 blocks, one row": Shape(1, 576, 2880),
    "n odd: no 16-byte rows": Shape(65, 129, 512),
    "m not a multiple of 128": Shape(4000, 576, 2880),
    "everything ragged, k not a multiple of 16": Shape(65, 129, 1003),
    "k below one block and not a multiple of 16": Shape(3, 40, 17),
    "one element": Shape(1, 1, 1),
    "n below any tile": Shape(130, 8, 384),
}

# (n, k) of one layer: name -> list. Sources: MaxText configurations and model cards.
MODELS = {
    "llama-3-8b": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    "llama-3-70b": ((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)),
    "deepseek-v3": (*DEEPGEMM_NK, (36864, 7168), (7168, 18432)),
    "gpt-oss-120b": ((2880, 2880),),
    "square": ((4096, 4096), (8192, 8192)),
}

# (rows, columns) for quantisation: a whole block, its neighbours, single rows and columns, ragged.
QUANTIZE = (
    (1, 1),
    (1, 128),
    (128, 1),
    (3, 127),
    (127, 129),
    (128, 128),
    (129, 257),
    (200, 96),
    (256, 2880),
    (65, 576),
    (1, 7168),
)

# (m rows, group_sizes), and what each is here for. Few pairs of m and g: each is a compilation.
GROUPS = {
    "one group": (130, (130,)),
    "one group holds all": (200, (0, 200, 0)),
    "around half a tile": (200, (63, 64, 65)),
    "around a tile": (384, (127, 128, 129)),
    "sum below m": (200, (70, 0, 60)),
    "sum above m": (200, (128, 100, 5)),
    "all empty": (200, (0, 0, 0)),
    "single rows": (5, (1, 1, 1, 1, 1)),
    "empty groups first, between and last": (140, (0, 2, 0, 0, 129, 9, 0)),
    "bad sizes": (140, (-3, 40, 0, 2**31 - 1, 9, -(2**31), 5)),
}
