"""Speculative decoding changes how many tokens a pass yields, and no token: greedy, sampled, stopped, in windows."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxdsl
from nnxdsl import (
    Data,
    Evaluation,
    Experiment,
    Model,
    Objective,
    Optimizer,
    PlanError,
    Reward,
    Schedule,
    SpecError,
    Tokenizer,
    Weights,
    WeightsError,
)
from nnxdsl import compile as compile_experiment
from nnxdsl.adapters.lora import abstract_decoder
from nnxdsl.config.precision import KVCacheDtype
from nnxdsl.data import Prompts, load
from nnxdsl.data.tokenizers.base import BytesTokenizer
from nnxdsl.data.tokenizers.encode import Encoder
from nnxdsl.generate.decode_loop import DecodeLoop
from nnxdsl.generate.sampler import Sampler
from nnxdsl.generate.sampling import Sampling
from nnxdsl.models import params
from nnxdsl.models.config.attention import AttentionConfig
from nnxdsl.models.config.decoder import DecoderConfig
from nnxdsl.models.config.deltanet import GatedDeltaNetConfig
from nnxdsl.models.config.feed_forward import MLPConfig
from nnxdsl.models.config.layer_pattern import LayerPattern, local_then_global
from nnxdsl.models.config.rope import Rope
from nnxdsl.models.families.deepseek_v3 import DEEPSEEK_V3
from nnxdsl.program.blueprint import build_blueprint
from nnxdsl.rollouts.rollouts import Rollouts
from nnxdsl.trainer.evaluation import Evaluator

FIGURES = Path(__file__).parent.parent / "reference" / "mtp" / "deepseek_v3"
NEW = 21
WINDOWED = DecoderConfig(
    vocab_size=8, embed_dim=32, num_heads=4, num_kv_heads=2, head_dim=8, window=4,
    mlp=MLPConfig(dim=64, activation="gelu_tanh"), layers=LayerPattern(num_layers=4, pattern=local_then_global(3)),
    rope_global=Rope(theta=1_000_000.0, factor=2.0),
    attention=AttentionConfig(query_scale=12**-0.5, query_key_norm="head"),
    max_length=64, mtp_layers=1,
)  # fmt: skip
LATENT = attrs.evolve(DEEPSEEK_V3["tiny"], vocab_size=8, mtp_layers=1)
CONFIGS = {"windowed": WINDOWED, "latent": LATENT}
PROMPTS = ([3, 1, 4, 1, 5, 0, 2, 6], [7], [1, 2, 3] * 6, [3, 1, 4, 1, 5, 0, 2, 6])
HOT = Sampling(NEW, temperature=1.5, top_k=7, top_p=0.95, seed=4)
Leaves = dict[str, jax.Array]
Built = tuple[params.AbstractModel, DecoderConfig, Leaves]


@pytest.fixture(scope="module")
def build() -> Callable[[str], Built]:
    """Makes models of so few tokens that some drafts are right by chance, in other places for each row."""
    built: dict[str, Built] = {}

    def make(name: str) -> Built:
        if name not in built:
            config = CONFIGS[name]
            template = abstract_decoder(config)
            rng, spread = np.random.default_rng(1), {"scale": 0.3, "embedding": 0.03}
            leaves = {
                path: jnp.asarray(rng.normal(size=leaf.shape) * spread.get(path.rpartition(".")[2], 0.5), leaf.dtype)
                for path, leaf in template.variables.items()
            }
            built[name] = template, config, leaves
        return built[name]

    return make


def complete(sampler: Sampler, leaves: dict[str, jax.Array], prompts: Any, sampling: Sampling) -> Any:
    """Completions, and the passes of each."""
    result = sampler.complete(leaves, prompts, sampling)
    return [one.ids for one in result], [one.passes for one in result]


def with_drafts(sampling: Sampling, drafts: int) -> Sampling:
    return attrs.evolve(sampling, num_speculative_tokens=drafts)


@pytest.mark.gpu
@pytest.mark.extended
@pytest.mark.parametrize(
    ("name", "sampling", "drafts", "dtype"),
    [
        ("windowed", HOT, 3, None),
        ("latent", Sampling(NEW), 1, None),
        ("windowed", HOT, 3, "int8"),
        *(
            pytest.param(*case, None, marks=pytest.mark.slow)
            for case in (
                ("windowed", HOT, 1),
                ("windowed", Sampling(NEW), 1),
                ("windowed", Sampling(NEW), 3),
                ("latent", Sampling(NEW), 3),
                ("latent", HOT, 1),
                ("latent", HOT, 3),
            )
        ),
    ],
)
def test_tokens_are_those_without_drafts(
    build: Callable[[str], Built], name: str, sampling: Sampling, drafts: int, dtype: KVCacheDtype | None
) -> None:
    template, config, leaves = build(name)
    plain = Sampler(template, config, jnp.float32, stop_ids=(), kv_cache_dtype=dtype)
    wanted, passes = complete(plain, leaves, PROMPTS, sampling)
    assert passes == [NEW - 1] * len(PROMPTS)
    assert max(len(set(row)) for row in wanted) > 3
    actual, passes = complete(plain, leaves, PROMPTS, with_drafts(sampling, drafts))
    assert actual == wanted
    assert plain(leaves, PROMPTS, with_drafts(sampling, drafts)) == plain(leaves, PROMPTS, sampling)
    # Rows are accepted in other places; no pass yields more than it can, and some draft is right.
    assert min(passes) < NEW - 1
    assert all(-(-(NEW - 1) // (drafts + 1)) <= count <= NEW - 1 for count in passes)


@pytest.mark.extended
def test_rows_stop_and_stream_as_without_drafts(build: Callable[[str], Built]) -> None:
    template, config, leaves = build("windowed")
    plain = Sampler(template, config, jnp.float32, stop_ids=())
    whole = plain(leaves, PROMPTS, HOT)
    stops = {whole[0][5], whole[1][0]}
    ending = Sampler(template, config, jnp.float32, stops)
    wanted, asked = complete(ending, leaves, PROMPTS, HOT)[0], with_drafts(HOT, 3)
    assert {len(row) for row in wanted} != {NEW}
    assert complete(ending, leaves, PROMPTS, asked)[0] == wanted
    for every in (1, 5, 100):
        pieces = list(ending.stream(leaves, PROMPTS, asked, every))
        assert [list(itertools.chain(*parts)) for parts in zip(*pieces, strict=True)] == wanted


@pytest.mark.extended
def test_experts_are_those_without_drafts(build: Callable[[str], Built]) -> None:
    template, config, leaves = build("latent")
    sampler = Sampler(template, config, jnp.float32, stop_ids=(5,), returns_experts=True, slots=2)
    wanted, actual = (sampler.complete(leaves, PROMPTS, with_drafts(HOT, drafts)) for drafts in (0, 2))
    for prompt, one, other in zip(PROMPTS, wanted, actual, strict=True):
        assert one.routed_experts is not None
        assert len(one.routed_experts) == len(prompt) + len(one.ids)
        assert (one.routed_experts[:, -1] >= 0).all()
        np.testing.assert_array_equal(one.routed_experts, other.routed_experts)


@pytest.mark.slow
def test_a_row_does_not_depend_on_others_nor_on_what_they_accept(build: Callable[[str], Built]) -> None:
    template, config, leaves = build("windowed")
    ending, asked = Sampler(template, config, jnp.float32, stop_ids=(5,)), with_drafts(HOT, 3)
    wanted = complete(ending, leaves, PROMPTS, asked)[0]
    assert {len(row) for row in wanted} != {NEW}
    assert [complete(ending, leaves, [prompt], asked)[0][0] for prompt in PROMPTS[:2]] == wanted[:2]
    changed = {path: -leaf if "attention.value" in path else leaf for path, leaf in leaves.items()}
    joined = ending.sample_models([leaves, changed], PROMPTS, asked)
    assert joined == ending.sample_models([leaves, changed], PROMPTS, HOT)


@pytest.mark.extended
def test_a_perfect_draft_is_always_accepted(build: Callable[[str], Built]) -> None:
    """A model that repeats its last token, and a layer that does so, too: each pass yields all of its tokens."""
    template, config, leaves = build("windowed")
    still = {path: jnp.zeros_like(leaf) if "kernel" in path else leaf for path, leaf in leaves.items()}
    # Without layers the state is the token's own vector; W takes that of the following token.
    join = np.zeros(leaves["mtp.join.kernel"].shape, np.float32)
    join[: config.embed_dim] = np.eye(config.embed_dim)
    ones = {path: jnp.zeros_like(leaf) for path, leaf in leaves.items() if path.endswith("norm.scale")}
    still |= ones | {"mtp.join.kernel": jnp.asarray(join)}
    sampler = Sampler(template, config, jnp.float32, stop_ids=())
    for drafts, least in ((1, 10), (4, 4)):
        actual, passes = complete(sampler, still, PROMPTS, with_drafts(Sampling(NEW), drafts))
        assert actual == [[row[-1]] * NEW for row in PROMPTS]
        assert passes == [least] * len(PROMPTS)


def test_what_cannot_draft_is_refused(build: Callable[[str], Built]) -> None:
    template, config, leaves = build("windowed")
    asked = with_drafts(Sampling(NEW), 1)
    without = Sampler(template, attrs.evolve(config, mtp_layers=0), jnp.float32, stop_ids=())
    with pytest.raises(ValueError, match=r"num_speculative_tokens: the model has no multi-token-prediction \(MTP\)"):
        without(leaves, PROMPTS, asked)
    delta = GatedDeltaNetConfig(key_heads=2, value_heads=2, key_head_dim=8, value_head_dim=8)
    linear = config.with_fields(
        {"layers.pattern": ("linear", "global"), "linear_attention": delta, "window": None, "rope_local": None}
    )
    with pytest.raises(ValueError, match="num_speculative_tokens: states of linear layers"):
        Sampler(template, linear, jnp.float32, stop_ids=())(leaves, PROMPTS, asked)
    with pytest.raises(ValueError, match="num_speculative_tokens: expected at least 0, got -1"):
        with_drafts(Sampling(NEW), -1)


@pytest.mark.extended
def test_an_evaluation_and_a_pretrained_model_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    empty = DecodeLoop.empty

    def counted(loop: DecodeLoop, **options: Any) -> Any:
        if options["drafts"]:
            asked.append(options["drafts"])
        return empty(loop, **options)

    monkeypatch.setattr(DecodeLoop, "empty", counted)
    model = nnxdsl.load(FIGURES, mtp=True, tokenizer=Tokenizer.Bytes(allow_mismatch=True))
    assert model.config.mtp_layers == 1
    tokens = [[5, 6, 7], [8]]
    monkeypatch.setattr(Encoder, "prompt", lambda encoder, text: tokens[int(text)])
    both = [model.generate(["0", "1"], max_new_tokens=5, num_speculative_tokens=drafts) for drafts in (0, 2)]
    assert both[0] == both[1]
    assert asked == [2]
    with pytest.raises(ValueError, match="num_speculative_tokens: the model has no multi-token-prediction"):
        nnxdsl.load(FIGURES, tokenizer=Tokenizer.Bytes(allow_mismatch=True)).generate(["0"], num_speculative_tokens=1)
    with pytest.raises(WeightsError, match=r"there is no multi-token-prediction \(MTP\) layer that can be loaded"):
        nnxdsl.load(FIGURES.parents[1] / "families" / "qwen3", mtp=True)

    evaluation = Evaluation(every_steps=1, prompts=("0", "1"), max_new_tokens=5, num_speculative_tokens=2)
    experiment = Experiment(
        name="drafts",
        model=Model.HF(str(FIGURES), weights=Weights.HF(str(FIGURES)), mtp_layers=1, tokenizer=Tokenizer.Bytes()),
        objective=Objective.DPO(),
        data=Data.Preferences("none.jsonl", max_prompt_length=8, max_completion_length=8),
        optimizer=Optimizer.SGD(schedule=Schedule.Constant(lr=0.1)),
        batch_size=2,
        steps=1,
        evaluation=evaluation,
    )
    program = compile_experiment(experiment)
    state = program.init()
    samples = [
        Evaluator(program, one, None, BytesTokenizer(), is_chat=False).samples(state)
        for one in (evaluation, attrs.evolve(evaluation, num_speculative_tokens=0))
    ]
    assert samples[0] == samples[1]
    assert asked == [2, 2]
    for model, problem in (
        (Model.DeepSeekV3("tiny"), r"has no multi-token-prediction \(MTP\) layer; set 0"),
        (Model.Qwen3Next("tiny", mtp_layers=1), r"states of linear layers .*; set 0"),
    ):
        with pytest.raises(PlanError, match=f"evaluation.num_speculative_tokens: .*{problem}"):
            build_blueprint(attrs.evolve(experiment, model=model))
    with pytest.raises(SpecError, match="num_speculative_tokens: has no effect without prompts"):
        Evaluation(num_speculative_tokens=1)


@pytest.mark.slow
def test_rollouts_have_it(tmp_path: Path) -> None:
    rows = [{"prompt": f"Say {number}: ", "answer": str(number)} for number in range(2)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = Data.Prompts(str(tmp_path / "prompts.jsonl"), max_prompt_length=16, max_completion_length=6)
    actual = []
    for drafts in (0, 2):
        experiment = Experiment(
            name="rollouts",
            model=Model.DeepSeekV3("tiny", mtp_layers=1),
            objective=Objective.GRPO(
                rewards=(Reward("exact_answer"),), num_generations=2, beta=0.0, num_speculative_tokens=drafts
            ),
            data=data,
            optimizer=Optimizer.SGD(schedule=Schedule.Constant(lr=0.1)),
            batch_size=4,
            steps=1,
        )
        program, prompts = compile_experiment(experiment), load(data, BytesTokenizer())
        assert isinstance(prompts, Prompts)
        actual.append(Rollouts.of(program, prompts, BytesTokenizer()).rollout_at(0, program.init()).batch)
    assert all(np.array_equal(one, other) for one, other in zip(*actual, strict=True))
    with pytest.raises(PlanError, match=r"objective.num_speculative_tokens: the model has no .* layer; set 0"):
        build_blueprint(attrs.evolve(experiment, model=Model.DeepSeekV3("tiny")))
