"""Tables of training steps and of the energy of a call."""

from benchmarks.pages.results import Row, load, ratio
from benchmarks.pages.tables import markdown
from benchmarks.problem import FP8_TFLOPS

_BF16_TFLOPS = FP8_TFLOPS / 2
_SUSTAINED = ("dense", "ragged", "matmul", "moe")


def steps_table(prefix: str = "") -> str:
    """Of each block and implementation: time with the gaps, tokens a second, share of the peak."""
    documents = [load(f"{prefix}{table}") for table in ("step", "model")]
    rows = [row for document in documents if document for row in document["rows"]]
    if not rows:
        return "No file `step.json` yet."
    header = ("block", "in", "kernels ms", "step ms", "tokens a second", "TFLOPS")
    header += ("of the FP8 peak", "of the bf16 peak", "peak GB", "ratio")
    lines = []
    for row in rows:
        for peer in ("", *row["peers"]):
            lines.append(_step_line(row, peer))
    return markdown(header, lines)


def _step_line(row: Row, peer: str) -> list[object]:
    us = row["peers"][peer] if peer else row["us"]
    spans = row.get("peers_span_us", {})
    span = spans.get(peer, us) if peer else row.get("span_us", us)
    tflops = row["tflops"] * row["us"] / span
    peak = row.get(f"{peer}_peak_bytes" if peer else "peak_bytes", 0)
    own = row.get("span_us", row["us"])
    return [
        row["name"],
        peer or "this package",
        f"{us / 1e3:.2f}",
        f"{span / 1e3:.2f}",
        f"{row['tokens'] / span * 1e6:.0f}",
        f"{tflops:.0f}",
        f"{tflops / FP8_TFLOPS:.0%}",
        f"{tflops / _BF16_TFLOPS:.0%}",
        f"{peak / 1e9:.1f}",
        f"{span / own:.2f}",
    ]


def energy_table(prefix: str = "") -> str:
    """Joules of a call, ours and each peer's, of the sustained files."""
    lines = []
    for name in _SUSTAINED:
        document = load(f"{prefix}{name}_sustained")
        for row in document["rows"] if document else ():
            if "joules" not in row:
                continue
            title = row.get("name") or row.get("layer") or _sizes(row)
            peers = [
                f"{peer} {joules:.3f} ({joules / row['joules']:.2f}x)"
                for peer, joules in row["peers_joules"].items()
                if ratio(row, peer) is not None
            ]
            clock = row.get("sm_mhz", "")
            lines.append([name, title, f"{row['joules']:.3f}", clock, "; ".join(peers)])
    header = ("family", "row", "J, this package", "SM MHz", "peers, and their energy over ours")
    return markdown(header, lines) if lines else "No energy in the files yet."


def _sizes(row: Row) -> str:
    return "x".join(str(row[key]) for key in ("groups", "m", "rows", "n", "k") if key in row)
