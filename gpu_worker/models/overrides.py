"""Fields of config.json that the caller gives other values."""

from __future__ import annotations

from collections.abc import Mapping

from gpu_worker.errors import ModelError
from gpu_worker.models.config_fields import ConfigFields

_OLD, _NEW, _TEXT = "rope_scaling", "rope_parameters", "text_config"
# that a file lacks where the model needs none
_MAY_BE_NEW = (
    _OLD,
    _NEW,
    "rope_theta",
    "sliding_window",
    "tie_word_embeddings",
    "original_max_position_embeddings",
)


def overridden(fields: ConfigFields, overrides: Mapping[str, object]) -> ConfigFields:
    """Return the fields with these values; those of a text model within are changed there. Raises ModelError for a
    name that config.json lacks."""
    if not overrides:
        return fields
    if fields.has(_TEXT):
        return _overridden_within(fields, dict(overrides))
    values = dict(fields.items())
    for name in overrides:
        if name not in values and name not in _MAY_BE_NEW:
            raise ModelError(f"--hf-overrides: {fields.where} has no field {name!r}; check its name")
    changes = {name: value for name, value in overrides.items() if name not in (_OLD, _NEW)}
    rope = _rope(fields, overrides)
    return fields.changed({**changes, **({_OLD: rope, _NEW: None} if rope else {})})


def _overridden_within(fields: ConfigFields, overrides: dict[str, object]) -> ConfigFields:
    """Change the text's fields, and those that the whole model has."""
    of_text = overrides.pop(_TEXT, {})
    if not isinstance(of_text, dict):
        raise ModelError(f"--hf-overrides: {_TEXT} is {of_text!r}; expected an object")
    at_top, text = {name for name, _ in fields.items()}, fields.object(_TEXT)
    in_text = {name for name, _ in text.items()}
    inner = {name: value for name, value in overrides.items() if name in in_text or name not in at_top}
    changes = {name: value for name, value in overrides.items() if name in at_top}
    return fields.changed({**changes, _TEXT: dict(overridden(text, {**inner, **of_text}).items())})


def _rope(fields: ConfigFields, overrides: Mapping[str, object]) -> dict[str, object]:
    """Return the settings of RoPE, of which those that are not given stay; empty where none is given."""
    given = overrides.get(_OLD, overrides.get(_NEW, {}))
    theta = {"rope_theta": overrides["rope_theta"]} if "rope_theta" in overrides else {}
    if not isinstance(given, dict):
        raise ModelError(
            f"--hf-overrides: {_OLD} is {given!r}; expected an object, such as one with a rope_type"
        )
    if not given and not theta:
        return {}
    before = dict(fields.object(_OLD if fields.has(_OLD) else _NEW).items())
    given = {("rope_type" if name == "type" else name): value for name, value in given.items()}
    if "rope_type" in given:
        before.pop("type", None)
    return {**before, **theta, **given}
