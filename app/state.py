"""The state of an app that all pages share: settings, runs, jobs. Independent of gradio and pages."""

from __future__ import annotations

import attrs

from nnxdsl.config.experiment import Experiment
from nnxdsl.errors import RunError
from nnxdsl.runs.run_dir import RunDirectory

from .processes.alerts import Alerts
from .processes.dispatcher import Dispatcher
from .processes.jobs import Jobs
from .processes.launch import Launcher
from .processes.outputs_worker import Answers
from .processes.presets import Presets
from .processes.usage import Usage
from .processes.votes import Votes
from .settings import Settings
from .store.drafts import Drafts
from .store.experiments import stored
from .store.index import Index
from .store.rollouts import Rollouts
from .store.run_paths import run_path
from .store.series import Series
from .store.tags import Tags


@attrs.define
class Site:
    """The first argument of every page function.

    Attributes:
        settings: Settings of the app.
        jobs: Child processes that compute plans, two at a time.
        compiles: Child processes that compile with XLA, which takes minutes: one at a time, independent of `jobs`.
        answers: Requests to models, and their child process.
        votes: Blind votes on answers.
        tags: Tags of runs.
        index: The runs, one row each.
        series: Metrics of runs.
        rollouts: Sampled completions of runs.
        launcher: Actions on runs.
        drafts: Drafts of experiments.
        presets: The project's recipes.
        usage: What live runs and the machine use.
        alerts: Alerts on runs.
        dispatcher: Starts queued runs; None in read-only mode.
    """

    settings: Settings
    jobs: Jobs
    compiles: Jobs
    answers: Answers
    votes: Votes
    tags: Tags
    index: Index
    series: Series
    rollouts: Rollouts
    launcher: Launcher
    drafts: Drafts
    presets: Presets
    usage: Usage
    alerts: Alerts
    dispatcher: Dispatcher | None

    @classmethod
    def of(cls, settings: Settings) -> Site:
        """Creates the state of an app."""
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
            rollouts=Rollouts(),
            launcher=launcher,
            drafts=Drafts(settings.own / "drafts"),
            presets=presets,
            usage=Usage(),
            alerts=Alerts(settings, index),
            dispatcher=None if settings.read_only else Dispatcher(settings, launcher, index),
        )

    def run(self, run: str) -> RunDirectory:
        """Returns the directory of a run.

        Raises:
            RunError: the home has no run with this id.
        """
        if not run:
            raise RunError("name a run: /run?id=...")
        return RunDirectory(run_path(self.settings.home, run))

    def experiment(self, run: str) -> Experiment:
        """Loads the experiment of a run, or of a launch that was rejected.

        Raises:
            RunError: there is none, or it names classes of another package.
        """
        launch = self.launcher.newest(run)
        place = self.run(run).path if self.index.row(run) is not None else launch and launch.directory
        if place is None:
            raise RunError(f"there is no run {run}; choose one")
        found = stored(place / "experiment.json")
        if found is None:
            raise RunError(f"{run} names classes of another package, which the app does not import, or is damaged")
        return found

    def close(self) -> None:
        """Stops threads and child processes of the app; runs continue."""
        if self.dispatcher is not None:
            self.dispatcher.close()
        self.alerts.close()
        self.jobs.close()
        self.compiles.close()
        self.answers.close()
        self.presets.close()
