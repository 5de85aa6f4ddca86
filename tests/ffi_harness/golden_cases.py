"""Named launches of every operation: what they are called with.

The harness makes these calls (`record`, `faults`); golden_launches.json has what the device was
told in each, and launch_model.py derives most of that anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import product

from package_configs import ACTIVATIONS, NUM_SMS, config_text
from shapes import Shape

from jax_fp8gemm._data.activation import Activation
from jax_fp8gemm._tuning import (
    copy_rows_config,
    few_rows,
    gated_config,
    partial_sums,
    quantize_config,
    split_k,
    sum_rows_config,
    tile_config,
)
from jax_fp8gemm._tuning.tile import TileConfig
from jax_fp8gemm._tuning.tile_config import GROUPED_CONTRACTION, GROUPED_ROWS

# Shapes of DeepSeek-V3's projections, and the edges: what each is here for.
SHAPES = {
    "deepseek-v3": Shape(4096, 7168, 2048),
    "deepseek-v3 decode": Shape(64, 2112, 7168),
    "one row": Shape(1, 576, 7168),
    "m no multiple of 4": Shape(4001, 4096, 512),
    "few rows, m no multiple of 8": Shape(36, 2112, 7168),
    "k and n not whole blocks": Shape(200, 2888, 2896),
    "short last row of tiles": Shape(4104, 24576, 1536),
    "last round cut": Shape(1024, 2304, 1024),
}


def num_blocks(x: int) -> int:
    return -(-x // 128)


@dataclass(frozen=True)
class Case:
    """A call. args, rets: name -> (short type, dims)."""

    name: str
    op: str
    config: dict[str, int]
    args: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    rets: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    rows_per_group: int | None = None
    clears_unused: int = 1  # given beside rows_per_group

    def text(self) -> str:
        """The case in the harness's format."""
        lines = [f"case {self.name}", f"op {self.op}"]
        if self.rows_per_group is not None:
            lines.append(f"rows_per_group {self.rows_per_group}")
            lines.append(f"clears_unused {self.clears_unused}")
        lines.append(f"config {config_text(self.config)}")
        for kind, buffers in (("arg", self.args), ("ret", self.rets)):
            for name, (dtype, dims) in buffers.items():
                lines.append(" ".join([kind, name, dtype, *map(str, dims)]))
        return "\n".join(lines) + "\n"


def all_cases() -> list[Case]:
    of_rows = *_copy_rows_cases(), *_sum_rows_cases()
    cases = [*_dense_cases(), *_grouped_cases(), *_quantize_cases(), *of_rows]
    assert len({case.name for case in cases}) == len(cases)
    return cases


# Products


def _tile_name(config: TileConfig) -> str:
    clusters = f" cluster {config.cluster_m}x{config.cluster_n}"
    name = f"{config.block_m}x{config.block_n} sub {config.sub_n}"
    if config.cluster_k > 1:
        return f"{name} cluster 1x1x{config.cluster_k}{' partial sums' * config.partial_sums}"
    return name + (clusters if config.cluster_m * config.cluster_n > 1 else "")


def _attributes(
    config: TileConfig,
    *,
    is_1d1d: bool,
    out: str,
    grouping: int = 0,
    e5m2=False,
    transpose_out=False,
):
    attributes = config.attributes(
        is_1d1d=is_1d1d,
        transpose_out=transpose_out,
        out_f32=out != "bf16",
        accumulate=out == "accumulate",
        lhs_e5m2=e5m2,
        rhs_e5m2=False,
        num_sms=NUM_SMS,
        grouping=grouping,
    )
    return {name: int(value) for name, value in attributes.items()}


def _dense(name: str, shape: Shape, config: TileConfig, out: str = "bf16", is_1d1d=False, **kw):
    m, n, k = shape
    out_type = "bf16" if out == "bf16" else "f32"
    args = {
        "lhs": ("f8e5m2" if kw.get("e5m2") else "f8e4m3fn", (m, k)),
        "lhs_scale": ("f32", (m, num_blocks(k))),
        "rhs": ("f8e4m3fn", (n, k)),
        "rhs_scale": ("f32", (n if is_1d1d else num_blocks(n), num_blocks(k))),
    }
    out_shape = (n, m) if kw.get("transpose_out") else (m, n)
    if out == "accumulate":
        args["accum"] = (out_type, out_shape)
    attributes = _attributes(config, is_1d1d=is_1d1d, out=out, **kw)
    return Case(name, "gemm", attributes, args, {"out": (out_type, out_shape)})


def _dense_cases() -> list[Case]:
    cases = []
    # Every tile once, on one shape after the other.
    for family, is_1d1d in (("1d2d", False), ("1d1d", True)):
        configs = tile_config.configs(is_1d1d=is_1d1d, with_clusters=True)
        for i, config in enumerate(configs):
            shape_name = list(SHAPES)[i % len(SHAPES)]
            name = f"dense {family} {_tile_name(config)}, {shape_name}"
            out = "f32" if is_1d1d else "bf16"
            cases.append(_dense(name, SHAPES[shape_name], config, out, is_1d1d))
    # f32 has no slabs where 32 does not divide the columns of a tile.
    name, shape = "dense 1d2d 128x112, f32 from registers", next(iter(SHAPES.values()))
    cases.append(_dense(name, shape, tile_config.TILE_128X112, "f32"))
    # Every shape once, in the largest tile.
    large = max(tile_config.CONFIGS, key=lambda c: c.block_m * c.block_n)
    for shape_name, shape in SHAPES.items():
        cases.append(
            _dense(f"dense 1d1d accumulate, {shape_name}", shape, large, "accumulate", True)
        )
        cases.append(_dense(f"dense 1d2d f32, {shape_name}", shape, large, "f32", e5m2=True))
    # Fewer rows of rhs than columns of the result.
    case = _dense("dense 1d2d, n no multiple of 8", Shape(200, 2888, 2896), large)
    cases.append(replace(case, args=case.args | {"rhs": ("f8e4m3fn", (2881, 2896))}))
    # Rows of lhs that are padded, and of rhs that are not.
    case = _dense("dense 1d2d, lhs padded", Shape(200, 2888, 2896), large)
    cases.append(replace(case, args=case.args | {"lhs": ("f8e4m3fn", (200, 2944))}))
    # One row of tiles and the largest k; and more tiles than clusters.
    for i, config in enumerate(split_k.SPLIT_K_CONFIGS):
        rows = config.block_m
        few, many = (rows - i, 576, split_k.SPLIT_K_MOST_K), (3 * rows, 4096, 1040)
        for shape, out in ((few, "bf16"), (many, "f32")):
            cases.append(_dense(f"dense {_tile_name(config)} {out}", shape, config, out))
    # Fewer rows than a tile, and more tiles than clusters.
    for i, config in enumerate(partial_sums.PARTIAL_SUMS_CONFIGS):
        rows, out = config.block_m, ("bf16", "f32")[i % 2]
        for shape in ((rows - 1 - i % 3, 576, 7168), (rows, 4096, 3088)):
            name = f"dense {_tile_name(config)} {out}, {shape[0]} rows"
            cases.append(_dense(name, shape, config, out))
    for i, config in enumerate(few_rows.QUANTIZING_CONFIGS):
        out, tile = ("bf16", "f32")[i % 2], f"{_tile_name(config)} slabs {config.num_slabs}"
        for m in (1, 8):
            cases.append(_quantizing(f"dense {tile} {out}, {m} rows quantised", config, m, out))
    for config, out in _transposed():
        name = f"dense transposed {_tile_name(config)} {out}"
        cases.append(_dense(name, (2048, 7168, 4000), config, out, transpose_out=True))
    return cases


def _quantizing(name: str, config: TileConfig, m: int, out: str) -> Case:
    n, k = 4096, 2056  # of lhs; rows of rhs are padded
    args = {
        "lhs": ("bf16", (m, k)),
        "rhs": ("f8e4m3fn", (n, num_blocks(k) * 128)),
        "rhs_scale": ("f32", (num_blocks(n), num_blocks(k))),
    }
    attributes = _attributes(config, is_1d1d=False, out=out)
    return Case(name, "quantizing_gemm", attributes, args, {"out": (out, (m, n))})


def _transposed() -> Iterable[tuple[TileConfig, str]]:
    return product(tile_config.TRANSPOSED_CONFIGS, ("bf16", "f32", "accumulate"))


def _grouped_cases() -> list[Case]:
    cases = []
    for i, config in enumerate(tile_config.configs(GROUPED_ROWS, is_1d1d=False)):
        out = ("bf16", "f32")[i % 2]
        for m, rows_per_group, g in ((4001, 0, 9), (8192, 0, 256), (2048, 128, 16)):
            form = f"masked {rows_per_group}" if rows_per_group else f"{m} rows"
            name = f"grouped rows {_tile_name(config)} {out}, {form}, {g} groups"
            case = _grouped_rows(name, config, out, m, g)
            cases.append(replace(case, rows_per_group=rows_per_group))
    masked = replace(cases[-1], name="grouped rows, unused rows left", clears_unused=0)
    ragged = replace(cases[-2], name="grouped rows, 8192 rows, unused left", clears_unused=0)
    filled = replace(cases[-1], name="grouped rows, unused rows filled before", clears_unused=2)
    cases += [masked, ragged, filled]
    for activation, e5m2 in product(("silu", *ACTIVATIONS), (False, True)):
        cases.append(_gated(activation, 65536, 16, e5m2=e5m2))
    for m in (4001, 4100):
        cases.append(_gated("silu", m, 9, pow2_scale=True))
    for config in tile_config.configs(GROUPED_CONTRACTION, is_1d1d=True):
        for out in ("bf16", "f32", "accumulate"):
            name = f"grouped contraction {_tile_name(config)} {out}"
            cases.append(_grouped_contraction(name, config, out))
    for config, out in _transposed():
        name = f"grouped contraction transposed {_tile_name(config)} {out}"
        cases.append(_grouped_contraction(name, config, out, transpose_out=True))
    return cases


def _grouped_rows(name: str, config: TileConfig, out: str, m: int, g: int) -> Case:
    n, k = 4096, 7168
    args = {
        "lhs": ("f8e4m3fn", (m, k)),
        "lhs_scale": ("f32", (m, num_blocks(k))),
        "rhs": ("f8e4m3fn", (g * n, k)),
        "rhs_scale": ("f32", (g * num_blocks(n), num_blocks(k))),
        "group_sizes": ("i32", (g,)),
        "first_row": ("i32", (1,)),
    }
    rets = {"out": (out, (m, n)), "next_tile": ("i32", (1,))}
    attributes = _attributes(config, is_1d1d=False, out=out, grouping=GROUPED_ROWS)
    return Case(name, "grouped_gemm", attributes, args, rets)


def _gated(activation: Activation, m: int, g: int, *, e5m2=False, pow2_scale=False) -> Case:
    f, k = 2048, 7168
    how = dict(e5m2=e5m2, pow2_scale=pow2_scale, activation=activation)
    config = gated_config.attributes(NUM_SMS, lhs_e5m2=False, rhs_e5m2=e5m2, **how)
    number = config["activation"]
    fmt = "e5m2" if e5m2 else "pow2" if pow2_scale else "e4m3"
    name = f"grouped gated {quantize_config.ACTIVATIONS[number]} {fmt}, {m} rows, {g} groups"
    args = {
        "lhs": ("f8e4m3fn", (m, k)),
        "lhs_scale": ("f32", (m, num_blocks(k))),
        "rhs": ("f8e5m2" if e5m2 else "f8e4m3fn", (g * 2 * f, k)),
        "rhs_scale": ("f32", (g * num_blocks(2 * f), num_blocks(k))),
        "group_sizes": ("i32", (g,)),
        "first_row": ("i32", (1,)),
    }
    rets = {
        "h": ("f8e5m2" if e5m2 else "f8e4m3fn", (m, f)),
        "h_scale": ("f32", (m, num_blocks(f))),
        "next_tile": ("i32", (1,)),
    }
    attributes = {name: int(value) for name, value in config.items()}
    return Case(name, "grouped_gated_gemm", attributes, args, rets)


def _grouped_contraction(
    name: str, config: TileConfig, out: str, transpose_out: bool = False
) -> Case:
    m, n, t, g = 2048, 7168, 4096 + 8 * 128, 8
    out_type = "bf16" if out == "bf16" else "f32"
    args = {
        "lhs": ("f8e4m3fn", (m, t)),
        "lhs_scale": ("f32", (m, num_blocks(t))),
        "rhs": ("f8e4m3fn", (n, t)),
        "rhs_scale": ("f32", (num_blocks(n) if transpose_out else n, num_blocks(t))),
        "group_sizes": ("i32", (g,)),
    }
    out_shape = (g * n, m) if transpose_out else (g * m, n)
    if out == "accumulate":
        args["accum"] = (out_type, out_shape)
    family = dict(is_1d1d=not transpose_out, transpose_out=transpose_out)
    attributes = _attributes(config, **family, out=out, grouping=GROUPED_CONTRACTION)
    return Case(name, "grouped_wgrad", attributes, args, {"out": (out_type, out_shape)})


# Quantisers

_SHORT_TYPES = ("bf16", "f16", "f32", "f8e4m3fn", "f8e5m2")
_SWIGLUS = ("swiglu", "swiglu_grad", "weighted_swiglu_grad")


def _quantize_cases() -> list[Case]:
    cases = []
    how = dict(e5m2=False, pow2_scale=False)
    configs = list(quantize_config.kernel_configs(**how))
    for activation in ACTIVATIONS:
        configs += quantize_config.activation_configs(activation, **how)
    for config in configs:
        mode = quantize_config.MODES[config["mode"]]
        source = quantize_config.SOURCES[config["source"]]
        dtype, ragged = _SHORT_TYPES[config["input"]], " ragged" if config["ragged"] else ""
        padded = " padded" if config["padded"] else ""
        paired = " paired" if config["paired"] else ""
        activation = quantize_config.ACTIVATIONS[config["activation"]]
        activation = "" if activation == "silu" else f" {activation}"
        name = f"quantize {source}{activation}{ragged}{padded}{paired} {mode} {dtype}"
        # An odd batch and extents that are no whole blocks.
        m, k, g = (4103, 2887, 0) if padded else (4104, 2816 if paired else 2888, 32)
        has_batch = mode.startswith("block") and not ragged
        batch = (3,) if has_batch and dtype == "bf16" else ()
        cases.append(_quantize(name, config, batch, m, k, g))
    return cases + _many_tiles()


def _many_tiles() -> list[Case]:
    """SwiGLU's CTAs start in 1 to 4 turns."""
    how = dict(e5m2=False, pow2_scale=False, is_ragged=True, activation="silu")
    cases = []
    for m, f in ((16384, 768), (16384, 2048), (16384, 3072), (16384, 14336)):
        for mode, source in (("row", "swiglu"), *(("row_column", s) for s in _SWIGLUS)):
            is_grad = source != "swiglu"
            pairs = (False, True) if is_grad else (False,)
            for is_paired in pairs:
                config = quantize_config.attributes(
                    mode, "bfloat16", **how, is_padded=False, is_paired=is_paired, source=source
                )
                name = f"quantize {source} ragged{' paired' * is_paired} {mode} bf16 {m}x{f}"
                cases.append(_quantize(name, config, (), m, f * (1 + is_grad), 8))
    return cases


def _quantize(name: str, config: dict, batch: tuple[int, ...], m: int, k: int, g: int) -> Case:
    config = {name: int(value) for name, value in config.items()}
    source = quantize_config.SOURCES[config["source"]]
    dtype, num_sources = _SHORT_TYPES[config["input"]], 1000
    args: dict[str, tuple[str, tuple[int, ...]]] = {}
    if source == "plain":
        args["x"] = (dtype, (*batch, m, k))
    elif source == "swiglu":
        args["gate_up"] = (dtype, (m, 2 * k))
    elif source == "swiglu_grad":
        args |= {"gate_up": (dtype, (m, k)), "dh": (dtype, (m, k // 2))}
    elif source == "weighted_swiglu_grad":
        args |= {"gate_up": (dtype, (m, k)), "dh": (dtype, (m, k // 2)), "weights": ("f32", (m,))}
    else:
        args["x"] = (dtype, (num_sources, k))
        if dtype.startswith("f8"):
            args["x_scale"] = ("f32", (num_sources, num_blocks(k)))
        args["rows"] = ("i32", (m,))
        if source == "weighted_gather":
            args["weights"] = ("f32", (m,))
    columns = m
    if config["ragged"]:
        args |= {"group_sizes": ("i32", (g,)), "first_row": ("i32", (1,))}
        columns = (m + 127 * g) // 128 * 128
    results = _results(config, batch, m, k, columns)
    if source == "weighted_swiglu_grad":
        results |= {"dots": ("f32", (num_blocks(k // 2), m))}
    return Case(name, "quantize", config, args, results)


def _results(config: dict, batch: tuple[int, ...], m: int, k: int, columns: int):
    mode = quantize_config.MODES[config["mode"]]
    kb, cb = num_blocks(k), num_blocks(columns)
    stored = (lambda row: 128 * num_blocks(row)) if config["padded"] else lambda row: row
    values = {"values": ("f8e4m3fn", (*batch, m, stored(k)))}
    transposed = {"transposed": ("f8e4m3fn", (*batch, k, stored(columns)))}
    row = values | {"scale": ("f32", (m, kb))}
    column = transposed | {"transposed_scale": ("f32", (k, cb))}
    block_scale = {"scale": ("f32", (*batch, cb, kb))}
    block_transposed = transposed | {"transposed_scale": ("f32", (*batch, kb, cb))}
    return {
        "row": row,
        "column": column,
        "row_column": row | column,
        "block": values | block_scale,
        "block_transposed": block_transposed,
        "block_both": values | transposed | block_scale,
        "row_block_transposed": row | block_transposed,
    }[mode]


# Copies of rows


def _copy_rows_cases() -> list[Case]:
    # DeepSeek-V3's tokens on one of two GPUs, a piece of 2048 bytes more or less, and the edges.
    shapes = [
        (16384, 8, 81920, 7168),
        *((300, 4, 1000, k) for k in (16, 128, 2048, 2064, 2880)),
        *((77, 3, 200, k) for k in (1, 127, 2047, 2049)),
        (1, 1, 1, 7168),
        (8, 40, 5, 4096),
    ]
    return [
        _copy_rows(f"copy_rows {s}x{k}, {copies} copies to {m} rows", s, copies, m, k, dtype)
        for i, (s, copies, m, k) in enumerate(shapes)
        for dtype in [("f8e4m3fn", "f8e5m2")[i % 2]]
    ]


def _copy_rows(name: str, s: int, copies: int, m: int, k: int, dtype: str) -> Case:
    config = {name: int(value) for name, value in copy_rows_config.attributes(k).items()}
    args = {
        "x": (dtype, (s, k)),
        "x_scale": ("f32", (s, num_blocks(k))),
        "places": ("i32", (s, copies)),
    }
    rets = {"values": (dtype, (m, k)), "scale": ("f32", (m, num_blocks(k)))}
    return Case(name, "copy_rows", config, args, rets)


# Sums of rows


def _sum_rows_cases() -> list[Case]:
    # DeepSeek-V3's tokens on one of four GPUs, a piece of 2048 bytes more or less, and the edges.
    shapes = [
        (81920, 32768, 8, 7168, "bf16"),
        (81920, 32768, 8, 1792, "bf16"),
        *((1000, 300, 4, k, "bf16") for k in (8, 1016, 1024, 1032, 1023)),
        *((1000, 300, 4, k, "f16") for k in (1024, 1025)),
        *((1000, 300, 4, k, "f32") for k in (512, 516, 515)),
        (5, 8, 40, 2048, "bf16"),
        (1, 1, 1, 1, "f32"),
    ]
    return [_sum_rows(*shape) for shape in shapes]


def _sum_rows(m: int, s: int, c: int, k: int, dtype: str) -> Case:
    dtypes = dict(zip(("bf16", "f16", "f32"), sum_rows_config.DTYPES, strict=True))
    attributes = sum_rows_config.attributes(dtypes[dtype], k)
    config = {name: int(value) for name, value in attributes.items()}
    args = {"rows": (dtype, (m, k)), "places": ("i32", (s, c)), "weights": ("f32", (s, c))}
    name = f"sum_rows {s}x{k} {dtype}, {c} of {m} rows"
    return Case(name, "sum_rows", config, args, {"sums": (dtype, (s, k))})
