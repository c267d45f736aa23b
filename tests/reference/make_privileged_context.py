"""Distils a model from itself with privileged context by TRL's SDFTTrainer, and stores the figures of each step.

One command, from the repository's root (figures stored here: torch 2.15, transformers 5.24, TRL 1.16):

    python tests/reference/make_privileged_context.py     # with torch and TRL

Nothing of nnxdsl is imported here. Student and teacher are the model of `replay/`. The trainer's own code is run, but
for the sampling: what the student writes after each prompt of `replay/pairs.jsonl` is the beginning of the chosen
completion, `COMPLETION` tokens of it: TRL's loss is a mean of the means of completions. The context of a row has the
first tokens of the rejected completion, so that teacher's prompts have other lengths.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import Gemma3ForCausalLM, PreTrainedTokenizerFast
from trl.experimental.sdft import SDFTConfig, SDFTTrainer

HERE = Path(__file__).parent / "privileged_context"
REPLAY = Path(__file__).parent / "replay"
BATCH, STEPS, COMPLETION = 4, 5, 4
SETTINGS = {"learning_rate": 3e-3, "weight_decay": 0.1, "max_grad_norm": 1.0, "adam_beta2": 0.999}
RUNS: dict[str, dict[str, Any]] = {
    "reverse": {"distillation_alpha": 1.0},
    "forward": {"distillation_alpha": 0.0},
    "jsd": {"distillation_alpha": 0.3},
    "sampled": {"distillation_alpha": 1.0, "distillation_mode": "sampled_token"},
}
ROWS = [json.loads(line) for line in (REPLAY / "pairs.jsonl").read_text().splitlines()]
ROWS = [row for row in ROWS if len(row["chosen_ids"]) >= COMPLETION]
COMPLETIONS = {tuple(row["prompt_ids"]): row["chosen_ids"][:COMPLETION] for row in ROWS}


class Stored(SDFTTrainer):
    """The trainer, whose student has sampled the stored completions."""

    def _generate(self, prompt_ids: list[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
        return prompt_ids, [COMPLETIONS[tuple(ids)] for ids in prompt_ids]


def tokenizer() -> PreTrainedTokenizerFast:
    """One whose words are token ids."""
    result = Tokenizer(models.WordLevel({str(index): index for index in range(320)}, "0"))
    result.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=result, pad_token="319", eos_token="318")


def text(ids: list[int]) -> str:
    return " ".join(map(str, ids))


def train(name: str) -> list[dict[str, float]]:
    """The figures of each step."""
    torch.manual_seed(0)
    student = Gemma3ForCausalLM.from_pretrained(REPLAY / "model", dtype=torch.float32)
    student.model.embed_tokens.padding_idx = None
    rows = [
        {"prompt": text(row["prompt_ids"]), "privileged_context": text(row["rejected_ids"][: 2 + index % 3])}
        for index, row in enumerate(ROWS)
    ]
    with tempfile.TemporaryDirectory() as place:
        asked = SDFTConfig(
            **{
                "output_dir": place, "max_steps": STEPS, "per_device_train_batch_size": BATCH, "logging_steps": 1,
                "report_to": [], "shuffle_dataset": False, "lr_scheduler_type": "constant", "save_strategy": "no",
                "use_cpu": True, "gradient_checkpointing": False, "bf16": False, "num_generations": 1,
                "gradient_accumulation_steps": 1, "max_completion_length": COMPLETION, "distillation_is_clip": None,
                "distillation_mode": "full_logits", "teacher_prompt_template": "{privileged_context} {prompt}",
                **SETTINGS, **RUNS[name],
            }
        )  # fmt: skip
        trainer = Stored(model=student, args=asked, train_dataset=Dataset.from_list(rows), processing_class=tokenizer())
        trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    names = {"grad_norm": "grad_norm"}
    if name != "sampled":  # whose value is another one, of the same gradient
        names["loss"] = "self_distillation/distillation_loss"
    return [{ours: log[theirs] for ours, theirs in names.items()} for log in logs]


if __name__ == "__main__":
    HERE.mkdir(exist_ok=True)
    figures = {"settings": SETTINGS, "batch": BATCH, "completion": COMPLETION}
    figures["runs"] = {name: train(name) for name in RUNS}
    (HERE / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")
