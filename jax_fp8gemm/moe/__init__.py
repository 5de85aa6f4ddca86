"""A mixture-of-experts layer: moe_layer, on one device or on a mesh, or its parts on one device.

Experts take all tokens that choose them, unless moe_layer is given a capacity_factor. Results and
gradients are deterministic.
"""

from jax_fp8gemm._data.activation import ClampedSwiglu as ClampedSwiglu
from jax_fp8gemm.moe import block as block
from jax_fp8gemm.moe import configs as configs
from jax_fp8gemm.moe._balance import load_balancing_loss as load_balancing_loss
from jax_fp8gemm.moe._balance import update_balance_bias as update_balance_bias
from jax_fp8gemm.moe._balance import z_loss as z_loss
from jax_fp8gemm.moe._gated_mlp import gated_mlp as gated_mlp
from jax_fp8gemm.moe._mlp import moe_mlp as moe_mlp
from jax_fp8gemm.moe._moe_layer import moe_layer as moe_layer
from jax_fp8gemm.moe._permute import permute as permute
from jax_fp8gemm.moe._permute import unpermute as unpermute
from jax_fp8gemm.moe._pieces import gate_up_from_pieces as gate_up_from_pieces
from jax_fp8gemm.moe._pieces import gate_up_to_pieces as gate_up_to_pieces
from jax_fp8gemm.moe._route import route as route
