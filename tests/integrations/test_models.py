"""Models of other packages, unmodified: they convert in one call, and train as in bf16."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

qwix = pytest.importorskip("qwix", reason="qwix is installed with the extra `test`")
from converted import cosine, next_token_loss, products, train  # noqa: E402
from flax import nnx  # noqa: E402
from qwen3_moe import Qwen3Moe  # noqa: E402

from jax_fp8gemm.qwix import Provider, Rule  # noqa: E402

# Of the models' and qwix's own making.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
SIZES = dict(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=64,
)
TOKENS = jax.random.randint(jax.random.key(1), (4, 16), 0, SIZES["vocab_size"])
# q, k, v, out, gate, up, down and the head; q k^T and the product with v.
NUM_WEIGHTS, NUM_ATTENTION = 8, 2
NUM_STEPS = 20


def check_training(model_loss, converted_loss, params, least_cosine, band):
    expected, expected_losses = train(model_loss, params, NUM_STEPS)
    found, losses = train(converted_loss, params, NUM_STEPS)
    np.testing.assert_allclose(losses, expected_losses, atol=band)
    assert losses[-1] < losses[0] - 10 * band
    assert cosine(found, expected) > least_cosine


@pytest.fixture
def as_users_promote():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def published(name):
    """The linen module of a model of `transformers`, and its inputs without the parameters."""
    transformers = pytest.importorskip(
        "transformers", "4.57", reason="transformers is installed with the extra `test`"
    )
    if not hasattr(transformers, f"Flax{name}ForCausalLM"):
        # CI installs transformers < 5. A machine that downloads nothing may have 5.
        pytest.skip(f"transformers 5 has no models in Flax; got {transformers.__version__}")
    config = getattr(transformers, f"{name}Config")(**SIZES, head_dim=32)
    model = getattr(transformers, f"Flax{name}ForCausalLM").module_class(config, dtype=jnp.bfloat16)
    positions = jnp.broadcast_to(jnp.arange(TOKENS.shape[1]), TOKENS.shape)
    return model, (TOKENS, jnp.ones_like(TOKENS), positions)


@pytest.mark.parametrize("name", ["Llama", "Gemma"])
def test_published_models(name, as_users_promote):
    model, inputs = published(name)
    converted = qwix.quantize_model(model, Provider())

    def loss(model):
        return lambda params: next_token_loss(model.apply(params, *inputs)[0], TOKENS)

    initialize = lambda key: model.init(key, *inputs)
    params = jax.eval_shape(initialize, jax.random.key(0))
    assert products(loss(converted), params) == dict(gemm=NUM_WEIGHTS, dot_general=NUM_ATTENTION)
    assert products(loss(model), params) == dict(dot_general=NUM_WEIGHTS + NUM_ATTENTION)
    if name == "Llama":
        params = jax.jit(initialize)(jax.random.key(0))
        # e4m3 rounds a value by 2.6 % (root mean square). With two layers, trained on random tokens
        # at full optimisation: a cosine of 0.998, and losses 0.02 apart.
        check_training(loss(model), loss(converted), params, least_cosine=0.995, band=0.05)


def test_qwen3_moe(as_users_promote):
    model = Qwen3Moe(SIZES["vocab_size"], SIZES["hidden_size"], 1, nnx.Rngs(0))
    rules = [Rule("experts/./router", None), Rule()]
    converted = qwix.quantize_model(model, Provider(rules), skip_nnx_init=True)

    def loss(model):
        definition, _ = nnx.split(model)
        return lambda state: next_token_loss(nnx.merge(definition, state)(TOKENS), TOKENS)

    params = nnx.state(model)
    # q, k, v, out and the head; the experts' gate, up and down; attention and the router.
    assert products(loss(converted), params) == dict(gemm=5, grouped_gemm=3, dot_general=3)
    assert products(loss(model), params) == dict(dot_general=8, ragged_dot=3)
    # Where two experts are nearly as good for a token, FP8 may choose the other.
    check_training(loss(model), loss(converted), params, least_cosine=0.95, band=0.1)
