"""The table of README: a few rows of the results files."""

from benchmarks.pages.machines import spread_text
from benchmarks.pages.results import (
    Row,
    find,
    has_other_kernels,
    is_within_noise,
    load,
    mean_ratio,
    ratio,
    ratio_of_all,
    ratio_of_products,
)

_PRODUCTS = ((4096, 4096, 7168), (8192, 8192, 8192), (64, 7168, 16384))
_LAYERS = {
    "deepseek_v3_ep32": "experts of DeepSeek-V3, 8 on a GPU, 32768 tokens, forward and backward",
    "mixtral_8x7b": "experts of Mixtral-8x7B, 16384 tokens, forward and backward",
}


def readme_table(prefix: str = "") -> str:
    """Products, layers and a training step, of those that have a row."""
    lines = ["| | FP8, this package | DeepGEMM | cuBLASLt FP8, our scale blocks | bf16 |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for m, n, k in _PRODUCTS:
        if row := find(f"{prefix}dense", m=m, n=n, k=k):
            ours = f"{row['us']:.1f} us, {row['tflops']:.0f} TFLOPS"
            peers = (_cell(row, name) for name in ("deepgemm", "cublaslt_block", "torch_bf16"))
            lines.append(f"| product {m} x {n} x {k} | {ours} | {' | '.join(peers)} |")
    if row := find(f"{prefix}matmul", layer="llama3_8b_mlp"):
        title = "MLP of Llama-3-8B, 8192 tokens, forward and backward"
        lines.append(f"| {title} | {row['us'] / 1e3:.2f} ms | | | {_cell(row, 'xla_bf16')} |")
    if row := find(f"{prefix}model", name="llama3_8b_4_layers"):
        title = "training step of 4 layers of Llama-3-8B in Flax NNX, 8192 tokens, `dot_general=`"
        lines.append(f"| {title} | {row['us'] / 1e3:.1f} ms | | | {_cell(row, 'xla_bf16')} |")
    for name, title in _LAYERS.items():
        if row := find(f"{prefix}moe", name=name):
            tokamax, lax = _cell(row, "tokamax"), _cell(row, "lax_ragged_dot")
            bf16 = f"tokamax {tokamax}, `jax.lax.ragged_dot` {lax}"
            lines.append(f"| {title} | {row['us'] / 1e3:.2f} ms | | | {bf16} |")
    return "\n".join(lines)


def _cell(row: Row, peer: str) -> str:
    """A peer's time and its ratio to ours; ~ where neither is faster for certain."""
    value = ratio(row, peer)
    if value is None:
        return "-"
    us = row["peers"][peer]
    text = f"{us:.1f} us" if us < 1000 else f"{us / 1e3:.2f} ms"
    return f"{text} ({value:.2f}x{'~' if is_within_noise(row, peer) else ''})"


def means_text(prefix: str = "") -> str:
    """Our speed over DeepGEMM's, by file, with its spread over machines where that is measured."""
    parts = []
    for table, title in (
        ("dense", "dense"),
        ("wgrad", "weight gradients"),
        ("ragged", "grouped"),
        ("masked", "masked"),
        ("ragged_wgrad", "grouped weight gradients"),
        ("dense_held_out", "held-out dense shapes"),
    ):
        document = load(prefix + table)
        rows = document["rows"] if document else []
        mean = mean_ratio(rows, "deepgemm", ratio_of_products)
        if mean is None:
            continue
        text = f"- {title}: {mean:.2f}x"
        if spread := spread_text(table, prefix):
            text += f" ({spread})"
        if has_other_kernels(rows):
            every = mean_ratio(rows, "deepgemm", ratio_of_all)
            text += f"; {every:.2f}x with every kernel of both calls"
        parts.append(text)
    return "\n".join(parts) or "DeepGEMM is in no file yet."
