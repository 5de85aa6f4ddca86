"""Records what an H200 computes, for the bit model to be checked against on machines without one.

    python tests/record_h200.py [tests/recorded/h200.json]      on the GPU: runs every case, writes
    python tests/record_h200.py --fit [...]                     anywhere: the rules that explain it

Inputs follow from a seed through PCG64's raw bits and exact arithmetic, so they do not depend on
the NumPy version; the recording holds their hash, the hash of the f32 result and a sample of it.
"""

import argparse
import base64
import datetime
import hashlib
import json
import pathlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import bit_model
import numpy as np
import reference
from reference import SCALE_BLOCK

RECORDED = pathlib.Path(__file__).parent / "recorded" / "h200.json"
NUM_SAMPLES = 256
FORMATS = {"e4m3": reference.E4M3, "e5m2": reference.E5M2}


@dataclass(frozen=True)
class Case:
    """One product. data: how operands are made. whole: the result is predicted in full, by hash."""

    data: str
    lhs: str
    rhs: str
    is_1d1d: bool
    m: int = 24
    n: int = 136
    k: int = 520
    whole: bool = True

    @property
    def name(self) -> str:
        family = "1d1d" if self.is_1d1d else "1d2d"
        return f"{family} {self.lhs}*{self.rhs} {self.data} {self.m}x{self.n}x{self.k}"

    @property
    def seed(self) -> int:
        return int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:8], "little")

    def operands(self) -> tuple[np.ndarray, ...]:
        """lhs (m, k), lhs_scale, rhs (n, k), rhs_scale."""
        bits = np.random.PCG64(self.seed)
        rhs_block = (1, 128) if self.is_1d1d else (128, 128)
        lhs, lhs_scale = _DATA[self.data](bits, (self.m, self.k), FORMATS[self.lhs], (1, 128))
        rhs, rhs_scale = _DATA[self.data](bits, (self.n, self.k), FORMATS[self.rhs], rhs_block)
        if self.data == "cancelling":
            _cancel(lhs, rhs)
        return lhs, lhs_scale, rhs, rhs_scale

    def elements(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows and columns of the sample."""
        raw = np.random.PCG64(self.seed + 1).random_raw(NUM_SAMPLES)
        return np.divmod((raw % (self.m * self.n)).astype(np.int64), self.n)


def _raw(bits: np.random.PCG64, count: int) -> np.ndarray:
    return bits.random_raw(-(-count // 8)).astype("<u8").view(np.uint8)[:count]


def _normal(bits, shape, fmt, block):
    """Quantised sums of eight uniform bytes: near normal."""
    sums = _raw(bits, 8 * shape[0] * shape[1]).reshape(*shape, 8).astype(np.int32).sum(-1)
    return reference.quantize(((sums - 1020) / 256).astype(np.float32), block, fmt=fmt)


def _codes(bits, shape, fmt, block, keep=0xFF):
    """Every finite code equally likely, so every exponent; scales of 2^-8 to 2^8."""
    raw = _raw(bits, shape[0] * shape[1]).reshape(shape) & np.uint8(keep)
    values = np.where(np.isfinite(raw.view(fmt).astype(np.float32)), raw, 0).astype(np.uint8)
    size = reference.scale_shape(shape, block)
    words = _raw(bits, 4 * size[0] * size[1]).view("<u4").reshape(size)
    scale = (words & 0x7FFFFF) | ((119 + (words >> 28)) << 23)
    return values.view(fmt), scale.astype(np.uint32).view(np.float32)


def _tiny(bits, shape, fmt, block):
    """Zeros, subnormals and the smallest normals."""
    return _codes(bits, shape, fmt, block, keep=0x8F if fmt == reference.E4M3 else 0x87)


def _cancel(lhs, rhs):
    """Makes neighbouring products opposite; every seventh pair only loses its large values."""
    pairs = np.arange(0, lhs.shape[1] - 1, 2)
    opposite, rest = pairs[pairs % 7 != 0], pairs[pairs % 7 == 0]
    for x, sign in ((lhs, 0), (rhs, 0x80)):
        codes = x.view(np.uint8)
        codes[:, opposite + 1] = codes[:, opposite] ^ sign
        codes[:, rest] &= 0xBF
        codes[:, rest + 1] &= 0xBF


_DATA: dict[str, Callable] = {
    "normal": _normal,
    "codes": _codes,
    "tiny": _tiny,
    "cancelling": _codes,
}


def cases() -> list[Case]:
    """Every format pair, family and kind of data on a ragged shape, then three real shapes."""
    small = [
        Case(data, lhs, rhs, is_1d1d)
        for data, lhs, rhs, is_1d1d in product(_DATA, FORMATS, FORMATS, (False, True))
    ]
    real = [
        Case("normal", "e4m3", "e4m3", False, 128, 576, 7168, whole=False),
        Case("normal", "e4m3", "e4m3", True, 65, 136, 16384, whole=False),
        Case("normal", "e5m2", "e4m3", False, 65, 2880, 2880, whole=False),
    ]
    return small + real


def digest(*arrays: np.ndarray) -> str:
    """SHA-256 of shapes, dtypes and bytes."""
    sha = hashlib.sha256()
    for x in arrays:
        sha.update(f"{x.dtype.name}{x.shape}".encode())
        sha.update(np.ascontiguousarray(x).tobytes())
    return sha.hexdigest()


def encode(x: np.ndarray) -> str:
    """f32 bits as base64."""
    return base64.b64encode(x.astype("<f4").tobytes()).decode()


def decode(text: str) -> np.ndarray:
    """Inverse of encode."""
    return np.frombuffer(base64.b64decode(text), "<f4").astype(np.float32)


def _run(case: Case, operands: tuple[np.ndarray, ...]) -> np.ndarray:
    import jax.numpy as jnp

    import jax_fp8gemm as jf

    lhs, lhs_scale, rhs, rhs_scale = map(jnp.asarray, operands)
    out = jf.scaled_matmul(
        jf.ScaledArray(lhs, lhs_scale, block=(1, SCALE_BLOCK)),
        jf.ScaledArray(rhs, rhs_scale, block=(1 if case.is_1d1d else SCALE_BLOCK, SCALE_BLOCK)),
        out_dtype=jnp.float32,
        implementation="cuda",
    )
    return np.asarray(out)


def _device() -> dict[str, str]:
    import jax

    return {
        "device": jax.devices()[0].device_kind,
        "date": datetime.date.today().isoformat(),
        "jax": jax.__version__,
    }


def record() -> dict:
    """Runs every case; prints how much of each result the model predicts."""
    recorded = []
    for case in cases():
        operands = case.operands()
        out = _run(case, operands)
        rows, cols = case.elements()
        predicted = bit_model.gemm_elements(*operands, rows, cols)
        same = bit_model.same_bits(predicted, out[rows, cols]).mean()
        print(f"{case.name:50s} model predicts {same:7.2%} of the sample", flush=True)
        recorded.append(
            {
                "name": case.name,
                "inputs": digest(*operands),
                "out": digest(out),
                "sample": encode(out[rows, cols]),
            }
        )
    return _device() | {"cases": recorded}


def fit(recorded: dict) -> None:
    """Prints the rules that predict most of the recorded samples of each format pair."""
    by_name = {entry["name"]: entry for entry in recorded["cases"]}
    for lhs, rhs in product(FORMATS, FORMATS):
        fractions: dict[bit_model.Rule, list[float]] = {}
        for case in (c for c in cases() if (c.lhs, c.rhs, c.whole) == (lhs, rhs, True)):
            observed = decode(by_name[case.name]["sample"])
            for same, rule in bit_model.fit(*case.operands(), *case.elements(), observed):
                fractions.setdefault(rule, []).append(same)
        best = sorted(fractions, key=lambda rule: -sum(fractions[rule]))[:4]
        print(f"{lhs} * {rhs}: worst and mean fraction of equal bits over the cases", flush=True)
        for rule in best:
            print(f"  {min(fractions[rule]):8.4%} {np.mean(fractions[rule]):8.4%}  {rule}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", nargs="?", type=pathlib.Path, default=RECORDED)
    parser.add_argument("--fit", action="store_true", help="fit rules to what path holds")
    args = parser.parse_args()
    if args.fit:
        fit(json.loads(args.path.read_text()))
    else:
        args.path.parent.mkdir(parents=True, exist_ok=True)
        args.path.write_text(json.dumps(record(), indent=1) + "\n")


if __name__ == "__main__":
    main()
