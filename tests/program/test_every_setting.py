"""Every setting acts: each field of each spec class changes what is compiled, placed or planned, or stands in a list.

A field is changed alone, and the lowered step (constants and shapes among its text), the layout and what the host is
told are compared. What acts outside of a compiled step (reading data, sampling, saving) is named in `ELSEWHERE` with
the test that shows it. A new field is in one of both, or the first test fails.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import attrs
import pytest
from small_lab.model import Small

from nnxdsl import (
    Adapter,
    AdaptiveEntropy,
    Data,
    Experiment,
    Guard,
    ImportanceSampling,
    Memory,
    Mesh,
    Model,
    Objective,
    Optimizer,
    Outer,
    Precision,
    Quantization,
    Reference,
    Reward,
    Schedule,
    TeacherServer,
    Weights,
    compile,
    evolve,
)
from nnxdsl.config.core.base import Spec, declared, is_family, members, registry
from nnxdsl.config.objectives.base import Objective as Family
from nnxdsl.config.objectives.distillation import JSD
from nnxdsl.config.objectives.divergence import Alpha, JensenShannon
from nnxdsl.config.objectives.multi_token import WithMTP
from nnxdsl.config.objectives.policy_gradient import PolicyGradient
from nnxdsl.models.families.registry import FAMILIES as NETWORKS
from nnxdsl.program.blueprint import build_blueprint

TESTS = Path(__file__).parents[1]
LORA = {"adapter": Adapter.LoRA(rank=2)}
SMALL = {**LORA, "model": Small(embed_dim=16, mlp_dim=32)}
RATE = Schedule.Constant(lr=0.1)
PAIRS = Data.Preferences("none.jsonl", max_prompt_length=16, max_completion_length=16)
FEEDBACK = Data.Feedback("none.jsonl", max_prompt_length=16, max_completion_length=16)
PROMPTS = Data.Prompts("none.jsonl", max_prompt_length=16, max_completion_length=16)
TEXT = Data.Text("none.jsonl", max_length=32)
REWARDS = (Reward("length"),)
POLICY_GRADIENTS = [kind for kind in registry.values() if issubclass(kind, PolicyGradient)]

# What is asked for beside the object under test, and that object where it needs arguments, by the object's name.
AROUND: dict[str, dict[str, Any]] = {
    "Divergence.Alpha": {"objective": Objective.DPO(divergence=Alpha())},
    "Distance.JSD": {"objective": Objective.Distill(teacher=Small(layers=2), loss_on="all"), "data": TEXT},
    "Objective.Distill": {"objective": Objective.Distill(teacher=Small(layers=2), loss_on="all"), "data": TEXT},
    "Objective.OnPolicyDistill": {"objective": Objective.OnPolicyDistill(teacher=Small(layers=2)), "data": PROMPTS},
    **{
        kind.__qualname__: {
            "objective": kind(rewards=REWARDS, num_generations=2, num_iterations=2, beta=0.04),
            "data": PROMPTS,
        }
        for kind in POLICY_GRADIENTS
    },
    "Objective.KTO": {"objective": Objective.KTO(), "data": FEEDBACK},
    "Objective.SFT": {"objective": Objective.SFT(loss_on="all"), "data": TEXT},
    "Objective.Sum": {
        "objective": Objective.Sum(terms=(Objective.DPO(), Objective.ChosenSFT()), weights=(1.0, 0.5)),
    },
    "Optimizer.AdamW": {"optimizer": Optimizer.AdamW(schedule=RATE, b2=0.99, weight_decay=0.1)},
    "Optimizer.Adafactor": {
        "optimizer": Optimizer.Adafactor(schedule=RATE, weight_decay=0.1, min_factored=16),
    },
    "Optimizer.Lion": {"optimizer": Optimizer.Lion(schedule=RATE, weight_decay=0.1)},
    "Optimizer.Muon": {
        "model": Model.Llama3("tiny"),  # without norms of queries and keys
        "optimizer": Optimizer.Muon(schedule=RATE, weight_decay=0.1),
    },
    "Optimizer.SGD": {"optimizer": Optimizer.SGD(schedule=RATE)},
    "Schedule.Constant": {"optimizer": Optimizer.SGD(schedule=Schedule.Constant(lr=0.2))},
    "Schedule.InverseSqrt": {"optimizer": Optimizer.SGD(schedule=Schedule.InverseSqrt(peak_lr=0.2))},
    "Schedule.WSD": {"optimizer": Optimizer.SGD(schedule=Schedule.WSD(peak_lr=0.2))},
    "Schedule.WarmupCosine": {"optimizer": Optimizer.SGD(schedule=Schedule.WarmupCosine(peak_lr=0.2))},
    "Schedule.WarmupLinear": {"optimizer": Optimizer.SGD(schedule=Schedule.WarmupLinear(peak_lr=0.2))},
    "Adapter.LoRA": {"adapter": Adapter.LoRA()},
    "Adapter.DoRA": {"adapter": Adapter.DoRA()},
    "Quantization.NF4": {**SMALL, "quantization": Quantization.NF4(block_size=8)},
    "Quantization.Int4": {**SMALL, "quantization": Quantization.Int4(block_size=8)},
    "Quantization.Int8": {**SMALL, "quantization": Quantization.Int8(block_size=8)},
    "Quantization.FP8": {**SMALL, "quantization": Quantization.FP8(block_size=8)},
    "Quantization.QAT": {"quantization": Quantization.QAT()},
    "Quantization.Int8Training": {"quantization": Quantization.Int8Training()},
    "Quantization.FP8Training": {"quantization": Quantization.FP8Training()},
    "Reference.Synced": {"reference": Reference.Synced()},
    "Outer.DiLoCo": {"outer": Outer.DiLoCo()},
    "Guard.Skip": {"guard": Guard.Skip()},
    "Guard.SkipSpikes": {"guard": Guard.SkipSpikes()},
    "Memory": {},
    "Precision": LORA,
    "Experiment": {},
    "Data.Preferences": {"data": PAIRS},
    "Data.Feedback": {"objective": Objective.KTO(), "data": FEEDBACK},
    "Data.Prompts": {"objective": Objective.GRPO(rewards=REWARDS, num_generations=2), "data": PROMPTS},
    "Data.Text": {"objective": Objective.SFT(loss_on="all"), "data": TEXT},
    "Data.Conversations": {"objective": Objective.SFT(), "data": Data.Conversations("none.jsonl", max_length=32)},
}
LIBRARY = {
    "name weight": "names_are_the_settings_and_weights_act",
    "after": "answers_after_reasoning_are_those_of_trl",
    "answer_timeout": "an_answer_that_never_ends_is_wrong_and_the_next_one_is_compared",
    "right_short right_long wrong_short wrong_long": "cosine_length_is_that_of_trl",
    "exceeded": "cosine_length_by_hand",
    "start end needs_answer": "the_format_of_reasoning_by_hand",
    "ngram_size max_penalty": "the_penalty_of_repetition_is_that_of_trl",
    "max_length cache": "the_soft_overlong_punishment_is_that_of_trl",
}
"""The tests of the settings of rewards that need no code."""

PLACE = {
    "Divergence": "objective.divergence",
    "Distance": "objective.distance",
    "Schedule": "optimizer.schedule",
    **{
        name: name.lower() for name in ("Adapter", "Data", "Guard", "Memory", "Mesh", "Objective", "Optimizer", "Outer")
    },
    **{name: name.lower() for name in ("Precision", "Quantization", "Reference", "Model")},
    "Experiment": "",
}

# What a field is changed to where its type does not tell; by the field's name, or the class's and the field's.
OTHERS: dict[str, Any] = {
    "divergence": JensenShannon(),
    "ld_alpha": 0.5,
    "label_smoothing": 0.2,
    "distance": JSD(),
    "teacher": Small(layers=4),
    "terms": (Objective.IPO(), Objective.ChosenSFT()),
    "Objective.Sum.weights": (1.0, 0.25),
    "Objective.Distill.top_k": 4,
    "rewards": (Reward("length", weight=2.0),),
    "schedule": Schedule.Constant(lr=0.3),
    "targets": ("mlp",),
    "ranks": (("mlp", 3),),
    "alphas": (("mlp", 9.0),),
    "dropout": 0.25,
    "undecayed": ("mlp",),
    "by_adamw": ("mlp",),
    "epsilon_high": 0.3,
    "delta": 1.5,
    "max_grad_norm": 0.5,
    "max_update_rms": 0.5,
    "update_rms": 0.4,
    "max_attention_logit": 2.0,
    "momentum": 0.5,
    "workers": 4,
    "max_loss_ratio": 3.0,
    "warmup_ratio": 0.3,
    "decay_ratio": 0.3,
    "final_ratio": 0.2,
    "block_size": 4,
    "offload": ("optimizer",),
    "logprob_tokens": 5,
    "Memory.reference": "cached",
    "Memory.attention": "chunked",
    "Memory.remat": "full",
    "Precision.compute": "bfloat16",
    "Precision.frozen": "bfloat16",
    "Experiment.model": Small(layers=2),
    "Experiment.data": Data.Preferences("none.jsonl", max_prompt_length=8, max_completion_length=16),
    "Experiment.objective": Objective.IPO(),
    "Experiment.optimizer": Optimizer.AdamW(schedule=RATE),
    "Experiment.adapter": Adapter.LoRA(rank=2),
    "Experiment.quantization": Quantization.QAT(),
    "Experiment.reference": Reference.Synced(),
    "Experiment.frozen": ("embed",),
    "Experiment.precision": Precision(compute="bfloat16"),
    "Experiment.guard": Guard.Skip(),
    "Experiment.outer": Outer.DiLoCo(),
    "Experiment.microbatch_size": 2,
    "Experiment.memory": Memory(remat="full"),
    "Mesh.rules": (("mlp", "fsdp"),),
    "Mesh.array_rules": (("layers.blocks.*.mlp.up.kernel", (("embed", None),)),),
}

# Fields whose effect is no part of one device's step, and the test that shows it.
DATA = "data/test_batches.py::test_every_epoch_is_a_permutation_that_seed_and_epoch_decide"
BAD = "data/test_preferences.py::test_bad_rows_stop_or_are_skipped_and_counted"
PATH = "data/test_rows.py::test_missing_file_names_the_current_directory"
RENAMED = "data/test_layouts.py::test_columns_are_renamed"
FOLDER = "data/test_sources.py::test_a_folder_of_save_to_disk"
CACHED = "data/test_hub.py::test_a_dataset_in_the_cache"
RENDERED = "data/test_template_args.py::test_rows_are_rendered_with_the_arguments"
SYSTEM = "data/test_template_args.py::test_chats_without_a_system_message_get_that_of_the_data"
SHARES = "data/test_mixture.py::test_no_source_is_two_rows_from_its_share"
SAMPLED = "generate/test_sampling.py::test_who_may_be_drawn"
SAVED = "trainer/test_two_stages.py::test_the_last_checkpoints_are_kept"
COUNTED = "optim/test_step_guard.py::test_a_run_ends_when_it_skips_more_steps_than_it_may"
FINITE = "weights/test_non_finite.py::test_refused_unless_asked"
HUB = "weights/test_sources.py::test_a_hub_directory_with_its_tokenizer"
ADAPTIVE = "program/test_groups.py::test_a_step_has_the_weight_of_entropies_that_its_state_says"
CORRECTED = "losses/test_policy_gradient.py::test_what_trl_computes_with_the_log_probs_of_another_sampler"
MASKED = "losses/test_policy_gradient.py::test_what_trl_computes_with_an_off_policy_mask"
SERVED = "rollouts/test_server_engine.py::test_it_samples_with_the_weights_of_each_step"
REFUSED = "rollouts/test_server_engine.py::test_what_a_server_refuses"
TAUGHT = "rollouts/test_served_teacher.py::test_what_a_teacher_answers_is_checked"
LIKELIEST = "rollouts/test_served_teacher.py::test_distances_over_the_top_k_of_servers"
SEVERAL = "rollouts/test_served_teacher.py::test_each_row_has_the_teacher_that_it_names"
PRIVILEGED = "program/test_privileged_context.py::test_teachers_read_completions_after_prompts_of_their_own"
ENVIRONMENT = "rollouts/test_environments.py::test_an_episode_has_turns"
ANSWERS = "rollouts/test_rollouts.py::test_answers_are_a_function_of_seed_step_and_weights"
BESIDE_PAIRS = "program/test_mtp_pairs.py::test_every_objective_counts_what_the_scale_is_made_of"
FURTHER = "program/test_mtp_loss.py::test_loss_and_gradient_equal_those_of_the_reference_in_micro_batches"
INDEXERS = {
    "indexer_loss_coef": "program/test_indexer_loss.py::test_sparse_stage_equals_the_reference",
    "indexer_stage": "program/test_indexer_loss.py::test_dense_warmup_equals_the_reference",
}
TRACKED = "tracking/test_clients.py::test_"
WRITTEN = "rollouts/test_log.py::test_each_rollout_is_written_once_and_changes_nothing"
ELSEWHERE = {
    "Tracking.TensorBoard.directory": f"{TRACKED}tensorboard",
    **{f"Tracking.WandB.{name}": f"{TRACKED}wandb" for name in ("project", "mode", "entity")},
    **{f"Tracking.Trackio.{name}": f"{TRACKED}trackio" for name in ("project", "space")},
    **{f"Tracking.MLflow.{name}": f"{TRACKED}mlflow" for name in ("uri", "experiment")},
    **{
        f"Data.{kind}.{name}": test
        for kind in ("Conversations", "Feedback", "Preferences", "Prompts", "Text")
        for name, test in (("order", DATA), ("bad_rows", BAD), ("path", PATH))
    },
    **{
        f"Data.{kind}.{name}": test
        for kind in ("Conversations", "Feedback", "Preferences", "Prompts", "Text")
        for name, test in (("columns", RENAMED), ("split", FOLDER), ("config", CACHED), ("revision", CACHED))
    },
    **{
        f"Data.{kind}.{name}": test
        for kind in ("Conversations", "Feedback", "Preferences", "Prompts")
        for name, test in (("template_args", RENDERED), ("system", SYSTEM))
    },
    **{
        f"Data.{kind}.roles": "data/test_messages.py::test_roles_are_mapped_to_those_of_chats"
        for kind in ("Conversations", "Feedback", "Preferences", "Prompts")
    },
    "Data.Preferences.margin": "program/test_reward_model.py::test_each_step_with_margins_equals_that_of_trl",
    "Data.Text.field": "data/test_conversations.py::test_text",
    "Data.Mixture.sources": SHARES,
    "Data.Mixture.unit": "data/test_mixture.py::test_weights_count_rows_epochs_or_tokens",
    "Data.Mixture.order": "data/test_mixture.py::test_sources_are_spread_evenly_without_shuffling",
    "BadRows.Skip.at_most": BAD,
    "Batching.Bucketed.buckets": "data/test_packing.py::test_buckets_are_few_and_the_last_is_the_longest",
    "Batching.Packed.length": "data/test_packing.py::test_what_does_not_say_how_it_is_packed_is_refused",
    "Checkpoint.every_steps": SAVED,
    "Checkpoint.every_minutes": "trainer/test_checkpointing.py::test_a_state_is_saved_by_time_and_before_evaluations",
    "Checkpoint.keep": SAVED,
    **dict.fromkeys(("RolloutLog.every_steps", "RolloutLog.prompts", "Experiment.rollouts"), WRITTEN),
    "Evaluation.every_steps": "trainer/test_two_stages.py::test_held_out_reward_accuracy_rises",
    "Evaluation.data": "trainer/test_evaluation.py::test_rows_come_as_their_data_order_them",
    "Evaluation.prompts": "trainer/test_two_stages.py::test_samples_have_policy_and_reference",
    "Evaluation.max_new_tokens": "generate/test_decode_loop.py::test_greedy_is_the_naive_loop",
    "Evaluation.num_speculative_tokens": (
        "generate/test_speculative.py::test_an_evaluation_and_a_pretrained_model_have_it"
    ),
    "Evaluation.temperature": "generate/test_decode_loop.py::test_draws_follow_the_softmax",
    "Evaluation.top_k": SAMPLED,
    "Evaluation.top_p": SAMPLED,
    "Experiment.name": "config/test_identity.py::test_",
    "Experiment.notes": "trainer/test_two_stages.py::test_the_generated_file_builds_the_same_experiment",
    "Experiment.seed": ANSWERS,
    "Experiment.steps": "trainer/test_two_stages.py::test_metrics_have_one_row_a_step",
    "Experiment.epochs": "trainer/test_epochs.py::test_a_run_of_epochs_is_that_of_its_steps_and_resumes",
    "Experiment.test_size": "trainer/test_epochs.py::test_held_out_rows_are_evaluated_and_never_trained_on",
    "Experiment.tracking": f"{TRACKED}tensorboard",
    "Experiment.mesh": "program/test_meshes.py::test_meshes_and_one_device_agree",
    "Experiment.batching": "program/test_packing.py::test_a_step_is_the_same_however_its_rows_are_batched",
    "Experiment.evaluation": "trainer/test_two_stages.py::test_held_out_reward_accuracy_rises",
    "Experiment.checkpoint": SAVED,
    "Adapter.LoRA.start": "weights/test_adapter_sources.py::test_the_reference_is_the_adapter_as_it_began",
    "Adapter.DoRA.start": "weights/test_adapter_sources.py::test_the_reference_is_the_adapter_as_it_began",
    "Guard.Skip.max_in_a_row": COUNTED,
    "Guard.Skip.max_total": COUNTED,
    "Guard.SkipSpikes.max_in_a_row": COUNTED,
    "Guard.SkipSpikes.max_total": COUNTED,
    "Objective.SFT.loss_on": "data/test_conversations.py::test_loss_on_completion_has_all_that_follows_the_prompt",
    "Objective.Distill.loss_on": "data/test_conversations.py::test_loss_on_completion_has_all_that_follows_the_prompt",
    **{
        f"{kind.__qualname__}.{name}": test
        for kind in (*POLICY_GRADIENTS, Objective.OnPolicyDistill)
        for name, test in (
            ("rewards", "data/test_rewards.py::test_a_function_gets_the_columns_that_it_names"),
            ("num_generations", ANSWERS),
            ("top_k", SAMPLED),
            ("top_p", SAMPLED),
            ("num_speculative_tokens", "generate/test_speculative.py::test_rollouts_have_it"),
            ("kv_cache_dtype", "rollouts/test_rollouts.py::test_what_a_cache_in_8_bits_rounds"),
            ("num_iterations", "rollouts/test_rollouts.py::test_a_run_learns_and_goes_on_bit_equal"),
            ("environment", ENVIRONMENT),
            ("max_num_gen_batches", "rollouts/test_dynamic_sampling.py::test_a_batch_has_groups_with_a_spread"),
            ("mask_truncated_completions", "rollouts/test_rollouts.py::test_truncated_completions_can_be_left_out"),
            ("importance_sampling", CORRECTED),
            ("off_policy_mask_threshold", MASKED),
            ("router_replay", "rollouts/test_router_replay.py::test_experts_in_training_are_those_of_sampling"),
            ("entropy_coef", "program/test_entropy.py::test_what_trl_computes"),
            ("adaptive_entropy", ADAPTIVE),
            (
                "top_entropy_quantile",
                "rollouts/test_rollouts.py::test_tokens_of_high_entropy_are_chosen_among_those_that",
            ),
            ("engine", SERVED),
            ("scale_rewards", "losses/test_advantages.py::test_by_hand"),
        )
        if name in declared(kind)
    },
    "Objective.OnPolicyDistill.rewards": (
        "program/test_on_policy_distillation.py::test_a_run_learns_and_measures_the_distance_of_held_out_completions"
    ),
    **{f"TeacherServer.{name}": TAUGHT for name in declared(TeacherServer)},
    "Objective.OnPolicyDistill.teacher_server": TAUGHT,
    "Objective.OnPolicyDistill.teacher_servers": SEVERAL,
    "Objective.OnPolicyDistill.teacher_top_k": LIKELIEST,
    **{f"Data.Prompts.{name}": PRIVILEGED for name in ("privileged_context", "teacher_prompt_template")},
    **{f"Engine.Server.{name}": REFUSED for name in ("url", "weights_directory", "api_key_variable")},
    "Engine.Server.max_staleness": "rollouts/test_server_engine.py::test_completions_are_sampled_ahead",
    "Engine.Server.timeout": "rollouts/test_server_engine.py::test_a_server_that_hangs",
    "Engine.Server.adapter_only": "rollouts/test_server_engine.py::test_each_step_has_an_adapter_of_a_new_name",
    "Engine.Server.max_logp_difference": (
        "rollouts/test_server_engine.py::test_another_model_is_refused_before_anything_is_learned"
    ),
    **{f"AdaptiveEntropy.{name}": ADAPTIVE for name in declared(AdaptiveEntropy)},
    **{f"ImportanceSampling.{name}": CORRECTED for name in declared(ImportanceSampling)},
    "Environment.name": ENVIRONMENT,
    "Environment.max_turns": ENVIRONMENT,
    "Environment.timeout": "rollouts/test_environments.py::test_what_fails_is_named",
    "Objective.RLOO.beta": "rollouts/test_rollouts.py::test_the_divergence_is_in_the_reward",
    "Objective.ReinforcePlusPlus.beta": "rollouts/test_rollouts.py::test_the_divergence_is_in_the_reward",
    "Objective.ReinforcePlusPlus.baseline": "losses/test_advantages.py::test_of_reinforce_plus_plus_token_by_token",
    "Reference.Checkpoint.weights": "program/test_references.py::test_other_weights_are_asked_beside_the_policy",
    "Objective.Reward.center_rewards_coefficient": "program/test_reward_model.py::test_each_step_equals_that_of_trl",
    **{
        f"Reward.Model.{name}": f"rollouts/test_reward_model.py::test_{test}"
        for name, test in {
            "weights": "what_is_no_reward_model_is_refused",
            "name": "a_run_is_the_reward_of_sampled_completions",
            "weight": "a_run_is_the_reward_of_sampled_completions",
            "dtype": "a_run_is_the_reward_of_sampled_completions",
            "batch_size": "rewards_are_those_of_training",
        }.items()
    },
    "Reward.Function.name": "data/test_rewards.py::test_rewards_that_are_there",
    "Reward.Function.weight": "data/test_rewards.py::test_a_function_gets_the_columns_that_it_names",
    "Reward.Function.timeout": "data/test_rewards_in_time.py::test_a_function_that_hangs_ends_by_its_name",
    "Reward.Function.max_concurrency": (
        "data/test_rewards_in_time.py::test_asynchronous_calls_run_together_up_to_a_number"
    ),
    **{
        f"{kind.__qualname__}.{name}": f"data/test_rewards_library.py::test_{test}"
        for kind in members(Reward).values()
        for names, test in LIBRARY.items()
        for name in names.split()
        if kind is not Reward.Function and name in declared(kind)
    },
    "Tokenizer.Bytes.allow_mismatch": (
        "trainer/test_tokenizer_mismatch.py::test_bytes_over_a_model_with_its_own_tokenizer"
    ),
    "Tokenizer.Bytes.chat_template": "data/test_tokenizers.py::test_a_chat_template_of_bytes",
    "Tokenizer.File.allow_mismatch": "trainer/test_tokenizer_mismatch.py::test_more_ids_than_the_embedding_has_rows",
    "Tokenizer.File.path": HUB,
    "Tokenizer.File.chat_template": "data/test_tokenizers.py::test_chat_template_of_its_own_file",
    "Weights.Checkpoint.path": "weights/test_sources.py::test_a_run_and_each_of_its_steps_give_the_adapted_model",
    "Weights.From.experiment": "trainer/test_two_stages.py::test_both_stages_run_by_one_command",
    "Weights.Checkpoint.allow_non_finite": FINITE,
    "Weights.HF.path": HUB,
    "Weights.HF.allow_non_finite": FINITE,
    "Weights.PEFT.path": "formats/test_peft.py::test_logits_equal_those_of_peft",
    "Weights.PEFT.allow_non_finite": FINITE,
    **{
        f"Weights.Merged.{name}": "weights/test_adapter_sources.py::test_several_adapters_are_merged"
        for name in ("base", "adapters", "coefficients")
    },
    "Model.HF.path": HUB,
    **{
        f"{kind.__qualname__}.mtp_loss_weight": BESIDE_PAIRS
        for kind in registry.values()
        if issubclass(kind, WithMTP) and kind.batch_kind == "pairs"
    },
    "Objective.SFT.mtp_loss_weight": FURTHER,
    "Objective.Distill.mtp_loss_weight": "program/test_mtp_loss.py::test_it_is_added_to_distillation",
    "Objective.KTO.mtp_loss_weight": "program/test_mtp_pairs.py::test_losses_and_gradients_are_those_of_rows",
    **{
        f"Model.{kind}.mtp_layers": FURTHER
        for kind in ("HF", *(family.spec.__name__ for family in NETWORKS if "mtp_layers" in declared(family.spec)))
    },
    **{
        f"Model.{kind}.{name}": test
        for kind in ("HF", *(family.spec.__name__ for family in NETWORKS if "indexer_stage" in declared(family.spec)))
        for name, test in INDEXERS.items()
    },
}
MESHES = {
    "rules": Mesh(fsdp=2),
    "array_rules": Mesh(fsdp=2),
    "indivisible": Mesh(fsdp=2),
    "zero1": Mesh(data=2),
    "slices": Mesh(data=2),
}
"""On what mesh a field of a mesh acts."""


BESIDE = {"Launcher", "Range", "Pruner"}
"""Families of what stands beside an experiment; tests/launchers and tests/config/test_search.py try them."""


def classes() -> list[type[Spec]]:
    result = [kind for _, kind in sorted(registry.items()) if not is_family(kind) and declared(kind)]
    return [kind for kind in result if kind.family.__name__ not in BESIDE]


def settings() -> list[tuple[type[Spec], str]]:
    return [
        (kind, name) for kind in classes() for name in declared(kind) if f"{kind.__qualname__}.{name}" not in ELSEWHERE
    ]


def changed(kind: type[Spec], name: str, value: Any) -> Any:
    """Another value of a field."""
    for key in (f"{kind.__qualname__}.{name}", name):
        if key in OTHERS:
            return OTHERS[key]
    annotation = declared(kind)[name].type
    choices = [
        choice
        for part in (annotation, *get_args(annotation))
        if get_origin(part) is Literal
        for choice in get_args(part)
    ]
    if choices:
        return next(choice for choice in choices if choice != value)
    match value:
        case bool():
            return not value
        case int():
            return value + 1 if value > 1 else 2
        case float():
            return value / 2 if value else 0.25
    raise AssertionError(f"{kind.__qualname__}.{name}: no other value is known than {value!r}; write one in OTHERS")


def seen(experiment: Experiment) -> str:
    """A digest of the lowered step and of where its arrays live."""
    program = compile(experiment)
    text = program.lower().as_text() + program.layout.dump()
    return hashlib.sha256(text.encode()).hexdigest()


def test_no_field_is_forgotten() -> None:
    known = {f"{kind.__qualname__}.{name}" for kind in classes() for name in declared(kind)}
    assert ELSEWHERE.keys() <= known
    for key, test in ELSEWHERE.items():
        file, _, name = test.partition("::")
        assert re.search(rf"^def {name}", (TESTS / file).read_text(), re.MULTILINE), key
    for kind, name in settings():
        family = kind.family.__name__
        assert family in PLACE, f"{kind.__qualname__}.{name} is neither tried nor in ELSEWHERE"
        default = declared(kind)[name].default
        if kind.family is not Model.family and kind is not Mesh and default is not attrs.NOTHING:
            changed(kind, name, default)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [k for k in classes() if k.family is not Model.family and k is not Mesh], ids=lambda kind: kind.__qualname__
)
def test_it_acts(kind: type[Spec], experiment: Callable[..., Experiment]) -> None:
    mine = [name for other, name in settings() if other is kind]
    if not mine:
        pytest.skip("all of it acts elsewhere")
    around = AROUND.get(kind.__qualname__)
    if around is None:
        assert issubclass(kind, Family), f"{kind.__qualname__}: write in AROUND what it is tried in"
        around = {"objective": kind()}
    whole = experiment(**around)
    place = PLACE[kind.family.__name__]
    if kind.__qualname__ == "Distance.JSD":
        whole = evolve(whole, {place: kind()})
    before = seen(whole)
    idle = []
    for name in mine:
        path = f"{place}.{name}".lstrip(".")
        held = whole
        for part in path.split("."):
            held = getattr(held, part)
        after = evolve(whole, {path: changed(kind, name, held)})
        if seen(after) == before:
            idle.append(path)
    assert idle == []


@pytest.mark.slow
@pytest.mark.parametrize("name", declared(Mesh))
def test_a_field_of_a_mesh_places_arrays(name: str, experiment: Callable[..., Experiment]) -> None:
    odd = {"model": Small(mlp_dim=33)} if name == "indivisible" else {}
    whole = experiment(**odd, mesh=Mesh())
    before = evolve(whole, {"mesh": MESHES.get(name, Mesh())})
    after = evolve(before, {f"mesh.{name}": changed(Mesh, name, getattr(before.mesh, name))})

    def placed(asked: Experiment) -> object:
        try:
            blueprint = build_blueprint(asked)
        except ValueError as error:  # it does not fit without the setting
            return str(error)
        layout = blueprint.layout
        return layout.dump(), layout.batch_spec(4), layout.stages, layout.length_shards, str(layout.mesh)

    assert placed(before) != placed(after)


@pytest.mark.parametrize(
    "kind", [k for k in classes() if k.family is Model.family and k is not Model.HF], ids=lambda kind: kind.__qualname__
)
def test_a_model_is_its_size_and_weights(kind: type[Any], experiment: Callable[..., Experiment]) -> None:
    from nnxdsl.program.architecture import architecture  # noqa: PLC0415

    sizes = get_args(declared(kind)["size"].type)
    assert len({str(architecture(kind(size))) for size in sizes}) == len(sizes)
    training = {"router_aux_loss_coef", "mtp_layers", *INDEXERS}
    assert set(declared(kind)) <= {"size", "weights", "tokenizer", *training}
    if "router_aux_loss_coef" in declared(kind):
        assert experiment(model=kind("tiny", router_aux_loss_coef=0.25)).router_aux_loss_coef == 0.25
        assert experiment(model=kind("tiny", weights=Weights.Random())).router_aux_loss_coef == 0
