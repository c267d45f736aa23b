"""The state of an app that all pages share: settings, runs, jobs. Independent of gradio and pages."""

from __future__ import annotations

from nnxdsl.config.experiment import Experiment
from nnxdsl.errors import RunError
from nnxdsl.runs.run_dir import RunDirectory
from nnxdsl.runs.status import writer_of

from .processes.alert_sender import AlertSender
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


class Site:
    """Settings, runs and child processes of an app; its threads start with it."""

    def __init__(self, settings: Settings) -> None:
        app_directory, project = settings.app_directory, settings.project
        self.settings = settings
        self.jobs = Jobs(project, settings.limits.job_seconds, width=2)  # plans, rows and exports
        self.compiles = Jobs(project, settings.limits.job_seconds)  # with XLA, which takes minutes: one at a time
        self.answers = Answers(settings)  # requests to models
        self.votes, self.tags = Votes(app_directory / "votes.jsonl"), Tags(app_directory / "tags.jsonl")
        self.drafts = Drafts(app_directory / "drafts")
        self.index, self.series, self.rollouts = Index(settings.home), Series(), Rollouts()
        self.usage = Usage(self._live_pids)
        self.presets = Presets(settings.recipes, project)  # the project's recipes
        self.launcher = Launcher(settings, self.presets)  # actions on runs
        self.alerts = Alerts(settings, self.index)
        self.alert_sender = AlertSender(settings, self.alerts)
        self.dispatcher = None if settings.read_only else Dispatcher(settings, self.launcher, self.index)

    def run(self, run: str) -> RunDirectory:
        """Returns the directory of a run; raises if the home has no run with this id."""
        if not run:
            raise RunError("name a run: /run?id=...")
        path = run_path(self.settings.home, run)
        if self.index.row(run) is None:
            raise RunError(f"there is no run {run} in {self.settings.home}; choose another one")
        return RunDirectory(path)

    def experiment(self, run: str) -> Experiment:
        """Loads the experiment of a run, or of a launch that was rejected; raises if there is none to be read."""
        launch = self.launcher.newest(run)
        place = self.run(run).path if self.index.row(run) is not None else launch and launch.directory
        if place is None:
            raise RunError(f"there is no run {run}; choose one")
        experiment = stored(place / "experiment.json")
        if experiment is None:
            raise RunError(f"{run} names classes of another package, which the app does not import, or is damaged")
        return experiment

    def _live_pids(self) -> dict[str, int]:
        writers = {row.id: writer_of(row.status) for row in self.index.rows() if row.is_live}
        return {run: one.pid for run, one in writers.items() if one is not None and one.is_here()}

    def close(self) -> None:
        """Stops threads and child processes of the app; runs continue."""
        if self.dispatcher is not None:
            self.dispatcher.close()
        for one in (self.alert_sender, self.usage, self.jobs, self.compiles, self.answers, self.presets):
            one.close()
