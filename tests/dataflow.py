"""What depends on what in a traced program."""

import dataclasses

import jax
from jax.extend import core

COLLECTIVES = ("all_gather", "all_to_all", "ragged_all_to_all", "psum", "pmax", "ppermute")
PRODUCTS = ("jax_fp8gemm_gemm", "jax_fp8gemm_grouped_gemm", "jax_fp8gemm_grouped_wgrad")


@dataclasses.dataclass(frozen=True)
class Node:
    """A collective or a product, and the nodes that it reads directly or through others."""

    name: str
    num_operands: int
    reads: frozenset["Node"] = dataclasses.field(repr=False)

    def __hash__(self):
        return id(self)

    def __eq__(self, other):
        return self is other

    @property
    def is_product(self):
        return self.name in PRODUCTS


def nodes(function, *operands):
    """All collectives and products of function(*operands), in the order of the program."""
    closed = jax.make_jaxpr(function)(*operands)
    found = []
    _walk(closed.jaxpr, [frozenset()] * len(closed.jaxpr.invars), found)
    return found


def _walk(jaxpr, operands, found):
    """Appends the nodes of a jaxpr to `found`; returns what each result reads."""
    reads = dict.fromkeys(jaxpr.constvars, frozenset())
    reads.update(zip(jaxpr.invars, operands, strict=True))
    of = lambda atom: frozenset() if isinstance(atom, core.Literal) else reads[atom]
    for equation in jaxpr.eqns:
        name, inputs = equation.primitive.name.removesuffix("_p"), [*map(of, equation.invars)]
        every = frozenset().union(*inputs)
        inner = [*_jaxprs(equation.params)]
        if name in COLLECTIVES or name in PRODUCTS:
            found.append(Node(name, len(inputs), every))
            results = [every | {found[-1]}] * len(equation.outvars)
        elif len(inner) == 1 and len(inner[0].invars) == len(inputs) and name != "while":
            results = _walk(inner[0], inputs, found)
        else:
            # Of branches and loops each result may read every operand, and all that is inside.
            inside = [_walk(jaxpr, [every] * len(jaxpr.invars), found) for jaxpr in inner]
            every = every.union(*(result for results in inside for result in results))
            results = [every] * len(equation.outvars)
        reads.update(zip(equation.outvars, results, strict=True))
    return [of(atom) for atom in jaxpr.outvars]


def _jaxprs(params):
    for value in jax.tree.leaves([*params.values()], is_leaf=_is_jaxpr):
        if _is_jaxpr(value):
            yield getattr(value, "jaxpr", value)


def _is_jaxpr(value):
    return isinstance(value, core.Jaxpr | core.ClosedJaxpr)
