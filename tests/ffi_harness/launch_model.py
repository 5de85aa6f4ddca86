"""What the device must be told in a launch, derived from shapes and config alone.

Independent of ffi/: tensor maps from the layouts that its headers state for the operands, the grid
of a GEMM from persistent CTAs over tiles, that of a quantiser from the units of a CTA, that of a
copier from the pieces of rows. What is left to golden_launches.json: the kernel's name, raster,
first_part and shared memory of a GEMM.
"""

from __future__ import annotations

from golden_cases import Case, num_blocks

BYTES = {"f8e4m3fn": 1, "f8e5m2": 1, "bf16": 2, "f16": 2, "f32": 4, "i32": 4}
_MAP_TYPES = {1: "uint8", 2: "bfloat16", 4: "float32"}


def expected(case: Case) -> dict:
    """The part of a record that can be derived; `params` by name."""
    derive = {"quantize": _quantize, "copy_rows": _copy_rows, "sum_rows": _sum_rows}.get(
        case.op, _gemm
    )
    return derive(case)


def _tensor_map(
    buffer: str, dtype: str, rows: int, columns: int, box: tuple, swizzle: int, promotion: int = 3
):
    """A map of a row-major (rows, columns) array; box: rows and columns."""
    return {
        "buffer": buffer,
        "type": _MAP_TYPES[BYTES[dtype]],
        "dims": [columns, rows],
        "row_stride": columns * BYTES[dtype],
        "box": [box[1], box[0]],
        "element_strides": [1, 1],
        "swizzle_bytes": swizzle,
        "l2_promotion": promotion,  # 3: 256 bytes; 2: 128
    }


def _tensor_maps(case: Case) -> dict:
    c = case.config
    lhs_type, (m, k) = case.args["lhs"]
    rhs_type, (rhs_rows, rhs_columns) = case.args["rhs"]
    out_type, (out_rows, out_columns) = case.rets["h" if c["gated"] else "out"]
    is_ragged_rows = c["grouping"] == 1
    # Where lhs ends inside what a CTA loads, only its rows are loaded, in plain 1d2d products.
    quantizes = c["quantizes_lhs"]
    is_plain = not (c["grouping"] or c["is_1d1d"] or c["accumulate"] or quantizes)
    loaded_rows = c["block_m"] // c["cluster_n"]
    part_rows = 32 if is_ragged_rows else m % loaded_rows if is_plain else 0
    # The CTAs of a cluster load a part each of what they share; a k-block is 128 bytes wide.
    # Rows that end inside a line of the L2 are fetched line by line, unless there are few.
    operand = lambda name, dtype, shape, box_rows: _tensor_map(
        name, dtype, *shape, (box_rows, 128), 128, 2 if shape[1] % 128 and m > 16 else 3
    )
    # 1x128 scales lie as [k/128][rows].
    scales = lambda name, rows, count: _tensor_map(name, "f32", num_blocks(k), rows, (1, count), 0)
    # A slab of 64 rows has 128 bytes of each, or 32 columns of bf16 where 64 do not divide a tile,
    # or all columns, without a swizzle, where 32 do not. f32 has no slabs there.
    is_whole = c["block_n"] % 32 != 0
    widest = 64 if out_type == "bf16" and c["block_n"] % 64 == 0 else 32
    slab_columns = c["block_n"] if is_whole else widest
    slab_bytes = 0 if is_whole else slab_columns * BYTES[out_type]
    has_slabs = c["num_slabs"] > 0 and not (is_whole and out_type == "f32")
    # Transposed, the 64 rows are 128 bytes or, in f32, two boxes.
    box = (slab_columns if c["transpose_out"] else 64, slab_columns)
    return {
        "lhs": None
        if quantizes
        else operand("lhs", lhs_type, (m, k), c["block_m"] // c["cluster_n"]),
        "rhs": operand(
            "rhs",
            rhs_type,
            (rhs_rows, rhs_columns),
            c["block_n"] // c["cluster_m"] // (1 + c["gated"]),
        ),
        "lhs_part": operand("lhs", lhs_type, (m, k), part_rows) if part_rows else None,
        # TMA wants rows of multiples of 16 bytes. With scales of up to 128 rows it is slow where 32
        # does not divide them. Groups start anywhere in a box.
        "lhs_scale_map": scales("lhs_scale", m, c["block_m"] + 4 * is_ragged_rows)
        if m % (8 if m <= 128 else 4) == 0 and c["cluster_k"] == 1 and not quantizes
        else None,
        "rhs_scale_map": scales("rhs_scale", rhs_rows, c["block_n"]) if c["is_1d1d"] else None,
        "out_map": _tensor_map("out", out_type, out_rows, out_columns, box, slab_bytes)
        if has_slabs and not c["gated"]
        else None,
    }


def _gemm(case: Case) -> dict:
    c = case.config
    m, k = case.args["lhs"][1]
    n = case.args["rhs"][1][0]
    if c["grouping"] == 0 and not (c["is_1d1d"] or c["transpose_out"]):
        n = case.rets["out"][1][1]
    if c["grouping"] == 1:
        n = 2 * case.rets["h"][1][1] if c["gated"] else case.rets["out"][1][1]
    g = case.args["group_sizes"][1][0] if c["grouping"] else 0
    name_if = lambda name, condition: name if condition else None
    params = _tensor_maps(case) | {
        "lhs_scale": name_if("lhs_scale", not c["quantizes_lhs"]),
        "rhs_scale": "rhs_scale",
        "accum": name_if("out", c["accumulate"]),
        "out": "h" if c["gated"] else "out",
        "out_scale": name_if("h_scale", c["gated"]),
        "m": m,
        "n": n,
        "k": k,
        "lhs_rows": 0 if c["quantizes_lhs"] else m,
        "lhs_values": name_if("lhs", c["quantizes_lhs"]),
        "lhs_columns": k if c["quantizes_lhs"] else 0,
        "num_groups": g,
        "rows_per_group": case.rows_per_group or 0,
        "group_sizes": name_if("group_sizes", c["grouping"]),
        "first_row": name_if("first_row", c["grouping"] == 1),
        "next_tile": name_if("next_tile", c["grouping"] == 1),
        "clears_rest": int(c["grouping"] == 1 and not c["gated"] and case.clears_unused == 1),
    }
    return {
        "grid": [_gemm_grid(case, m, n, g), 1],
        # A consumer, or two more warpgroups, quantise lhs.
        "block": 128
        * (c["num_consumers"] + (3 if c["quantizes_lhs"] and c["cluster_k"] == 1 else 1)),
        "cluster": c["cluster_m"] * c["cluster_n"] * c["cluster_k"],
        "zeroed": [
            *(["next_tile"] if c["grouping"] == 1 else []),
            *(["out"] if case.clears_unused == 2 else []),
        ],
        "params": params,
    }


def _gemm_grid(case: Case, m: int, n: int, g: int) -> int:
    """Persistent CTAs: as many as multiprocessors, or as there is work, in whole clusters."""
    c = case.config
    tiles = lambda extent, block: -(-extent // block)
    columns = tiles(n, c["block_n"] * c["cluster_n"])
    if c["grouping"] == 1:
        # Each group ends in a tile that is not full, and so do the rows before and behind them.
        num_units = (m // c["block_m"] + g + 2) * columns
    elif c["grouping"] == 2:
        num_units = g * tiles(m, c["block_m"]) * columns
    else:
        num_units = tiles(m, c["block_m"] * c["cluster_m"]) * columns
    cluster = c["cluster_m"] * c["cluster_n"] * c["cluster_k"]
    # In 1d1d a last, incomplete round is cut into its consumers' parts, if all of those fit.
    rest = num_units % c["num_sms"]
    can_cut = c["is_1d1d"] and c["grouping"] == 0 and cluster == 1
    if can_cut and rest * c["num_consumers"] <= c["num_sms"]:
        num_units += rest * (c["num_consumers"] - 1)
    most = c["num_sms"] // cluster
    if cluster == 4:
        most = min(most, 30)  # of the fake driver
    return min(most, num_units) * cluster


def _quantize(case: Case) -> dict:
    c = case.config
    mode, source = c["mode"], c["source"]
    is_row, is_swiglu, is_gather = mode == 0, source in (1, 2, 5), source in (3, 4)
    first = next(iter(case.args))
    *batch, rows, width = case.args[first][1]
    m = case.args["rows"][1][0] if is_gather else rows
    k = width // 2 if source == 1 else width
    g = case.args["group_sizes"][1][0] if c["ragged"] else 0
    columns = (m + 127 * g) // 128 * 128 if c["ragged"] else m
    num_m_blocks = num_blocks(columns)
    if c["ragged"] and mode in (2, 6):
        num_m_blocks = (m + 127 * (g + 2)) // 128  # the rows of no group, before and behind
    threads = 128 if is_row else 256
    # A warp takes 16 rows of a k-block, a CTA four warps of them or a tile of 128 x 128.
    units = -(-(-(-m // 16) * num_blocks(k)) // 4) if is_row else num_m_blocks * num_blocks(k)
    # 8 rows of 16 bytes of gate and up, and of dh, are prefetched for each thread; not of f32. Of
    # gathered FP8, 8 rows of 8 bytes.
    operands = 2 if source == 1 else 3
    row_bytes = 16 * operands if is_swiglu and c["input"] < 2 else 8 * (c["input"] >= 3)
    smem = threads * 8 * row_bytes
    resident = 132 * 512 // threads
    turns = 1
    if is_swiglu and not is_row:
        # Each CTA gets 3 tiles, or pairs of them, or more, and at most 4 start in place of one.
        turns = min(max(units // (1 + c["paired"]) // (3 * resident), 1), 4)
    grid = min(units, resident * turns) if smem else units
    has = lambda name: name if name in (*case.args, *case.rets) else None
    pointers = ("dh", "values", "scale", "transposed", "transposed_scale")
    more = ("group_sizes", "first_row", "x_scale", "rows", "weights", "dots")
    params = {name: has(name) for name in (*pointers, *more)} | {
        "x": first,
        "m": m,
        "k": k,
        "num_m_blocks": 0 if is_row else num_m_blocks,
        "num_columns": columns,
        "num_groups": g,
        "num_sources": rows if is_gather else 0,
    }
    return {
        "grid": [grid, batch[0] if batch else 1],
        "block": threads,
        "cluster": 1,
        "smem_bytes": smem,
        "zeroed": [],
        "params": params,
    }


def _copy_rows(case: Case) -> dict:
    (s, k), (_, copies) = case.args["x"][1], case.args["places"][1]
    pointers = ("x", "x_scale", "places", "values", "scale")
    params = {name: name for name in pointers}
    params |= {"num_sources": s, "num_copies": copies, "m": case.rets["values"][1][0], "k": k}
    # A warp takes 2048 bytes of a row.
    grid = -(-(s * -(-k // 2048)) // 8)
    return {
        "grid": [grid, 1],
        "block": 256,
        "cluster": 1,
        "smem_bytes": 0,
        "zeroed": [],
        "params": params,
    }


def _sum_rows(case: Case) -> dict:
    dtype, (s, k) = case.rets["sums"]
    params = {name: name for name in ("rows", "places", "weights", "sums")}
    m, places = case.args["rows"][1][0], case.args["places"][1][1]
    params |= {"num_sums": s, "num_places": places, "m": m, "k": k}
    # A warp takes 2048 bytes of a row.
    grid = -(-(s * -(-k * (4 if dtype == "f32" else 2) // 2048)) // 4)
    return {
        "grid": [grid, 1],
        "block": 128,
        "cluster": 1,
        "smem_bytes": 0,
        "zeroed": [],
        "params": params,
    }
