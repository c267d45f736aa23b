"""Tunix's side of the comparison of DPO steps: its DPOTrainer, its Gemma 3, adapters by qwix.

At its best documented settings for one CPU: its graph cached (the default of `train`), nothing computed again
(`RematConfig.NONE`), no metrics written, no checkpoints. It knows no reference of another time than the step's own.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import optax
import qwix
from flax import nnx
from side import Job, Turns
from tunix.models.gemma3 import model as gemma3
from tunix.models.gemma3 import params_safetensors
from tunix.sft.dpo import dpo_trainer
from tunix.sft.hooks import TrainingHooks

# The Hub's name of a module within a layer, and Tunix's of its weight.
_WEIGHTS = {
    "self_attn.q_proj": "attn.q_einsum.w",
    "self_attn.o_proj": "attn.attn_vec_einsum.w",
    "mlp.gate_proj": "mlp.gate_proj.kernel",
    "mlp.up_proj": "mlp.up_proj.kernel",
    "mlp.down_proj": "mlp.down_proj.kernel",
}


class Losses(TrainingHooks):
    """Gathers the losses, each of which Tunix tells a step later."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns

    def on_train_start(self, train_ctx):
        pass

    def on_train_end(self, train_ctx):
        pass

    def on_train_step_start(self, train_ctx):
        pass

    def on_train_step_end(self, train_ctx, train_step, train_loss):
        self.turns.losses.append(float(train_loss))

    def on_eval_step_start(self, train_ctx):
        pass

    def on_eval_step_end(self, train_ctx, eval_loss):
        pass


def base(job: Job) -> gemma3.Gemma3:
    """The job's model, in float32."""
    numbers = json.loads((job.model / "config.json").read_text())
    config = gemma3.ModelConfig(
        num_layers=numbers["num_hidden_layers"],
        num_embed=numbers["vocab_size"],
        embed_dim=numbers["hidden_size"],
        hidden_dim=numbers["intermediate_size"],
        num_heads=numbers["num_attention_heads"],
        head_dim=numbers["head_dim"],
        num_kv_heads=numbers["num_key_value_heads"],
        sliding_window_size=numbers["sliding_window"],
        local_base_frequency=int(numbers["rope_local_base_freq"]),
        global_base_frequency=int(numbers["rope_theta"]),
        param_dtype=jnp.float32,
    )
    return params_safetensors.create_model_from_safe_tensors(str(job.model), config, dtype=jnp.float32)


def adapted(model: gemma3.Gemma3, job: Job) -> gemma3.Gemma3:
    """The model with the job's adapters on it, put there as in Tunix's examples."""
    provider = qwix.LoraProvider(
        module_path=".*q_einsum|.*attn_vec_einsum|.*gate_proj|.*up_proj|.*down_proj",
        rank=job.numbers["rank"],
        alpha=job.numbers["alpha"],
    )
    policy = qwix.apply_lora_to_model(model, provider, **model.get_model_input(), rngs=nnx.Rngs(0))
    state = nnx.state(policy)
    leaves = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}
    inputs = set()
    for name, value in job.adapter.items():
        _, _, layer, module = name.split(".", 3)
        path = f"layers.{layer}.{_WEIGHTS[module]}_lora_a"
        leaves[path].set_value(jnp.asarray(value.reshape(leaves[path].get_value().shape)))
        inputs.add(path)
    if left := {path for path in leaves if path.endswith("_lora_a")} - inputs:
        raise ValueError(f"the job gives no first value of {sorted(left)}")
    nnx.update(policy, state)
    return policy


def main() -> None:
    """Steps of a job with Tunix's trainer, in its own loop."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job")
    turns, job = Turns(), Job(parser.parse_args().job)
    reference = base(job)
    policy = adapted(reference, job) if job.is_lora else nnx.clone(reference)
    trainer = dpo_trainer.DPOTrainer(
        model=policy,
        ref_model=reference,
        optimizer=optax.adamw(job.numbers["learning_rate"], weight_decay=0.0),
        training_config=dpo_trainer.DPOTrainingConfig(
            eval_every_n_steps=1_000_000, max_steps=None, beta=job.numbers["beta"]
        ),
    )
    trainer.with_training_hooks(Losses(turns))
    trained = nnx.LoRAParam if job.is_lora else nnx.Param
    batches = [job.padded(step) for step in range(len(job.pairs) // job.numbers["batch"])]

    def example(step: int) -> dpo_trainer.TrainingInput:
        batch = batches[step % len(batches)]
        sides = {
            f"{name}_{what}": batch[name if what == "ids" else f"{name}_mask"]
            for name in ("prompt", "chosen", "rejected")
            for what in ("ids", "mask")
        }
        return dpo_trainer.TrainingInput(**sides)

    def rows() -> Iterator[dpo_trainer.TrainingInput]:
        # The trainer asks for the next batch when it has dispatched a step, which is over when its weights are there.
        step = 0
        while turns.wait():
            inputs = example(step)
            turns.start()
            yield inputs
            jax.block_until_ready((nnx.state(trainer.model, trained), nnx.state(trainer.optimizer)))
            turns.stop()
            step += 1

    trainer.train(rows())
    turns.about = {"temporaries": temporaries(trainer, example(0)), "versions": versions()}
    turns.close()


def temporaries(trainer: dpo_trainer.DPOTrainer, example: dpo_trainer.TrainingInput) -> int:
    """Bytes of XLA's temporary arrays in the larger of the step's two programs."""
    inputs = trainer._prepare_inputs(example)
    arrays = (inputs.input_ids, inputs.positions, inputs.attention_mask, inputs.logits_to_keep, inputs.completion_mask)
    asked = dpo_trainer.compute_logps.lower(trainer.ref_model, *arrays)
    again = nnx.jit(trainer._train_step, donate_argnames=("optimizer",))  # noqa: TID251 - as the trainer does it
    step = again.lower(trainer.model, trainer.optimizer, inputs)
    return max(lowered.compile().compiled.memory_analysis().temp_size_in_bytes for lowered in (asked, step))


def versions() -> dict[str, str]:
    """Of what took the steps."""
    return {name: importlib.metadata.version(name) for name in ("google-tunix", "jax", "jaxlib", "flax", "qwix")}


if __name__ == "__main__":
    main()
