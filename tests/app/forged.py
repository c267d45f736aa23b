"""Requests that name a run which is none of the home: ids, and queries with them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import attrs

from nnxdsl import Data
from tests.app.many import experiment, write_run

SECRET = "a-secret-of-elsewhere"
GONE = "foreign-00000000"
"""As long as the id of the other run."""


@attrs.frozen
class Outside:
    """A home with one run, and beside it another home, which no request may reach.

    Attributes:
        home: The app's.
        inside: Id of its run, which has a checkpoint.
        elsewhere: The other home.
        run: Id of the other home's run.
    """

    home: Path
    inside: str
    elsewhere: Path
    run: str

    @classmethod
    def under(cls, place: Path) -> Outside:
        """Writes both, and links in the app's home: to the other run, to nothing, and in runs to files out of them."""
        home, elsewhere = place / "runs", place / "elsewhere"
        inside = _with_checkpoint(write_run(home, experiment(0), "stopped", 3))
        foreign = experiment(1, name="foreign", data=Data.Preferences(f"{SECRET}.jsonl"))
        run = _with_checkpoint(write_run(elsewhere, foreign, "stopped", 3))
        for name in ("log.txt", "metrics.jsonl", "experiment.py"):
            with (run / name).open("a") as file:
                file.write(f'{{"step": 9, "{SECRET}": 1}}\n')
        (home / "link-there").symlink_to(run)
        (home / "link-gone").symlink_to(elsewhere / GONE)
        for number, name in enumerate(("log.txt", "metrics.jsonl", "experiment.json", "run.json", "control"), start=2):
            linked = write_run(home, experiment(number, name=f"linked-{name.partition('.')[0]}"), "stopped", 3)
            if (linked / name).is_dir():
                (linked / name).rmdir()
            else:
                (linked / name).unlink(missing_ok=True)
            (linked / name).symlink_to(run / name)
        return cls(home, inside.name, elsewhere, run.name)

    def ids(self) -> list[tuple[str, str]]:
        """Ids that lead to the other run, each with one that would lead to nothing in the same way."""
        result: list[list[str]] = []
        for name in (self.run, GONE):
            whole, up = f"{self.elsewhere}/{name}", f"../{self.elsewhere.name}/{name}"
            paths = [whole, f"/{whole}", up, f"./{up}", f"{self.inside}/../{up}", f"{up}/", f"{up}\0"]
            paths += [up.replace("/", other) for other in ("%2F", "%252f", "\\")]
            result.append([*paths, "link-there" if name == self.run else "link-gone"])
        return list(zip(*result, strict=True))

    def hostile(self) -> list[str]:
        """Ids that are none."""
        linked = sorted(path.name for path in self.home.glob("linked-*"))
        paths = ["", ".", "..", "\0", "x" * 10_000, "../" * 500, ".app", ".trash", "a\nb", "é", "~root", *linked]
        return paths + [one for pair in self.ids() for one in pair]

    def snapshot(self) -> dict[str, object]:
        """What stands in the other home, and when it was changed last."""
        result: dict[str, object] = {}
        for parent, directories, files in os.walk(self.elsewhere):
            for name in (*directories, *files):
                path = Path(parent, name)
                stat = path.lstat()
                content = path.read_bytes() if path.is_file() else b""
                result[str(path)] = (stat.st_ino, stat.st_mode, stat.st_mtime_ns, stat.st_ctime_ns, content)
        return result

    def queries(self, run: str) -> Iterator[tuple[dict[str, str], bool]]:
        """Queries with the id in each place that names a run or a file, and whether buttons are pressed with them."""
        names = (
            "id",
            "run",
            "ids",
            "from",
            "base",
            "key",
            "draft",
            "preset",
            "exp",
            "of",
            "file",
            "model",
            "row",
            "filter",
            "group",
        )
        named = {
            **dict.fromkeys(names, run),
            "against": f"{run}@1",
            "with": f"run:{run}",
            "step": "1",
            "confirm": "delete",
        }
        yield named, True
        yield {"run": self.inside, "tab": "chat", "turns": '["x"]', "with": f"{run}@1"}, False
        for key in ("draft", "preset", "from", "exp", "of", "model"):
            yield {"run": run, key: run}, True
        yield {"of": f"run:{run}"}, False
        for tab in ("charts", "log", "config"):
            yield {"id": run, "tab": tab}, False
        beside = {"run": self.inside, "ids": f"{self.inside},{run}", "base": run}
        beside |= {"against": f"{run}@1", "with": f"run:{run}", "step": "1"}
        for tab in ("", "config"):
            yield {**beside, "tab": tab}, False


def _with_checkpoint(run: Path) -> Path:
    place = run / "checkpoints" / "00000001"
    place.mkdir()
    (place / "manifest.json").write_text(json.dumps({"step": 1}))
    return run
