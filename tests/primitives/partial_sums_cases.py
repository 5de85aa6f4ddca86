"""What a product with split_k must be: sums of parts, by the model of the bits."""

import bit_model
import numpy as np


def predicted(lhs, lhs_scale, rhs, rhs_scale, rows, cols, num_parts):
    """The f32 elements [rows[i], cols[i]] of a 1d2d product that is added up in num_parts parts."""
    length = -(-lhs_scale.shape[1] // num_parts)
    total = None
    for i in range(num_parts):
        blocks = np.s_[i * length : (i + 1) * length]
        columns = np.s_[i * length * 128 : (i + 1) * length * 128]
        operands = lhs[:, columns], lhs_scale[:, blocks], rhs[:, columns], rhs_scale[:, blocks]
        if operands[0].shape[1] == 0:
            part = np.zeros(len(rows), np.float32)
        else:
            part = bit_model.gemm_elements(*operands, rows, cols, is_1d1d=False)
        total = part if total is None else total + part
    return total
