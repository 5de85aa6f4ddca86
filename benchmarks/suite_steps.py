"""The steps of each piece of the suite, and how long they are expected to take on an H200."""

import dataclasses
from collections.abc import Sequence

_FEW_PEERS = "deepgemm,cublaslt_tensorwise,cublaslt_block,torch_bf16"


@dataclasses.dataclass(frozen=True)
class Step:
    """One command line of `bench`, and the seconds that it should take."""

    name: str
    seconds: int
    arguments: Sequence[str]
    is_saved: bool = True

    def command(self, out: str) -> list[str]:
        return [*self.arguments, *(["--save", out] if self.is_saved else [])]


def _step(name: str, seconds: int, text: str, is_saved: bool = True) -> Step:
    return Step(name, seconds, text.split(), is_saved)


def _warm(name: str, seconds: int, tables: str) -> Step:
    return _step(f"warm-{name}", seconds, f"warm-deepgemm {tables}", is_saved=False)


PIECES: dict[str, list[Step]] = {
    "1": [
        _warm("products", 44, "dense wgrad ragged masked ragged-wgrad"),
        _step("ragged", 109, "ragged"),
        _step("masked", 6, "masked"),
        _step("ragged-wgrad", 63, "ragged-wgrad"),
        _step("wgrad", 56, "wgrad"),
        _step("dense", 182, "dense"),
        _step("quantize", 25, "quantize"),
        _step("matmul", 6, "matmul"),
        _step("decode", 26, "decode"),
        _step("host", 3, "host"),
    ],
    "2": [
        _warm("held-out", 56, "dense:held-out ragged:held-out masked:held-out"),
        _warm("short", 17, "dense:short dense:narrow"),
        _step("dense-held-out", 109, f"dense --rows held-out --peers {_FEW_PEERS},xla_fp8"),
        _step("ragged-held-out", 22, f"ragged --rows held-out --peers {_FEW_PEERS}"),
        _step("masked-held-out", 8, "masked --rows held-out"),
        _step("flush-write", 5, f"dense --rows short --peers {_FEW_PEERS}"),
        _step("flush-read", 2, f"dense --rows short --flush read --peers {_FEW_PEERS}"),
        _step("narrow", 15, f"dense --rows narrow --peers split_k,{_FEW_PEERS}"),
        _step("narrow-read", 15, f"dense --rows narrow --flush read --peers split_k,{_FEW_PEERS}"),
        _step("activation", 25, "activation"),
        _step("step", 164, "step"),
        _step("model", 54, "model"),
    ],
    "3": [
        _step("moe", 197, "moe"),
        _step("moe-sustained", 139, "moe --sustained --peers tokamax"),
        _step("matmul-sustained", 11, "matmul --sustained"),
        _warm("random", 44, "dense:random:100"),
        _step("dense-random", 104, f"dense --rows random --random 100 --peers {_FEW_PEERS}"),
    ],
    "4": [
        _warm("curves", 44, "dense:curve ragged:curve"),
        _step("dense-curve", 29, f"dense --rows curve --peers {_FEW_PEERS}"),
        _step("ragged-curve", 19, "ragged --rows curve --peers deepgemm,torch_bf16"),
        _step("dense-regret", 97, "dense --rows held-out --regret --rounds 3 --calls 3"),
        _step("ragged-regret", 39, "ragged --rows held-out --regret --rounds 3 --calls 3"),
        _step("ragged-random", 37, "ragged --rows random --random 30 --peers torch_bf16"),
        _step("ragged-wgrad-regret", 16, "ragged-wgrad --regret --rounds 3 --calls 3"),
        # With DeepGEMM's kernels not compiled yet.
        _step("dense-sustained", 123, f"dense --sustained --peers {_FEW_PEERS}"),
        _step("ragged-sustained", 63, f"ragged --sustained --peers {_FEW_PEERS}"),
    ],
    # On all GPUs of a host.
    "several": [
        _step("expert-parallel", 174, "expert-parallel --parts 1 2 4"),
        _step("exchanges", 147, "expert-parallel --exchange all --no-peers"),
    ],
    "sharded": [
        _step("fsdp", 300, "fsdp"),
    ],
}


def smoke_piece(is_dry: bool) -> list[Step]:
    """Tiny rows of every kind of step, to find out whether they begin and end.

    is_dry: on any device, where nothing is timed.
    """
    once = "--dry-run" if is_dry else "--rounds 1 --calls 1"
    return [
        _step("smoke-dense", 20, f"dense --shape 40x256x384 1x128x256 {once}"),
        _step("smoke-regret", 30, f"dense --shape 128x256x256 --regret {once}"),
        _step("smoke-ragged", 20, f"ragged --shape 3x40x256x384 {once}"),
        _step("smoke-masked", 20, f"masked --shape 3x40x256x384 {once}"),
        _step("smoke-wgrad", 20, f"wgrad --shape 128x256x256 {once}"),
        _step("smoke-ragged-wgrad", 20, f"ragged-wgrad --shape 2x128x256x128 {once}"),
        _step("smoke-quantize", 20, f"quantize --shape 256x384 {once}"),
        _step("smoke-activation", 20, f"activation --shape 256x384 {once}"),
        _step("smoke-sustained", 20, f"dense --shape 128x128x256 --sustained {once}"),
        _step("smoke-flush", 20, f"dense --shape 16x128x256 --flush read {once}"),
    ]
