"""Records what TRL's DPOTrainer logs for a mixture of experts, with and without gradient accumulation.

Run it in an environment that has torch, transformers and trl (stored here: torch 2.13, transformers 5.23, TRL 1.16):

    python tests/reference/make_trl_metrics.py

It trains the stored Mixtral checkpoint (tests/reference/families/mixtral) in float32 on CPU at learning rate 0, so that
every step sees the same weights, and writes tests/reference/trl_metrics/expected.json: the pairs as token ids, in
order, and for each number of pairs per micro-batch the metrics that TRL logs for each step of four pairs. With a
learning rate of 0 the policy is its own reference, so `loss` is log(2) plus the coefficient times `aux_loss`.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import datasets
import numpy as np
import tokenizers
import torch
import transformers
import trl

HERE = Path(__file__).parent
MODEL = HERE / "families" / "mixtral"
OUT = HERE / "trl_metrics" / "expected.json"
BATCH, STEPS, VOCABULARY = 4, 2, 96
COEFFICIENT = 0.5
METRICS = ("loss", "aux_loss", "entropy", "mean_token_accuracy", "num_tokens", "logps/chosen", "logps/rejected")


def pairs() -> list[dict[str, list[int]]]:
    """Pairs whose prompts and completions have very different lengths.

    The likeliest next tokens of the model stand here and there, so that some are predicted correctly.
    """
    draw = np.random.default_rng(5)
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()

    def continued(ids: list[int], length: int) -> list[int]:
        out: list[int] = []
        for _ in range(length):
            with torch.no_grad():
                likeliest = int(model(torch.tensor([ids + out])).logits[0, -1].argmax())
            out.append(likeliest if draw.random() < 0.5 else int(draw.integers(2, VOCABULARY)))
        return out

    rows = []
    for prompt, chosen, rejected in draw.integers(1, 21, (BATCH * STEPS, 3)).tolist():
        ids = draw.integers(2, VOCABULARY, prompt).tolist()
        rows.append({"prompt_ids": ids, "chosen_ids": continued(ids, chosen), "rejected_ids": continued(ids, rejected)})
    return rows


def logged(rows: list[dict[str, list[int]]], microbatch: int, home: str) -> list[dict[str, float]]:
    """TRL's metrics of each step, with so many pairs per micro-batch."""

    class Trainer(trl.DPOTrainer):
        """The trainer on rows that are token ids already."""

        def _prepare_dataset(self, dataset, *rest):
            return dataset

    vocabulary = tokenizers.models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<eos>")
    trainer = Trainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32),
        ref_model=transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32),
        args=trl.DPOConfig(
            output_dir=home,
            use_cpu=True,
            bf16=False,
            beta=0.1,
            router_aux_loss_coef=COEFFICIENT,
            gradient_checkpointing=False,
            per_device_train_batch_size=microbatch,
            gradient_accumulation_steps=BATCH // microbatch,
            train_sampling_strategy="sequential",
            max_steps=STEPS,
            learning_rate=0.0,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_length=None,
            save_strategy="no",
            report_to="none",
            logging_steps=1,
            disable_tqdm=True,
        ),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizers.Tokenizer(vocabulary), pad_token="<pad>", eos_token="<eos>"
        ),
    )
    trainer.train()
    steps = [row for row in trainer.state.log_history if "aux_loss" in row]
    return [{name: float(f"{float(row[name]):.9g}") for name in METRICS} for row in steps]


def main() -> None:
    """Writes the record anew."""
    rows = pairs()
    with tempfile.TemporaryDirectory() as home:
        steps = {str(microbatch): logged(rows, microbatch, home) for microbatch in (4, 2, 1)}
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "trl": trl.__version__}
    record = {
        "versions": versions,
        "router_aux_loss_coef": COEFFICIENT,
        "batch_size": BATCH,
        "pairs": rows,
        "logged_by_pairs_per_microbatch": steps,
    }
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
