"""Figures that the text of a page quotes are those of the results files."""

from collections.abc import Iterator

import pytest

from benchmarks.pages.results import Row, find, load, ratio
from benchmarks.provenance import ROOT


def _row(table: str, **labels) -> Row:
    row = find(table, **labels)
    assert row is not None, (table, labels)
    return row


def _rows(table: str) -> list[Row]:
    document = load(table)
    assert document is not None, table
    return document["rows"]


def _ratios(table: str, *peers: str) -> list[float]:
    found = (ratio(row, peer) for row in _rows(table) for peer in peers)
    return [value for value in found if value is not None]


def _quotes() -> Iterator[tuple[str, str]]:
    """(page, what it must say)."""
    few = _row("dense", m=64, n=7168, k=16384)
    quantised = lambda m, k, mode: _row("quantize", m=m, k=k, mode=mode)["us"]
    step = _row("step", name="llama3_8b_block")
    yield "recipes", f"{few['us']:.1f} us"
    yield "recipes", f"{quantised(8192, 14336, 'blocks'):.1f} us"
    rows, both = quantised(8192, 7168, "rows"), quantised(8192, 7168, "rows+columns")
    yield "recipes", f"{rows:.1f} us in place of {both:.1f} us"
    bf16 = _ratios("wgrad", "torch_bf16", "xla_bf16")
    yield "recipes", f"{min(bf16):.2f} to {max(bf16):.2f} times as long"
    mlp = ratio(_row("matmul", layer="llama3_8b_mlp"), "xla_bf16")
    yield "recipes", f"{mlp:.2f} times as long for the MLP of Llama-3-8B"
    steps = step["peers_span_us"]["xla_bf16"] / step["span_us"]
    yield "recipes", f"{steps:.2f} times for a whole training step of a Llama-3-8B block"
    model = _row("model", name="llama3_8b_4_layers")
    spans = model["peers_span_us"]
    yield "recipes", f"Llama-3-8B takes {spans['square_wgrad'] / model['span_us']:.2f} of the time"
    in_fp8 = spans["xla_bf16"] / model["span_us"], spans["xla_bf16"] / spans["fp8_head_swiglu"]
    yield "flax", f"bf16 takes {in_fp8[0]:.2f} times as long for a training step"
    yield "flax", f"it takes {in_fp8[1]:.2f} times as long"
    scanned = _row("model", name="llama3_8b_4_layers_scanned")
    spans = scanned["peers_span_us"]
    plain, once = (spans["xla_bf16"] / us for us in (scanned["span_us"], spans["quantised_once"]))
    yield "flax", f"bf16 takes {plain:.2f} times as long, and {once:.2f} times with weights"
    block = _row("step", name="deepseek_v3_block")
    in_bf16 = block["peers_span_us"]["tokamax"] / block["span_us"]
    yield (
        "convergence",
        f"{steps:.2f}x bf16 for a Llama-3-8B block and {in_bf16:.2f}x tokamax's bf16",
    )
    for tokens in (8192, 4096):
        ms = lambda sums, tokens=tokens: (
            _row("h100_fsdp_x4", tokens=tokens, mode="unrolled", sums=sums)["us"] / 1e3
        )
        yield "recipes", f"{ms('bf16'):.1f} ms in place of {ms('f32'):.1f} ms"
    kept = [ratio(row, "fp8_gate_up") for row in _rows("moe")]
    yield "recipes", "take {:.2f}, {:.2f}, {:.2f} and {:.2f} times as long".format(*kept)
    yield "inference", f"{few['us']:.1f} us on an H200, and {few['peers']['torch_bf16']:.1f} us"
    one, *few_tokens, many = _ratios("decode", "xla_bf16")
    yield "inference", f"take {one:.2f} times as long for one token"
    yield "inference", f"{min(few_tokens):.2f} to {max(few_tokens):.2f} times for 4 to 16"
    yield "inference", f"{many:.2f} times for 64"
    spans = [f"{row['span_us']:.0f}" for row in _rows("decode")]
    in_bf16 = [f"{row['peers_span_us']['xla_bf16']:.0f}" for row in _rows("decode")]
    listed = lambda texts: f"{', '.join(texts[:-1])} and {texts[-1]}"
    yield "performance", f"these steps take {listed(spans)} us, and in bf16 {listed(in_bf16)}"
    lax = _ratios("ragged", "lax_ragged_dot")
    yield "migration/lax", f"{min(lax):.0f} to {max(lax):.0f} times as long"
    layers = _ratios("moe", "tokamax")
    yield "migration/tokamax", f"{min(layers):.2f} to {max(layers):.2f} times as long"
    product = lambda row: row["peers"]["unused_undefined"]
    cleared = [100 * (row["all_us"] / product(row) - 1) for row in _rows("masked")]
    yield "migration/deepgemm", f"{min(cleared):.0f} to {max(cleared):.0f} % longer"


@pytest.mark.parametrize("page, quote", list(_quotes()))
def test_page_quotes_the_files(page, quote):
    text = (ROOT / "docs" / f"{page}.md").read_text()
    assert quote in " ".join(text.split())
