"""Preparation of training data: rows per second beside TRL's, later starts, and memory over the number of rows.

`python benchmarks/data.py [--rows 200000] [--short] [--workers N] [--peers DIRECTORY] [--json FILE]` writes chats of
real lengths (one to three turns, about 770 tokens; with `--short` one turn of a few words) and a tokenizer of 32,000
tokens trained on them, with a chat template that has generation blocks. In processes of their own, nnxdsl loads the
chats into an empty cache of tokens, loads them again from that cache, and with `--peers` TRL's SFTTrainer prepares them
through `datasets.map` with as many processes, for the assistant's tokens alone. Memory is the most that the loading
process has of its own, without mapped files and workers, while it loads and draws shuffled batches. The token ids and
masks of the first rows are compared. Exit code 1 beyond the aims: twice TRL's rows per second, and later starts below
two seconds.
"""

# ruff: noqa: PLC0415 - each side imports its own library, in a process of its own
from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
AIM, LATER_SECONDS = 2.0, 2.0
MAX_LENGTH = 4096
COMPARED = 50
"""Rows whose ids are compared."""
STEPS = 50
"""Batches of shuffled rows, which are part of the memory that is measured, not of the time."""
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{{ '<|im_start|>assistant\\n' }}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}{% else %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


class OwnMemory:
    """The most memory that this process has of its own, looked up ten times a second: a context manager.

    The peak that the kernel counts includes pages of mapped files, which it takes back at any time.
    """

    def __init__(self) -> None:
        self.peak_mib, self._end = 0.0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._end.wait(0.1):
            lines = Path("/proc/self/status").read_text().splitlines()
            kib = next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))
            self.peak_mib = max(self.peak_mib, kib / 1024)

    def __enter__(self) -> OwnMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


def write_inputs(place: Path, rows: int, *, short: bool = False) -> None:
    """Writes `chats.jsonl` and the directory `tokenizer`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    text = " ".join(path.read_text() for path in sorted((ROOT / "docs").rglob("*.md"))).split()
    draw = random.Random(0)
    with (place / "chats.jsonl").open("w") as file:
        for _ in range(rows):
            turns = 1 if short else draw.choice((1, 1, 1, 2, 3))
            spans = (("user", 2, 4), ("assistant", 1, 3)) if short else (("user", 10, 80), ("assistant", 40, 300))
            messages = [
                {"role": role, "content": " ".join(draw.choices(text, k=draw.randint(least, most)))}
                for _ in range(turns)
                for role, least, most in spans
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=32_000, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(text, trainer)
    (place / "tokenizer").mkdir()
    tokenizer.save(str(place / "tokenizer" / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": TEMPLATE,
    }
    (place / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(config))


def side_nnxdsl(place: Path, workers: int) -> dict[str, Any]:
    """Loads the chats with the cache of tokens in `place`, then makes batches of shuffled rows."""
    from nnxdsl import Data, Order, Tokenizer
    from nnxdsl.data import BatchSampler, load, open_tokenizer
    from nnxdsl.data.loaders.token_cache import TokenCache

    begun = time.perf_counter()
    tokenizer = open_tokenizer(Tokenizer.File(str(place / "tokenizer")), None)
    data = Data.Conversations(str(place / "chats.jsonl"), max_length=MAX_LENGTH)
    dataset = load(data, tokenizer, cache=TokenCache(place / "cache", workers=workers))
    seconds = time.perf_counter() - begun
    first = [{name: ids.tolist() for name, ids in dataset.row(row).items()} for row in range(COMPARED)]
    begun = time.perf_counter()
    sampler = BatchSampler(dataset, batch_size=16, seed=0, order=Order.Shuffled())
    for step in range(STEPS):
        sampler.batch_at(step)
    batches = time.perf_counter() - begun
    return {
        "batches": batches,
        "seconds": seconds,
        "rows": len(dataset),
        "first": [[row["tokens"], row["target"]] for row in first],
    }


def side_trl(place: Path, workers: int) -> dict[str, Any]:
    """Prepares the chats as TRL's SFTTrainer does, without its cache of earlier results."""
    import datasets
    import transformers
    import trl

    tokenizer = transformers.AutoTokenizer.from_pretrained(str(place / "tokenizer"))
    config = transformers.LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=len(tokenizer)
    )
    model = transformers.LlamaForCausalLM(config)
    arguments = trl.SFTConfig(
        output_dir=str(place / "trl"),
        assistant_only_loss=True,
        max_length=MAX_LENGTH,
        dataset_num_proc=workers,
        report_to=[],
        use_cpu=True,
        bf16=False,
    )
    begun = time.perf_counter()
    data_files, cache = str(place / "chats.jsonl"), str(place / "trl-cache")
    rows: Any = datasets.load_dataset("json", data_files=data_files, split="train", cache_dir=cache)
    trainer = trl.SFTTrainer(model, args=arguments, train_dataset=rows, processing_class=tokenizer)
    seconds = time.perf_counter() - begun
    prepared: Any = trainer.train_dataset
    examples = [prepared[row] for row in range(COMPARED)]
    first = [[row["input_ids"], [int(label != -100) for label in row["labels"]]] for row in examples]
    return {"seconds": seconds, "rows": len(prepared), "first": first}


def same(ours: list[list[int]], trl: list[list[int]]) -> bool:
    """Whether ids and masks of a row are equal; TRL keeps what the template writes after the last end token."""
    length = len(ours[0])
    return ours == [part[:length] for part in trl] and not any(trl[1][length:])


def run_side(name: str, place: Path, workers: int, python: Path) -> dict[str, Any]:
    """One side in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "TOKENIZERS_PARALLELISM": "false"}
    command = [str(python), __file__, "--side", name, "--place", str(place), "--workers", str(workers)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    """Runs all sides, prints the figures, and returns 0 within the aims."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--short", action="store_true", help="chats of a few words, for millions of rows")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--peers", type=Path, help="environment with TRL, made by make_peers.py")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--side", choices=("nnxdsl", "trl"), help=argparse.SUPPRESS)
    parser.add_argument("--place", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        side = side_nnxdsl if options.side == "nnxdsl" else side_trl
        with OwnMemory() as memory:
            result = side(options.place, options.workers)
        result["peak_mib"] = memory.peak_mib
        sys.stdout.write("\n" + json.dumps(result) + "\n")
        return 0
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        write_inputs(place, options.rows, short=options.short)
        sides = dict.fromkeys(("nnxdsl, first start", "nnxdsl, later start"), ("nnxdsl", Path(sys.executable)))
        if options.peers:
            sides["TRL"] = ("trl", options.peers / "bin/python")
        result = {title: run_side(name, place, options.workers, python) for title, (name, python) in sides.items()}
    print(f"{options.rows:,} chats, {options.workers} processes")
    print(f"  {'':<22} {'seconds':>10} {'rows/s':>10} {'peak MiB':>10} {f'{STEPS} batches, s':>15}")
    for title, side in result.items():
        rate = side["rows"] / side["seconds"]
        figures = f"{side['seconds']:>10.2f} {rate:>10.0f} {side['peak_mib']:>10.0f}"
        print(f"  {title:<22} {figures} {side.get('batches', math.nan):>15.2f}")
    first, later = result["nnxdsl, first start"], result["nnxdsl, later start"]
    is_good = later["seconds"] < LATER_SECONDS and later["first"] == first["first"]
    if "TRL" in result:
        ratio = result["TRL"]["seconds"] / first["seconds"]
        differing = sum(not same(*pair) for pair in zip(first["first"], result["TRL"]["first"], strict=True))
        print(f"  {ratio:.2f} times TRL's rows per second (aim {AIM}); {differing} of {COMPARED} rows differ")
        is_good = is_good and ratio >= AIM and not differing
    if options.json:
        options.json.write_text(json.dumps({title: {**side, "first": None} for title, side in result.items()}))
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
