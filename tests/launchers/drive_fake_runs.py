"""`nnxdsl WORDS`, where what is started is `fake_run.py` in place of `nnxdsl run`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import attrs

from nnxdsl.cli.dispatch import main
from nnxdsl.config.experiment import Experiment
from nnxdsl.launch import driver, job

FAKE_RUN = str(Path(__file__).parent / "fake_run.py")
prepare = job.prepare


class StandIn(job.Job):
    """The same job with another program."""

    def command(self, python: str = sys.executable, *more: str) -> list[str]:
        return [python, FAKE_RUN, self.argv[1], self.argv[3], *more]


def prepared(experiment: Experiment, home: Path, variables: Mapping[str, str]) -> job.Job:
    result = prepare(experiment, home, variables)
    return StandIn(**{field.name: getattr(result, field.name) for field in attrs.fields(job.Job)})


driver.prepare = prepared

if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
