"""Random calls of every public op, legal or not. Most are traced and not compiled, few run.

A call is right as it is made, and then most are changed: an argument becomes something else, or
an array gets another extent, rank or dtype. What is still legal returns; anything else has to end
in a sentence that begins with the name of an op.
"""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from fuzz import legal, pools

import jax_fp8gemm as fp8
from jax_fp8gemm import moe

ERRORS = (TypeError, ValueError, NotImplementedError, RuntimeError)
OPS = tuple(legal.CALLS)
# Each of these compiles programs of its own, for seconds.
_EAGER = 0.002
# What may speak for an op: primitives that derivatives and batches run, and the two classes.
_SPEAKERS = (*OPS, "gemm", "grouped_gemm", "grouped_wgrad", "gather_quantize", "swiglu_quantize")
_SENTENCE = re.compile(rf"({'|'.join(_SPEAKERS)}|ScaledArray[.\w]*|Recipe): \S[^\n]*\Z", re.ASCII)
# JAX's own sentences about its own transformations, which an op cannot forestall.
ALLOWED = {
    r"grad requires real- or complex-valued inputs": "jax.grad of an argument that has no gradient",
    r"vmap was requested to map its argument": "jax.vmap over an argument without that dimension",
    r"vmap must have at least one non-None value": "jax.vmap with no array among the arguments",
    r"vmap got inconsistent sizes for array axes": "jax.vmap of arguments that do not go together",
    r"vmap in_axes must be": "jax.vmap of a pytree that has None or no array for a leaf",
    r"Gradient only defined for scalar-output": "jax.grad of an op without a float result",
    r"can't apply forward-mode": "documented: unpermute and recipe=BF16",
    # jaxlib's lines about the platform: preset algorithms that a CPU has not.
    r"The precision '\w+' is not supported by": "an algorithm that XLA has not on this platform",
    r"shape .* larger than|too large|exceeds": "an extent that no array of JAX has",
}


@dataclasses.dataclass
class Call:
    """One call: op(*args, **kwargs), and how it is made."""

    op: str
    args: list[Any]
    kwargs: dict[str, Any]
    mode: str = "trace"
    is_legal: bool = True

    def __str__(self) -> str:
        given = [_shown(x) for x in self.args]
        given += [f"{name}={_shown(x)}" for name, x in self.kwargs.items()]
        return f"{self.mode} of {self.op}({', '.join(given)})"


def _shown(x: Any) -> str:
    try:
        return repr(x).replace("\n", " ")[:200]
    except Exception:
        return type(x).__name__


def random_call(rng: np.random.Generator) -> Call:
    """A call that may be legal, and how to make it."""
    op = OPS[rng.integers(len(OPS))]
    call = Call(op, *legal.CALLS[op](legal.Draw(rng)))
    if rng.random() < 0.75:
        call.is_legal = False
        for _ in range(rng.integers(1, 4)):
            _change(rng, call)
    call.mode = str(rng.choice(["trace", "trace", "jit", "grad", "vmap", "jvp"]))
    if rng.random() < _EAGER:
        call.mode = "eager"
    return call


def fault(call: Call) -> str | None:
    """What is wrong with how the call ended; None where nothing is."""
    try:
        _run(call)
    except ERRORS as error:
        message = str(error)
        if any(re.search(pattern, message) for pattern in ALLOWED):
            return None
        if not _SENTENCE.match(message):
            return f"unclear {type(error).__name__}: {message[:400]}"
        return (
            f"legal, but {message[:400]}"
            if call.is_legal and call.mode in ("trace", "eager")
            else None
        )
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:400]}"
    return None


def _run(call: Call) -> None:
    """Traces the call with its arrays as operands, in whichever transformation it says."""
    function = getattr(moe, call.op, None) or getattr(fp8, call.op)
    leaves, tree = jax.tree.flatten((call.args, call.kwargs), is_leaf=lambda x: x is None)
    is_operand = [isinstance(x, jax.ShapeDtypeStruct) for x in leaves]
    structs = [x for x, traced in zip(leaves, is_operand, strict=True) if traced]

    def run(*operands):
        given = iter(operands)
        filled = [
            next(given) if traced else x for x, traced in zip(leaves, is_operand, strict=True)
        ]
        args, kwargs = jax.tree.unflatten(tree, filled)
        return function(*args, **kwargs)

    def loss(*operands):
        out = jax.tree.leaves(run(*operands))
        floats = [x for x in out if jnp.issubdtype(x.dtype, jnp.floating)]
        return sum((x.astype(jnp.float32).sum() for x in floats), start=jnp.float32(0))

    floats = [i for i, x in enumerate(structs) if any(x.dtype == f for f in pools.FLOATS)]
    if call.mode == "eager":
        if all(x.size < 10**6 for x in structs):
            run(*(jnp.zeros(x.shape, x.dtype) for x in structs))
        return
    transformed = run
    if call.mode == "jit":
        transformed = jax.jit(run)
    elif call.mode == "grad" and floats:
        transformed = jax.grad(loss, floats[0])
    elif call.mode == "jvp" and floats:
        transformed = functools.partial(_jvp, loss, floats[0])
    elif call.mode == "vmap" and structs:
        transformed = jax.vmap(run, in_axes=(0, *[None] * (len(structs) - 1)))
        structs[0] = pools.struct((2, *structs[0].shape), structs[0].dtype)
    jax.eval_shape(transformed, *structs)


def _jvp(loss, i, *operands):
    along = lambda x: loss(*operands[:i], x, *operands[i + 1 :])
    return jax.jvp(along, (operands[i],), (operands[i],))


def _change(rng: np.random.Generator, call: Call) -> None:
    """Makes one argument another."""
    places = [(call.args, i) for i in range(len(call.args))]
    places += [(call.kwargs, name) for name in call.kwargs]
    where, place = places[rng.integers(len(places))]
    x = where[place]
    if isinstance(x, jax.ShapeDtypeStruct) and rng.random() < 0.7:
        where[place] = _changed_array(rng, x)
    elif isinstance(x, fp8.ScaledArray) and rng.random() < 0.7:
        name = rng.choice(["values", "scale", "transposed", "block"])
        value = getattr(x, name)
        is_array = isinstance(value, jax.ShapeDtypeStruct) and rng.random() < 0.7
        value = _changed_array(rng, value) if is_array else _anything(rng)
        where[place] = dataclasses.replace(x, **{str(name): value})
    else:
        where[place] = _anything(rng)


def _anything(rng: np.random.Generator) -> Any:
    choices = _no_arrays()
    return choices[rng.integers(len(choices))]


_no_arrays = functools.cache(pools.no_arrays)


def _changed_array(rng: np.random.Generator, x: jax.ShapeDtypeStruct) -> Any:
    """Of another extent, rank or dtype, or NumPy's."""
    shape, kind = list(x.shape), rng.integers(5)
    if kind == 0 and shape:
        shape[rng.integers(len(shape))] = int(rng.choice(pools.EXTENTS))
    elif kind == 1:
        shape.insert(rng.integers(len(shape) + 1), int(rng.choice(pools.EXTENTS[:4])))
    elif kind == 2 and shape:
        del shape[rng.integers(len(shape))]
    elif kind == 3:
        return pools.struct(shape, pools.FLOATS[rng.integers(len(pools.FLOATS))])
    else:
        return pools.numpy_array(shape, pools.DTYPES[rng.integers(len(pools.DTYPES))])
    return pools.struct(shape, x.dtype)
