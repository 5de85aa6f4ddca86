"""The table of what the time of a layer, or of a training step, is spent on."""

from collections.abc import Mapping

from benchmarks.pages.results import load
from benchmarks.pages.tables import markdown

# The first kind whose words are all in a kernel's name.
_KINDS = (
    ("gradients of weights", ("fp8_gemm_1d1d",)),
    ("gradients of weights", ("fp8_gemm_grouped_k",)),
    ("gradients of weights", ("fp8_gemm", "transposed")),
    ("other products", ("fp8_gemm",)),
    ("SwiGLU, quantised", ("swiglu",)),
    ("quantisation", ("quantize_",)),
    ("rows of experts", ("copy_rows",)),
    ("rows of experts", ("sum_rows",)),
    ("attention", ("cudnn",)),
)
_OTHER = "XLA"
_TABLES = ("matmul", "moe", "step", "model")


def kind_of(kernel: str) -> str:
    """What a kernel is for, by its name; one that is not ours, and no attention, is XLA's."""
    of_name = (kind for kind, words in _KINDS if all(word in kernel for word in words))
    return next(of_name, _OTHER)


def us_by_kind(kernels: Mapping[str, float]) -> dict[str, float]:
    """Microseconds of each kind, in the order of the table."""
    kinds = dict.fromkeys([*(kind for kind, _ in _KINDS), _OTHER], 0.0)
    for name, us in kernels.items():
        kinds[kind_of(name)] += us
    return kinds


def kernels_table(prefix: str = "") -> str:
    """Of each layer and step: microseconds of each kind of kernel, their sum, and the span."""
    lines = []
    for table in _TABLES:
        document = load(prefix + table)
        for row in document["rows"] if document else ():
            if kernels := row.get("kernels"):
                kinds, total = us_by_kind(kernels), sum(kernels.values())
                shares = [f"{us:.0f} ({us / total:.0%})" if us else "-" for us in kinds.values()]
                span = row["span_us"]
                gaps = f"{span - total:.0f}"
                name = row.get("name") or row["layer"]
                lines.append([table, name, *shares, f"{total:.0f}", f"{span:.0f}", gaps])
    header = ("file", "of", *us_by_kind({}), "sum", "from first to last", "gaps")
    return markdown(header, lines) if lines else "No kernels in the files yet."
