"""Distils a model on stored completions with TRL's DistillationTrainer, and stores the figures of each step.

One command, from the repository's root (figures stored here: torch 2.15, transformers 5.24, TRL 1.16):

    python tests/reference/make_on_policy_distillation.py     # with torch and TRL

Nothing of nnxdsl is imported here. The student is the model of `replay/`, the teacher a smaller one that is stored
here. The trainer's own code is run, but for the sampling: what the student writes after each prompt of
`replay/pairs.jsonl` is the chosen completion.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedTokenizerFast
from trl import DistillationConfig, DistillationTrainer

HERE = Path(__file__).parent / "on_policy_distillation"
REPLAY = Path(__file__).parent / "replay"
BATCH, STEPS = 4, 5
SETTINGS = {"learning_rate": 3e-3, "weight_decay": 0.1, "max_grad_norm": 1.0, "adam_beta2": 0.999}
RUNS: dict[str, dict[str, Any]] = {
    "reverse": {"beta": 1.0},
    "forward": {"beta": 0.0},
    "jsd": {"beta": 0.3},
    "warm": {"beta": 1.0, "temperature": 1.7},
    "parts": {"beta": 1.0, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
}
NAMES = {"loss": "loss", "grad_norm": "grad_norm", "entropy": "entropy"}
ROWS = [json.loads(line) for line in (REPLAY / "pairs.jsonl").read_text().splitlines()]
COMPLETIONS = {tuple(row["prompt_ids"]): row["chosen_ids"] for row in ROWS}


class Stored(DistillationTrainer):
    """The trainer, whose student has sampled the stored completions."""

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> list[list[int]]:
        return [COMPLETIONS[tuple(ids)] for ids in prompt_ids]


def teacher() -> None:
    """A Gemma 3 of one layer over the same vocabulary, with a spread of probabilities."""
    torch.manual_seed(5)
    config = Gemma3TextConfig(
        vocab_size=320, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=128, pad_token_id=None, eos_token_id=1,
        bos_token_id=2,
    )  # fmt: skip
    result = Gemma3ForCausalLM(config)
    with torch.no_grad():
        for parameter in result.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    shutil.rmtree(HERE / "teacher", ignore_errors=True)
    result.save_pretrained(HERE / "teacher")


def tokenizer() -> PreTrainedTokenizerFast:
    """One whose words are token ids."""
    result = Tokenizer(models.WordLevel({str(index): index for index in range(320)}, "0"))
    result.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=result, pad_token="319", eos_token="318")


def train(name: str) -> list[dict[str, float]]:
    """The figures of each step."""
    torch.manual_seed(0)
    student = Gemma3ForCausalLM.from_pretrained(REPLAY / "model", dtype=torch.float32)
    student.model.embed_tokens.padding_idx = None
    rows = [{"prompt": " ".join(map(str, row["prompt_ids"]))} for row in ROWS]
    with tempfile.TemporaryDirectory() as place:
        asked = DistillationConfig(
            **{
                "output_dir": place, "max_steps": STEPS, "per_device_train_batch_size": BATCH, "logging_steps": 1,
                "report_to": [], "shuffle_dataset": False, "lr_scheduler_type": "constant", "save_strategy": "no",
                "use_cpu": True, "gradient_checkpointing": False, "bf16": False, "disable_dropout": True,
                "logging_nan_inf_filter": False, "max_completion_length": 16, **SETTINGS, **RUNS[name],
            }
        )  # fmt: skip
        trainer = Stored(
            model=student,
            teacher_model=Gemma3ForCausalLM.from_pretrained(HERE / "teacher", dtype=torch.float32),
            args=asked,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer(),
        )
        trainer.train()
    return [{ours: log[theirs] for theirs, ours in NAMES.items()} for log in trainer.state.log_history if "loss" in log]


if __name__ == "__main__":
    HERE.mkdir(exist_ok=True)
    teacher()
    figures = {"settings": SETTINGS, "batch": BATCH, "runs": {name: train(name) for name in RUNS}}
    (HERE / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")
