"""Trains a reward model with TRL and transformers, and stores the model and the figures of each step.

One command, from the repository's root (figures stored here: torch 2.15, transformers 5.24, TRL 1.16):

    python tests/reference/make_reward_model.py     # with torch and TRL

Nothing of nnxdsl is imported here. The model is that of `replay/` with a linear layer of one output, as transformers
saves it for sequence classification; rows are those of `replay/pairs.jsonl`, in their order. TRL pads and runs in
float32, and computes prompts twice.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import Gemma3TextForSequenceClassification, PreTrainedTokenizerFast
from trl import RewardConfig, RewardTrainer

HERE = Path(__file__).parent / "reward_model"
REPLAY = Path(__file__).parent / "replay"
BATCH, STEPS = 4, 6  # of the 26 rows, each once
SETTINGS = {"learning_rate": 3e-3, "weight_decay": 0.1, "max_grad_norm": 1.0, "adam_beta2": 0.999}
RUNS = {"plain": {}, "centred": {"center_rewards_coefficient": 0.1}, "margin": {}}
MARGINS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Of one row after another, in the run of this name."""
NAMES = {"loss": "loss", "grad_norm": "grad_norm", "accuracy": "rewards/accuracies", "margin": "rewards/margins"}


def rows() -> list[dict[str, list[int]]]:
    """Whole token ids of both completions of each pair."""
    pairs = [json.loads(line) for line in (REPLAY / "pairs.jsonl").read_text().splitlines()]
    sides = {"chosen_ids", "rejected_ids"}
    return [{name: pair["prompt_ids"] + pair[name] for name in sorted(sides)} for pair in pairs]


def model() -> None:
    """The model of `replay/` with a head for one label."""
    torch.manual_seed(3)
    result = Gemma3TextForSequenceClassification.from_pretrained(REPLAY / "model", num_labels=1)
    with torch.no_grad():
        result.score.weight.copy_(torch.randn_like(result.score.weight) * 0.2)
    # No id of the rows: transformers reads the last token that is no padding.
    result.config.pad_token_id = 319
    shutil.rmtree(HERE / "model", ignore_errors=True)
    result.save_pretrained(HERE / "model")


def tokenizer() -> PreTrainedTokenizerFast:
    """One for the padding id alone."""
    vocabulary = {f"<{index}>": index for index in range(320)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, "<0>")), pad_token="<319>", eos_token="<318>"
    )


def train(name: str) -> list[dict[str, float]]:
    """The figures of each step."""
    torch.manual_seed(0)
    result = Gemma3TextForSequenceClassification.from_pretrained(HERE / "model", dtype=torch.float32)
    result.model.embed_tokens.padding_idx = None
    with tempfile.TemporaryDirectory() as place:
        asked = RewardConfig(
            output_dir=place, max_steps=STEPS, per_device_train_batch_size=BATCH, logging_steps=1, report_to=[],
            train_sampling_strategy="sequential", lr_scheduler_type="constant", save_strategy="no", use_cpu=True,
            max_length=None, gradient_checkpointing=False, bf16=False, disable_dropout=True,
            logging_nan_inf_filter=False, **SETTINGS, **RUNS[name],
        )  # fmt: skip
        fields = [{**row, "margin": MARGINS[n % 5]} if name == "margin" else row for n, row in enumerate(rows())]
        trainer = RewardTrainer(
            model=result, args=asked, train_dataset=Dataset.from_list(fields), processing_class=tokenizer()
        )
        trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    score = [float(value) for value in result.score.weight.detach().reshape(-1)]
    steps = [{ours: log[theirs] for theirs, ours in NAMES.items()} for log in logs]
    return {"steps": steps, "score": score}


def rewards() -> list[list[float]]:
    """The rewards of both completions of each pair, each computed alone and in float64."""
    result = Gemma3TextForSequenceClassification.from_pretrained(HERE / "model", dtype=torch.float64).eval()
    with torch.no_grad():
        return [[result(input_ids=torch.tensor([ids])).logits.item() for ids in row.values()] for row in rows()]


if __name__ == "__main__":
    HERE.mkdir(exist_ok=True)
    model()
    figures = {"settings": SETTINGS, "batch": BATCH, "rewards": rewards(), "runs": {name: train(name) for name in RUNS}}
    (HERE / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")
