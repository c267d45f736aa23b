"""Token ids of the row shapes that TRL and nnxdsl have in common, as TRL's trainers prepare them; stored as JSON.

One command, from the repository's root, with TRL installed (stored here: TRL 1.16). `-P`, since the directory `peft`
beside this file is not the package:

    python -P tests/reference/make_row_shapes.py

Nothing of nnxdsl is imported here. There are two tokenizers: one that opens every text with a BOS and has turns like
Gemma's, and one without a BOS and with turns of ChatML. SFTTrainer prepares texts, chats, and prompts with completions,
DPOTrainer preference pairs, KTOTrainer labelled answers, and GRPOTrainer prompts.
"""

from __future__ import annotations

import json
import tempfile
import types
from pathlib import Path
from typing import Any

import datasets
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from trl import DPOConfig, DPOTrainer, GRPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer

HERE = Path(__file__).parent / "row_shapes"
TURN = (
    "{{% if message['role'] == 'assistant' %}}{{{{ '{opening}{speaker}\n' }}}}"
    "{{% generation %}}{{{{ message['content'] + '{closing}' }}}}{{% endgeneration %}}{{{{ '\n' }}}}"
    "{{% else %}}{{{{ '{opening}' + message['role'] + '\n' + message['content'] + '{closing}\n' }}}}{{% endif %}}"
)
PROMPT = "{{% if add_generation_prompt %}}{{{{ '{opening}{speaker}\n' }}}}{{% endif %}}"
FORMS = {
    "gemma": ("{{ bos_token }}", {"opening": "<start_of_turn>", "speaker": "model", "closing": "<end_of_turn>"}),
    "chatml": ("", {"opening": "<|im_start|>", "speaker": "assistant", "closing": "<|im_end|>"}),
}
TEXTS = ["The sky is blue.", "What is 2 + 3? It is 5.", "Ein kleiner Bär tanzt 🐻.", "Red, green and blue are colours."]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


PROMPTS = ["The sky is", "What is 2 + 3?", "Say it in German:"]
CHATS = [
    [user("What colour is the sky?")],
    [system("Be brief."), user("What is 2 + 3?")],
    [user("Hello"), assistant("Hello! What is it?"), user("Tanzt der Bär?")],
]
GOOD, BAD = [" blue.", " It is 5.", " Ein Bär."], [" green.", " It is 6, or not.", " a bear"]


def rows(shape: str) -> list[dict[str, Any]]:
    """The rows of a shape; the trainer and the columns follow from its name."""
    kind, _, form = shape.partition(", ")
    if form == "text":
        sides = list(zip(PROMPTS, GOOD, BAD, strict=True))
        whole = {
            "implicit": [{"chosen": p + good, "rejected": p + bad} for p, good, bad in sides],
            "language modeling": [{"text": text} for text in TEXTS],
        }
    else:
        turns = [([assistant(good.strip())], [assistant(bad.strip())]) for good, bad in zip(GOOD, BAD, strict=True)]
        sides = [(chat, *both) for chat, both in zip(CHATS, turns, strict=True)]
        whole = {
            "implicit": [{"chosen": p + good, "rejected": p + bad} for p, good, bad in sides],
            "language modeling": [{"messages": p + good} for p, good, _ in sides],
        }
    return {
        **whole,
        "prompt": [{"prompt": p} for p, _, _ in sides],
        "prompt and completion": [{"prompt": p, "completion": good} for p, good, _ in sides],
        "preference": [{"prompt": p, "chosen": good, "rejected": bad} for p, good, bad in sides],
        "labelled": [
            {"prompt": p, "completion": good if number % 2 else bad, "label": bool(number % 2)}
            for number, (p, good, bad) in enumerate(sides)
        ],
    }[kind]


SHAPES = [
    f"{kind}, {form}"
    for kind in ("language modeling", "prompt", "prompt and completion", "preference", "implicit", "labelled")
    for form in ("text", "chat")
]


def write_tokenizer(name: str) -> transformers.PreTrainedTokenizerFast:
    """A small byte-level BPE, as files of a model directory."""
    bos, vocabulary = FORMS[name]
    special = ["<pad>", "<eos>", vocabulary["opening"], vocabulary["closing"], *(["<bos>"] if bos else [])]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([*TEXTS, *PROMPTS, *GOOD, *BAD] * 9, trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", pair=None, special_tokens=[("<bos>", tokenizer.token_to_id("<bos>"))]
        )
    directory = HERE / name
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    template = (
        f"{bos}{{% for message in messages %}}{TURN.format(**vocabulary)}{{% endfor %}}{PROMPT.format(**vocabulary)}"
    )
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "chat_template": template,
        **({"bos_token": "<bos>"} if bos else {}),
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    return transformers.AutoTokenizer.from_pretrained(str(directory))


def prepared(shape: str, tokenizer: Any, place: str) -> list[dict[str, list[int]]]:
    """What TRL's trainer makes of the rows of a shape."""
    kind, _, form = shape.partition(", ")
    inputs = rows(shape)
    if kind == "prompt":
        stand_in = types.SimpleNamespace(
            processing_class=tokenizer,
            _tokenizer=tokenizer,
            _is_vlm=False,
            environment_factories=None,
            tools=None,
            chat_template=None,
            chat_template_kwargs={},
        )
        result = GRPOTrainer._tokenize_prompts(stand_in, [row["prompt"] for row in inputs])
        return [{"prompt": ids} for ids in result[0]]
    config = transformers.LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=len(tokenizer)
    )
    settings: dict[str, Any] = {"output_dir": place, "report_to": [], "use_cpu": True, "bf16": False}
    table, (model, reference) = (
        datasets.Dataset.from_list(inputs),
        [transformers.LlamaForCausalLM(config) for _ in range(2)],
    )
    if kind in ("preference", "implicit"):
        trainer: Any = DPOTrainer(
            model, reference, args=DPOConfig(**settings), train_dataset=table, processing_class=tokenizer
        )
        columns = {"prompt": "prompt_ids", "chosen": "chosen_ids", "rejected": "rejected_ids"}
        return [{name: row[column] for name, column in columns.items()} for row in trainer.train_dataset]
    if kind == "labelled":
        settings["per_device_train_batch_size"] = 3
        trainer = KTOTrainer(
            model, reference, args=KTOConfig(**settings), train_dataset=table, processing_class=tokenizer
        )
        columns = {"prompt": "prompt_ids", "completion": "completion_ids"}
        return [{name: row[column] for name, column in columns.items()} for row in trainer.train_dataset]
    marks = form == "chat" and kind == "language modeling"
    arguments = SFTConfig(**settings, assistant_only_loss=marks)
    trainer = SFTTrainer(model, args=arguments, train_dataset=table, processing_class=tokenizer)
    return [
        {"tokens": row["input_ids"], "target": [int(label != -100) for label in row["labels"]]}
        for row in trainer.train_dataset
    ]


def main() -> None:
    """Writes the tokenizers and `row_shapes.json`: for each tokenizer and shape the rows and their ids."""
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        for name in FORMS:
            tokenizer = write_tokenizer(name)
            result[name] = {
                shape: [
                    {"row": row, "trl": ids}
                    for row, ids in zip(rows(shape), prepared(shape, tokenizer, place), strict=True)
                ]
                for shape in SHAPES
            }
    lines = json.dumps(result, ensure_ascii=False, indent=None, separators=(",", ":"))
    (HERE / "row_shapes.json").write_text(lines.replace('[{"row"', '\n[{"row"') + "\n")


if __name__ == "__main__":
    main()
