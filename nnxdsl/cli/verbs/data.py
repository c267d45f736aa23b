"""Show statistics of an experiment's data, or of a file of rows.

Of an experiment: layout, columns, bad and truncated rows, lengths, tokens with loss, padding, and some rows as tokens,
for training and held-out data. Of a FILE (a path, a glob, a folder, hf://NAME): the same and the characters of each
column, with the tokens of --tokenizer; without it bytes are tokens, and rows of more than 4 million characters are not
tokenized. path=value sets a field of the experiment, or of the file's data: split=train.
"""

from __future__ import annotations

import glob
import sys
from argparse import ArgumentParser, Namespace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from nnxdsl.cli.arguments import UsageError, add_experiment, add_json, experiment_of, positive
from nnxdsl.cli.exit_codes import REFUSED
from nnxdsl.cli.load import override
from nnxdsl.cli.weights_arguments import print_json
from nnxdsl.config.data import HUB, Data, FileData
from nnxdsl.config.experiment import Experiment
from nnxdsl.errors import DataError
from nnxdsl.terminal.display import Display

if TYPE_CHECKING:
    from nnxdsl.data.dataset import Dataset
    from nnxdsl.data.loaders.token_cache import TokenCache
    from nnxdsl.data.tokenizers.base import TokenizerBase

EXAMPLES = 3
SOURCE_FIELDS = ("split", "config", "revision", "columns")
"""Fields of all data that decide which rows a source has."""
WIDE = 120
"""Width in columns if standard output is not a terminal."""
MAX_BYTES_SHOWN = 2**22
"""Most characters of a source that is shown as bytes."""
PADDING_STEPS = 64
"""Most batches of which the padding is counted."""


def add_arguments(parser: ArgumentParser) -> None:
    """Declares the verb's arguments."""
    add_experiment(parser)
    help_text = f"rows to show as tokens, of each source (default: {EXAMPLES})"
    parser.add_argument("--rows", type=partial(positive, least=0), default=EXAMPLES, metavar="N", help=help_text)
    if parser.get_default("experiment") is None:
        help_text = "tokenizer of a FILE: tokenizer.json, *.model or a directory with one"
        parser.add_argument("--tokenizer", metavar="DIR", help=help_text)
    add_json(parser)


def run(args: Namespace) -> int:
    """Prints the statistics."""
    is_file = args.experiment is None and is_source(args.target, args.home)
    if args.experiment is None and args.tokenizer is not None and not is_file:
        raise UsageError("--tokenizer has no effect on an experiment, which has its own; set model.tokenizer=...")
    summary = _of_file(args) if is_file else _of_experiment(args)
    if args.json:
        print_json(summary)
    else:
        _show(summary)
    return REFUSED if any(isinstance(part, dict) and part.get("refused") for part in summary.values()) else 0


def is_source(target: str, home: Path, cwd: Path = Path()) -> bool:
    """Whether an argument of a command in `cwd` names rows, and no experiment."""
    path = cwd / target
    if path.suffix == ".json" and path.is_file():
        with path.open("rb") as file:
            return b'"type": "Experiment"' not in file.read(1000)
    if (path / "experiment.json").is_file() or (home / target / "experiment.json").is_file():
        return False
    is_named = path.suffix in (".jsonl", ".csv", ".parquet", ".arrow", ".gz", ".zst")
    return target.startswith(HUB) or (path.exists() and path.suffix != ".py") or glob.has_magic(target) or is_named


def _show(summary: dict[str, Any]) -> None:
    from rich.console import Console

    from nnxdsl.terminal.data_view import show_data, show_source
    from nnxdsl.terminal.tables import gap

    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDE)
    for name, part in summary.items():
        if name == "id":
            console.print(part, style="bold")
        elif name == "source":
            show_source(part, console)
        else:
            gap(console)
            show_data(name, part, console)


def _of_file(args: Namespace) -> dict[str, Any]:
    """Statistics of a source: its columns, and its rows as tokens, or as bytes if it is small."""
    from nnxdsl.config.tokenizer import Tokenizer
    from nnxdsl.data.loaders.build import load
    from nnxdsl.data.loaders.layouts import find_reading
    from nnxdsl.data.loaders.sources import source_chunks
    from nnxdsl.data.summary import UNLIMITED, describe_source, summarize, without_limits
    from nnxdsl.data.tokenizers.base import BytesTokenizer, open_tokenizer
    from nnxdsl.data.tokenizers.chat_template import ALL_OF_A_TURN
    from nnxdsl.data.tokenizers.missing_tokenizer import MissingTokenizer

    of_source = [word for word in args.overrides if word.partition("=")[0] in SOURCE_FIELDS]
    rows = override(Data.Prompts(args.target), of_source)
    source, kind = describe_source(rows)
    summary: dict[str, Any] = {"source": source}
    source |= {"kind": kind and kind.__qualname__, "layout": "", "refused": ""}
    try:
        find_reading(rows, source_chunks(rows))  # refuses missing columns
        if kind is None:
            source["refused"] = "" if source["rows"] else f"{rows.name}: there are no rows"
            return summary
        cls: type[Any] = kind
        whole: FileData = without_limits(cls(args.target))
        data = override(whole, args.overrides)
        source["layout"] = find_reading(data, source_chunks(data)).describe()
        if args.tokenizer is not None:
            tokenizer, name = open_tokenizer(Tokenizer.File(args.tokenizer), None), args.tokenizer
        elif any(column["name"] == "prompt_ids" and column["rows"] == source["rows"] for column in source["columns"]):
            tokenizer, name = cast("TokenizerBase", MissingTokenizer(Path(args.target), ())), "none: rows of token ids"
        elif sum(column["characters"] for column in source["columns"]) <= MAX_BYTES_SHOWN:
            tokenizer, name = BytesTokenizer(ALL_OF_A_TURN), "bytes; --tokenizer DIR shows the tokens of a model"
        else:
            source["tokens"] = (
                f"not shown as bytes: more than {MAX_BYTES_SHOWN:,} characters; --tokenizer DIR shows tokens"
            )
            return summary
        vocabulary = UNLIMITED if isinstance(tokenizer, MissingTokenizer) else None
        dataset = load(data, tokenizer, loss_on="assistant", vocabulary=vocabulary)
        summary["data"] = {**summarize(dataset, data, tokenizer, args.rows), "tokenizer": name, "refused": ""}
    except DataError as error:
        source["refused"] = str(error)
    return summary


def _of_experiment(args: Namespace) -> dict[str, Any]:
    """Statistics of the training data and of the held-out data."""
    experiment = experiment_of(args)
    from nnxdsl.data.loaders.token_cache import TOKENS, TokenCache
    from nnxdsl.data.split import train_test_split
    from nnxdsl.data.summary import summarize
    from nnxdsl.program.architecture import architecture
    from nnxdsl.runtime.backend import use_cpu
    from nnxdsl.weights import sources

    use_cpu()
    config = architecture(experiment.model)
    tokenizer = sources.open_tokenizer_of(experiment, args.home, config.vocab_size)
    limits = {"max_position": config.max_length, "vocabulary": config.vocab_size}
    summary: dict[str, Any] = {"id": experiment.id}
    held_out = experiment.evaluation and experiment.evaluation.data
    with Display() as display:
        cache = TokenCache(args.home / TOKENS, display)
        train, refused = _load(experiment, experiment.data, tokenizer, limits, cache)
        parts = {"data": (experiment.data, train, refused)}
        if experiment.test_size is not None:
            train, test = train_test_split(train, experiment.test_size)
            parts = {"data": (experiment.data, train, refused), "test_size": (experiment.data, test, refused)}
        if held_out is not None:
            parts["evaluation.data"] = (held_out, *_load(experiment, held_out, tokenizer, limits, cache))
    for name, (data, dataset, refused) in parts.items():
        use = "trained on" if name == "data" else "held out"
        summary[name] = {**summarize(dataset, data, tokenizer, args.rows, use), "refused": refused}
    summary["data"]["padding"] = _padding(experiment, train)
    rows = experiment.steps_for(len(train)) * experiment.batch_size
    for source in summary["data"].get("sources", ()):
        source["epochs"] = rows * source["share"] / source["rows"]
    return summary


def _load(
    experiment: Experiment, data: Data, tokenizer: TokenizerBase, limits: dict[str, Any], cache: TokenCache | None
) -> tuple[Dataset, str]:
    """The rows as training loads them, and why it refuses them; refused ones without bad and too long rows."""
    from nnxdsl.data.loaders.build import load_of
    from nnxdsl.data.summary import counting_bad_rows

    try:
        return load_of(experiment, data, tokenizer, **limits, cache=cache), ""
    except DataError as error:
        try:
            whole = load_of(
                experiment, counting_bad_rows(data), tokenizer, **{**limits, "max_position": None}, cache=cache
            )
            return whole, str(error)
        except DataError:
            raise error from None


def _padding(experiment: Experiment, dataset: Dataset) -> dict[str, Any] | None:
    """The share of padding in some steps, evenly spaced over the first epoch; None where answers are sampled."""
    import numpy as np

    from nnxdsl.config.batching import Packed
    from nnxdsl.data.batch import non_padding_fraction
    from nnxdsl.data.prompts import Prompts
    from nnxdsl.data.sampler import BatchSampler
    from nnxdsl.program.blueprint import build_blueprint

    if isinstance(dataset, Prompts):
        return None
    sampler = BatchSampler(
        dataset,
        batch_size=experiment.batch_size,
        seed=experiment.seed,
        order=experiment.data.order,
        batching=experiment.batching,
        blocks=build_blueprint(experiment, "cpu").blocks if isinstance(experiment.batching, Packed) else 1,
    )
    last = min(experiment.steps_for(len(dataset)), -(-len(dataset) // experiment.batch_size)) - 1
    steps = np.unique(np.linspace(0, last, PADDING_STEPS).astype(int)).tolist()
    share = 1 - sum(non_padding_fraction(sampler.batch_at(step)) for step in steps) / len(steps)
    return {"share": share, "batch_size": experiment.batch_size, "batching": type(experiment.batching).__qualname__}
