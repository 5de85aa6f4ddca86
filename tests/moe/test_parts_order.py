"""What travels for one part of the tokens depends on no product of another part."""

import functools

import jax
import pytest
from dataflow import nodes
from test_expert_parallel import auto_mesh, problem
from test_shared_expert import shared_weights

from jax_fp8gemm.moe import moe_layer
from jax_fp8gemm.moe._parallel import exchange as _exchange
from jax_fp8gemm.moe._parallel import expert_spec as _expert_spec


def passes(*shared, **options):
    """The nodes of the forward and of the backward pass."""
    x, indices, probs, *weights, dout = problem()
    call = functools.partial(moe_layer, mesh=auto_mesh(4), expert_axis="x", **options)

    def layer(x, probs, w_gate_up, w_down, *shared):
        return call(x, (indices, probs), w_gate_up, w_down, shared_expert=shared or None)

    operands = x, probs, *weights, *shared
    forward = nodes(lambda *operands: jax.vjp(layer, *operands)[0], *operands)
    return forward, nodes(jax.vjp(layer, *operands)[1], dout)


def kinds(found):
    """Of the nodes the products, and the collectives that read none and that read some."""
    is_back = lambda node: any(other.is_product for other in node.reads)
    collectives = [node for node in found if not node.is_product]
    return (
        [node for node in found if node.is_product],
        [node for node in collectives if not is_back(node)],
        [node for node in collectives if is_back(node)],
    )


def split(found, parts):
    """The nodes of each part, which come one part after another."""
    assert found and len(found) % parts == 0
    size = len(found) // parts
    return [frozenset(found[i * size : (i + 1) * size]) for i in range(parts)]


def assert_overlaps(found, parts):
    """The tokens of a part wait for no product, and the products for nothing of later parts."""
    products, there, back = (split(nodes, parts) for nodes in kinds(found))
    wgrads = {node for node in found if node.name == "jax_fp8gemm_grouped_wgrad"}
    for i in range(parts):
        later = range(i + 1, parts)
        for node in products[i] - wgrads:
            assert node.reads.isdisjoint(frozenset().union(*back, *(there[j] for j in later)))
            assert not node.reads.isdisjoint(there[i])
        for node in back[i]:
            # Nor do gradients of tokens wait for those of weights.
            assert node.reads.isdisjoint(wgrads.union(*(products[j] for j in later)))
            assert not node.reads.isdisjoint(products[i])
        for j in later:
            # XLA would combine two collectives that do not read one another.
            assert all(not node.reads.isdisjoint(there[i]) for node in there[j])


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_gathered_tokens(parts):
    forward, backward = passes(parts=parts, exchange="all_gather")
    assert_overlaps(forward, parts)
    assert_overlaps(backward, parts)
    names = lambda found: [node.name for node in found]
    # Values, scales, indices and weights; of dout values and scales. Back go the gradients of
    # tokens and of the weights of their choices.
    assert names(kinds(forward)[1]) == ["all_gather"] * 4 * parts
    assert names(kinds(forward)[2]) == ["all_to_all"] * parts
    assert names(kinds(backward)[1]) == ["all_gather"] * 2 * parts
    assert names(kinds(backward)[2]) == ["all_to_all"] * 2 * parts


def test_gradients_of_weights_add_up_in_place():
    _, backward = passes(parts=4, exchange="all_gather")
    wgrads = [node for node in backward if node.name == "jax_fp8gemm_grouped_wgrad"]
    first = 5  # values and scales of both operands, and the sizes of groups
    assert [node.num_operands for node in wgrads] == [first] * 2 + [first + 1] * 6


def test_further_turns(traced_anew, monkeypatch):
    """Of rows beside the exchange of other parts; those of the exchange at the end."""
    monkeypatch.setattr(_expert_spec, "_MIN_ROWS", 16)
    monkeypatch.setattr(_expert_spec, "_ROW_UNIT", 8)
    for found in passes(parts=2, exchange="all_gather"):
        assert_overlaps(found, 2)
    monkeypatch.setattr(_exchange, "_SLOT_UNIT", 1)
    for found, returns in zip(passes(parts=2, exchange="all_to_all"), (1, 2), strict=True):
        products, _, back = kinds(found)
        of_first_turns = set(back[: 2 * returns])
        later = [node for node in products if not node.reads.isdisjoint(back)]
        assert later and all(of_first_turns <= node.reads for node in later)


@pytest.mark.parametrize("parts", [1, 2])
def test_the_shared_expert_waits_for_no_token(parts):
    """Neither its two products forward, nor the four of its gradients."""
    found = passes(*shared_weights(), parts=parts, exchange="all_gather")
    for nodes_of_pass, num_products in zip(found, (2, 4), strict=True):
        is_free = lambda node: node.is_product and all(other.is_product for other in node.reads)
        assert len([*filter(is_free, nodes_of_pass)]) == num_products
