"""The routers of published models in NumPy, float64, one token at a time.

Each follows the model's published code; none follows ours. It takes the logits (num_experts,) of a
token, and the bias where the model has one, and returns indices and weights by falling preference.
"""

import numpy as np


def softmax(x):
    exp = np.exp(x - x.max())
    return exp / exp.sum()


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def largest(x, count):
    """Of equal numbers the first."""
    return np.argsort(-x, kind="stable")[:count]


def deepseek_v3(logits, bias, *, top_k=8, n_group=8, topk_group=4, scale=2.5):
    """Gate of deepseek-ai/DeepSeek-V3, inference/model.py; the sum with 1e-20 is transformers'."""
    scores = sigmoid(logits)
    biased = (scores + bias).reshape(n_group, -1)
    group_scores = np.sort(biased, axis=1)[:, -2:].sum(axis=1)
    masked = np.full_like(biased, -np.inf)
    kept = largest(group_scores, topk_group)
    masked[kept] = biased[kept]
    chosen = largest(masked.reshape(-1), top_k)
    return chosen, scores[chosen] / (scores[chosen].sum() + 1e-20) * scale


def kimi_k2(logits, bias):
    """DeepSeek-V3's code with one group, and the scale of Kimi-K2's config.json."""
    return deepseek_v3(logits, bias, n_group=1, topk_group=1, scale=2.827)


def glm_5(logits, bias):
    """Likewise, of transformers' glm_moe_dsa."""
    return deepseek_v3(logits, bias, n_group=1, topk_group=1, scale=2.5)


def deepseek_v4(logits, bias, *, top_k=6, scale=1.5):
    """DeepseekV4TopKRouter of transformers' deepseek_v4; the scale is that of V4-Flash."""
    scores = np.sqrt(np.log1p(np.exp(logits)))
    chosen = largest(scores + bias, top_k)
    return chosen, scores[chosen] / (scores[chosen].sum() + 1e-20) * scale


def qwen3_moe(logits, *, top_k=8):
    """Qwen3MoeTopKRouter of transformers with norm_topk_prob, as in Mixtral: softmax first."""
    probabilities = softmax(logits)
    chosen = largest(probabilities, top_k)
    return chosen, probabilities[chosen] / probabilities[chosen].sum()


def mixtral(logits):
    return qwen3_moe(logits, top_k=2)


def gpt_oss(logits):
    """GptOssTopKRouter of transformers: a softmax over the four chosen logits."""
    chosen = largest(logits, 4)
    return chosen, softmax(logits[chosen])


def llama_4(logits):
    """Llama4Router of transformers: the sigmoid of the largest logit."""
    chosen = largest(logits, 1)
    return chosen, sigmoid(logits[chosen])
