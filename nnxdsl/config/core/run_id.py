"""The identity of a run: a fingerprint over everything that changes its mathematics, and nothing else."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, cast

from nnxdsl.config.core.base import Spec, declared
from nnxdsl.config.core.json_object import JsonObject

if TYPE_CHECKING:
    from nnxdsl.config.experiment import Experiment

SCHEMA = 1


def canonical(spec: Spec) -> str:
    """The one JSON text of a spec's identity: keys sorted, placement and cadence left out.

    Defaults are written out, but for those of fields that came to their class later (`Spec.fields_added_later`).
    """
    return json.dumps(identity(spec), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def identity(value: object) -> object:
    """The part of a tree that changes the mathematics, as plain JSON values.

    An experiment inside another one (`Weights.From`) counts by its own identity alone, so that giving the earlier stage
    other devices or a new name does not make the later one another run.
    """
    if isinstance(value, Spec):
        spelled = value.identity_values()
        return {
            "type": value.earlier_tag or value.tag,
            **{
                name: identity(item)
                for name, field in declared(type(value)).items()
                if name not in value.outside_identity
                and not (
                    (item := spelled.get(name, getattr(value, name))) == field.default
                    and name in value.fields_added_later
                )
            },
        }
    if isinstance(value, tuple):
        return [identity(item) for item in cast("tuple[object, ...]", value)]
    if isinstance(value, JsonObject):
        return value.as_dict()
    return value


def fingerprint(spec: Spec) -> str:
    """64 hex digits of SHA-256 over the canonical JSON and the schema's number."""
    return hashlib.sha256(f"{SCHEMA}:{canonical(spec)}".encode()).hexdigest()


def run_id(experiment: Experiment) -> str:
    """`<name>-<first 8 hex digits of the fingerprint>`."""
    return f"{experiment.name}-{fingerprint(experiment)[:8]}"
