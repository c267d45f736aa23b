"""TRL's side of the comparison of DPO steps: its DPOTrainer, transformers' Gemma 3, adapters by peft.

At its best documented settings for a CPU: float32, nothing computed again, the fused AdamW, no clipping. The attention
and `torch.compile` are for `dpo_step.py` to choose, the reference is asked once or at every step. Batches without
padding (`padding_free`) are not to be had in TRL 1.16, and without Triton, so on CPUs, its loss scores every position
of a row.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
from typing import Any

from side import Job, Turns


def main() -> None:
    """Steps of a job with TRL's trainer, in its own loop."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job")
    parser.add_argument("--reference", choices=("cached", "online"), required=True)
    parser.add_argument("--attention", choices=("sdpa", "eager"), required=True)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    job = Job(options.job)
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(job.directory / "hf"), "TQDM_DISABLE": "1"}
    os.environ |= {"TOKENIZERS_PARALLELISM": "false"}
    train(job, options)


def train(job: Job, options: argparse.Namespace) -> None:
    """Takes the steps, once the environment is set that the libraries read when they are imported."""
    # ruff: noqa: PLC0415
    import datasets
    import peft
    import tokenizers
    import torch
    import transformers
    import trl

    turns = Turns()
    datasets.disable_progress_bars()

    class InTurns(transformers.TrainerCallback):
        """The trainer's own loop, which waits before a step's data is taken and is timed from then on."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            turns.wait()

        def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            turns.start()

        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            turns.stop()
            if not turns.wait():
                control.should_training_stop = True

    class Trainer(trl.DPOTrainer):
        """The trainer on rows that are token ids already, whose losses are gathered."""

        def _prepare_dataset(self, dataset: Any, *rest: Any) -> Any:
            return dataset

        def training_step(self, *args: Any, **rest: Any) -> Any:
            loss = super().training_step(*args, **rest)
            turns.losses.append(float(loss))
            return loss

    model = transformers.AutoModelForCausalLM.from_pretrained(
        job.model, dtype=torch.float32, attn_implementation=options.attention
    )
    adapter = None
    if job.is_lora:
        adapter = peft.LoraConfig(
            r=job.numbers["rank"],
            lora_alpha=job.numbers["alpha"],
            lora_dropout=0.0,
            target_modules=sorted({name.rsplit(".", 1)[1] for name in job.adapter}),
            task_type="CAUSAL_LM",
        )
    vocabulary = {"<pad>": 0, "<eos>": 1}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<eos>")),
        pad_token="<pad>",
        eos_token="<eos>",
    )
    arguments = trl.DPOConfig(
        output_dir=str(job.directory / "trl"),
        use_cpu=True,
        bf16=False,
        beta=job.numbers["beta"],
        precompute_ref_log_probs=options.reference == "cached",
        gradient_checkpointing=False,
        per_device_train_batch_size=job.numbers["batch"],
        train_sampling_strategy="sequential",
        max_steps=1_000_000,
        learning_rate=job.numbers["learning_rate"],
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        weight_decay=0.0,
        max_grad_norm=0.0,
        max_length=None,
        torch_compile=options.compile,
        save_strategy="no",
        report_to="none",
        logging_steps=1_000_000,
        disable_tqdm=True,
        seed=job.numbers["seed"],
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=datasets.Dataset.from_list(job.pairs),
        processing_class=tokenizer,
        callbacks=[InTurns()],
        peft_config=adapter,
    )
    fill(trainer.model, job)
    trainer.train()
    names = ("trl", "transformers", "peft", "accelerate", "torch")
    turns.about = {"temporaries": None, "versions": {name: importlib.metadata.version(name) for name in names}}
    turns.close()


def fill(model: Any, job: Job) -> None:
    """Gives the adapters the job's first values."""
    import torch

    inputs = dict(job.adapter)
    for name, parameter in model.named_parameters():
        if ".lora_A." in name:
            module = name.removeprefix("base_model.model.").split(".lora_A.")[0]
            with torch.no_grad():
                parameter.copy_(torch.from_numpy(inputs.pop(module).T.copy()))
    if inputs:
        raise ValueError(f"no adapter takes the first value of {sorted(inputs)}")


if __name__ == "__main__":
    main()
