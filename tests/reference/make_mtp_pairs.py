"""Makes the stored figures of multi-token prediction beside losses of completions, with torch and transformers.

Run it in an environment that has torch and transformers (figures stored here: torch 2.14, transformers 5.23):

    python tests/reference/make_mtp_pairs.py

The model is that of tests/reference/mtp/deepseek_v3 (make_mtp.py). Every completion is a row of its own behind its
prompt, so that nothing is shared and nothing is padded. It writes mtp/deepseek_v3/pairs.npz with

- prompt, chosen, rejected [B, .] (the first left-padded), their lengths, and labels (of feedback: 1 is desirable);
- reference_chosen, reference_rejected [B], numbers in place of a reference's log-probabilities;
- by objective ("dpo", "orpo", "kto"): loss, of the objective alone; mtp_loss, the mean of -log p over the tokens of
  chosen completions (of kto: desirable ones) with two tokens before them, predicted from the token two before; norm,
  the length of the gradient of loss + weight * mtp_loss; and to.*, that gradient with respect to some tensors.
"""

from __future__ import annotations

import numpy as np
import torch
from make_mtp import HERE, LAYERS, WEIGHT, Around, further
from safetensors.torch import load_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm

PROMPTS, CHOSEN, REJECTED = (5, 1, 3, 2), (4, 3, 1, 6), (2, 5, 3, 1)
DESIRABLE = (1, 0, 1, 1)
BETA = 0.1
ASKED = (
    "enorm.weight",
    "hnorm.weight",
    "eh_proj.weight",
    "shared_head.norm.weight",
    "model.norm.weight",
    "model.layers.0.mlp.down_proj.weight",
)


def main() -> None:
    """Computes and stores them."""
    torch.manual_seed(2)
    directory = HERE / "deepseek_v3"
    config = DeepseekV3Config.from_pretrained(directory, num_hidden_layers=LAYERS + 1, attn_implementation="eager")
    model = DeepseekV3ForCausalLM.from_pretrained(directory, config=config, dtype=torch.float32).eval()
    around = Around(config.hidden_size, lambda width: DeepseekV3RMSNorm(width, eps=config.rms_norm_eps))
    tensors = load_file(directory / "model.safetensors")
    prefix = f"model.layers.{LAYERS}."
    around.load_state_dict({name: tensors[prefix + name] for name in dict(around.named_parameters())})
    model.config.num_hidden_layers = LAYERS  # so many are run
    block = model.model.layers[LAYERS]

    def tokens(lengths: tuple[int, ...]) -> list[torch.Tensor]:
        return [torch.randint(0, config.vocab_size, (length,)) for length in lengths]

    prompts, chosen, rejected = tokens(PROMPTS), tokens(CHOSEN), tokens(REJECTED)
    desirable = torch.tensor(DESIRABLE, dtype=torch.float32)
    reference = torch.randn(2, len(PROMPTS)) - 12.0

    def read(prompt: torch.Tensor, completion: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities of a completion's tokens, and of those that are predicted from two tokens before."""
        row, begin = torch.cat([prompt, completion]), len(prompt)
        states = model.model(input_ids=row[None]).last_hidden_state[0]
        value = torch.log_softmax(model.lm_head(states[:-1]), -1).gather(-1, row[1:, None])[begin - 1 :, 0]
        said = further(model, block, around, states, row)[:-1]
        ahead = torch.log_softmax(said, -1).gather(-1, row[2:, None])[max(begin - 2, 0) :, 0]
        return value, ahead

    def dpo(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return -torch.nn.functional.logsigmoid(BETA * ((one - reference[0]) - (other - reference[1]))).mean()

    def orpo(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        one, other = one / torch.tensor(CHOSEN), other / torch.tensor(REJECTED)
        odds = [mean - torch.log1p(-torch.exp(mean)) for mean in (one, other)]
        return (-one - BETA * torch.nn.functional.logsigmoid(odds[0] - odds[1])).mean()

    def kto(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        kl = (other.detach() - reference[1]).mean().clamp(min=0)
        ratio = one - reference[0]
        signed = torch.where(desirable > 0, ratio - kl, kl - ratio)
        return (1 - torch.sigmoid(BETA * signed)).mean()

    result: dict[str, np.ndarray] = {}
    parameters = {**dict(model.named_parameters()), **dict(around.named_parameters())}
    for name, objective in {"dpo": dpo, "orpo": orpo, "kto": kto}.items():
        for parameter in parameters.values():
            parameter.grad = None
        liked = [read(*row) for row in zip(prompts, chosen, strict=True)]
        others = [read(*row) for row in zip(prompts, rejected, strict=True)]
        sums = [torch.stack([ours.sum() for ours, _ in side]) for side in (liked, others)]
        counted = [ahead for (_, ahead), label in zip(liked, DESIRABLE, strict=True) if name != "kto" or label]
        loss, mtp_loss = objective(*sums), -torch.cat(counted).mean()
        (loss + WEIGHT * mtp_loss).backward()
        norm = torch.sqrt(sum((p.grad.double() ** 2).sum() for p in parameters.values() if p.grad is not None))
        figures = {"loss": np.float64(loss.item()), "mtp_loss": np.float64(mtp_loss.item())}
        figures |= {"norm": np.float64(norm.item())}
        figures |= {f"to.{asked}": parameters[asked].grad.numpy().copy() for asked in ASKED}
        result |= {f"{name}.{key}": value for key, value in figures.items()}
        print(f"{name}: loss {loss.item():.4f}, {mtp_loss.item():.4f}, gradient {norm.item():.4f}")

    def padded(rows: list[torch.Tensor], size: int, *, left: bool = False) -> np.ndarray:
        table = np.zeros((len(rows), size), np.int32)
        for number, row in enumerate(rows):
            table[number, -len(row) if left else 0 : None if left else len(row)] = row.numpy()
        return table

    longest = max(*CHOSEN, *REJECTED)
    np.savez_compressed(
        directory / "pairs.npz",
        prompt=padded(prompts, max(PROMPTS), left=True),
        chosen=padded(chosen, longest),
        rejected=padded(rejected, longest),
        prompt_length=np.array(PROMPTS, np.int32),
        chosen_length=np.array(CHOSEN, np.int32),
        rejected_length=np.array(REJECTED, np.int32),
        reference_chosen=reference[0].numpy(),
        reference_rejected=reference[1].numpy(),
        desirable=desirable.numpy(),
        weight=np.float64(WEIGHT),
        **result,
    )


if __name__ == "__main__":
    main()
