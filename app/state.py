"""What pages know of the world: settings, runs, jobs; one object for a whole app. Knows no gradio and no page."""

from __future__ import annotations

import attrs

from nnxdsl.errors import RunError
from nnxdsl.runs.run_dir import RunDirectory

from .dispatcher import Dispatcher
from .drafts import Drafts
from .index import Index
from .jobs import Jobs
from .launch import Launcher
from .outputs_votes import Votes
from .outputs_worker import Answers
from .presets import Presets
from .run_paths import run_path
from .series import Series
from .settings import Settings
from .tags import Tags


@attrs.define
class Site:
    """What every page's functions are given first.

    Attributes:
        settings: How the app was started.
        jobs: Child processes that plan, two at a time.
        compiles: Child processes in which XLA compiles, which takes minutes: one at a time, beside the others.
        answers: What models were asked, and the child that holds them.
        votes: Which of their answers were better.
        tags: Words that people gave to runs.
        index: The runs, one row each.
        series: Their metrics.
        launcher: What may be done to them.
        drafts: Experiments that are being written.
        presets: The project's own experiments.
        dispatcher: Who starts runs that wait; None in read-only mode.
    """

    settings: Settings
    jobs: Jobs
    compiles: Jobs
    answers: Answers
    votes: Votes
    tags: Tags
    index: Index
    series: Series
    launcher: Launcher
    drafts: Drafts
    presets: Presets
    dispatcher: Dispatcher | None

    @classmethod
    def of(cls, settings: Settings) -> Site:
        """The world of an app that is about to start."""
        index, presets = Index(settings.home), Presets(settings.project / "experiments", settings.project)
        launcher = Launcher(settings, presets)
        return cls(
            settings=settings,
            jobs=Jobs(settings.project, settings.limits.job_seconds, width=2),
            compiles=Jobs(settings.project, settings.limits.job_seconds),
            answers=Answers(settings),
            votes=Votes(settings.own / "votes.jsonl"),
            tags=Tags(settings.own / "tags.jsonl"),
            index=index,
            series=Series(),
            launcher=launcher,
            drafts=Drafts(settings.own / "drafts"),
            presets=presets,
            dispatcher=None if settings.read_only else Dispatcher(settings, launcher, index),
        )

    def run(self, run: str) -> RunDirectory:
        """The directory of a run.

        Raises:
            RunError: there is none of this id in the home.
        """
        if not run:
            raise RunError("name a run: /run?id=...")
        return RunDirectory(run_path(self.settings.home, run))

    def close(self) -> None:
        """Ends what only this process needs; runs go on."""
        if self.dispatcher is not None:
            self.dispatcher.close()
        self.jobs.close()
        self.compiles.close()
        self.answers.close()
        self.presets.close()
