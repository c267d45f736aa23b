"""What pages know of the world: settings, runs, jobs; one object for a whole app. Knows no gradio and no page."""

from __future__ import annotations

import attrs

from .jobs import Jobs
from .settings import Settings


@attrs.define
class Site:
    """What every page's functions are given first."""

    settings: Settings
    jobs: Jobs

    @classmethod
    def of(cls, settings: Settings) -> Site:
        """The world of an app that is about to start."""
        return cls(settings, Jobs(settings.project, settings.limits.job_seconds))

    def close(self) -> None:
        """Ends what only this process needs; runs go on."""
        self.jobs.close()
