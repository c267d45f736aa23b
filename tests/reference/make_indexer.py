"""Makes the stored figures of the loss of indexers (DeepSeek-V3.2, arXiv:2512.02556, section 2.1.1) with torch.

Run it in an environment that has torch and transformers (figures stored here: torch 2.14, transformers 5.23, and 5.24
where layers share a selection):

    python tests/reference/make_indexer.py [NAME ...]

The models are the stored checkpoints of tests/reference/families, in float64. transformers runs its indexers without a
gradient and has no loss of them; index scores, their rotary positions and the loss are written here from the paper's
formulas, over the inputs and the attention weights that its layers have. In the dense warm-up the indexers select all
tokens. A layer that shares the selection of another one has no indexer, and no loss. Each row is computed by itself,
without padding. It writes tests/reference/indexer/<name>.npz with

- tokens [B, T], lengths [B] (rows are right-padded);
- <stage>/indexer_loss: the mean over tokens and layers of KL(p || softmax(I)), in nats; <stage>/to.*: its gradient with
  respect to each tensor of the indexers (that of all other tensors is checked to be zero);
- <stage>/loss: the mean of -log p over the tokens after the first of each row (whose gradient with respect to the
  indexers' tensors is checked to be zero), and <stage>/norm, the length of its gradient.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from make_families import HERE as FAMILIES
from make_families import selections

HERE = Path(__file__).parent / "indexer"
LENGTHS = (20, 13, 3, 17, 9, 1, 14, 6)
INTERLEAVED = {"deepseek_v32": False, "glm_moe_dsa": True, "glm_moe_dsa_shared": True}
SEEDS = {"deepseek_v32": 5, "glm_moe_dsa": 6, "glm_moe_dsa_shared": 7}
"""Of the rows: those whose index scores are well apart, so that no selection hangs on rounding."""


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """The first dimensions of `x` `[T, ..., D]`, rotated by angles `[T, R]`, of which both halves are equal."""
    half = cos.shape[-1] // 2
    cos, sin = (part[:, :half].reshape(len(x), *(1,) * (x.ndim - 2), half) for part in (cos, sin))
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
        pairs = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1)
        return torch.cat([pairs.flatten(-2), rest], dim=-1)
    first, second = turned[..., :half], turned[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def index_scores(indexer: Any, x: torch.Tensor, compressed: torch.Tensor, angles: Any, name: str) -> torch.Tensor:
    """I `[T, T]` of inputs `[T, D]`: sum over heads of w relu(q . k)."""
    tokens, heads, width = len(x), indexer.n_heads, indexer.head_dim
    cos, sin = (part[0].to(x.dtype) for part in angles)
    query = (compressed @ indexer.wq_b.weight.T).view(tokens, heads, width)
    key = torch.nn.functional.layer_norm(
        x @ indexer.wk.weight.T, (width,), indexer.k_norm.weight, indexer.k_norm.bias, eps=1e-6
    )
    query, key = (rotated(part, cos, sin, interleaved=INTERLEAVED[name]) for part in (query, key))
    weights = (x @ indexer.weights_proj.weight.T) * heads**-0.5
    products = torch.einsum("thd,sd->ths", query, key) * width**-0.5
    return torch.einsum("th,ths->ts", weights, products.clamp(min=0))


def divergence(attention: torch.Tensor, scores: torch.Tensor, topk: int) -> torch.Tensor:
    """The sum over tokens of KL(p || softmax(I)) of a row, from its attention weights `[heads, T, T]`."""
    target = attention.detach().double().sum(0)
    target = target / target.sum(-1, keepdim=True)
    total = torch.zeros((), dtype=torch.float64)
    for token in range(len(scores)):
        ours = scores[token, : token + 1]
        seen = ours.detach().topk(min(topk, token + 1)).indices
        p, log_q = target[token, seen], torch.log_softmax(ours[seen], dim=-1)
        assert float(p.sum()) > 1 - 1e-6  # attention is to these tokens
        total = total + torch.special.xlogy(p, p).sum() - (p * log_q).sum()
    return total


def figures(name: str, model: Any, rows: list[torch.Tensor], topk: int) -> dict[str, np.ndarray]:
    """The figures of one stage."""
    layers, result = [layer.self_attn for layer in model.model.layers if layer.self_attn.indexer is not None], {}
    for number, layer in enumerate(layers):
        layer.indexer.index_topk = topk
        layer.register_forward_hook(
            lambda _, args, fields, out, number=number: result.update(
                {number: (fields["hidden_states"], fields, out[1])}
            ),
            with_kwargs=True,
        )
    loss, indexer_loss, count = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64), 0
    for row in rows:
        logits = model(input_ids=row[None], use_cache=False).logits[0].double()
        logps = torch.log_softmax(logits[:-1], -1).gather(-1, row[1:, None])
        loss, count = loss - logps.sum(), count + len(row) - 1
        for number, layer in enumerate(layers):
            x, inputs, attention = result[number]
            compressed = layer.q_a_layernorm(layer.q_a_proj(x))[0].detach()
            scores = index_scores(layer.indexer, x[0].detach(), compressed, inputs["position_embeddings"], name)
            indexer_loss = indexer_loss + divergence(attention[0], scores, topk)
    loss, indexer_loss = loss / count, indexer_loss / (len(layers) * sum(map(len, rows)))
    named = dict(model.named_parameters())
    of_loss = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    of_indexer = torch.autograd.grad(indexer_loss, list(named.values()), allow_unused=True)
    gradients = {}
    for tensor, from_loss, from_indexer in zip(named, of_loss, of_indexer, strict=True):
        assert (from_loss is None) == (".indexer." in tensor) == (from_indexer is not None), tensor
        if from_indexer is not None:
            gradients[f"to.{tensor}"] = from_indexer.numpy()
    norm = torch.sqrt(sum((part.double() ** 2).sum() for part in of_loss if part is not None))
    return {
        "loss": np.float64(loss.item()),
        "norm": np.float64(norm.item()),
        "indexer_loss": np.float64(indexer_loss.item()),
        **gradients,
    }


def main(names: list[str]) -> None:
    """Writes the figures of the models of these names, all of them if there are none."""
    HERE.mkdir(exist_ok=True)
    for name in names or SEEDS:
        seed = SEEDS[name]
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, 96, (len(LENGTHS), max(LENGTHS)), generator=generator)
        rows = [row[:n] for row, n in zip(tokens, LENGTHS, strict=True)]
        stored = {"tokens": tokens.numpy().astype(np.int32), "lengths": np.array(LENGTHS, np.int32)}
        for stage, topk in (("sparse", 4), ("dense_warmup", max(LENGTHS))):
            kind = "DeepseekV32" if name == "deepseek_v32" else "GlmMoeDsa"
            load = getattr(transformers, f"{kind}ForCausalLM").from_pretrained
            options = {"attn_implementation": "eager", "experts_implementation": "eager"}
            model = load(FAMILIES / name, dtype=torch.float64, **options).eval()
            model.get_input_embeddings().padding_idx = None  # torch gives a padding id no gradient; here it is a token
            with selections() as gaps:
                result = figures(name, model, rows, topk)
            stored |= {f"{stage}/{key}": value for key, value in result.items()}
            print(name, stage, float(result["loss"]), float(result["indexer_loss"]), min(gaps, default=None))
            assert not gaps or min(gaps) > 1e-4, "change the seed"
        np.savez_compressed(HERE / f"{name}.npz", **stored)


if __name__ == "__main__":
    main(sys.argv[1:])
