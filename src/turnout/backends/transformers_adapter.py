"""PEFT adapters: their kind, their base model, and both bound together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from turnout.backends import transformers_models as models
from turnout.backends.base import Case, Kind, Requirement, met, unmet
from turnout.errors import LoadError
from turnout.package.facts import Artifact
from turnout.package.formats.transformers import detect_in
from turnout.package.scan import Scan

PREFIX = "base_model.model."


def base_case(case: Case, base: str) -> Case:
    """The case of the base model alone. Raises ``LoadError`` when there is no Transformers model."""
    scan = Scan.of(base)
    found = next(iter(detect_in(scan, "")), None)
    if found is None:
        raise LoadError(f"`{base}` holds no Transformers model", code="adapter.base_missing")
    options = {name: value for name, value in case.options.items() if name != "base"}
    return replace(case, root=str(scan.root), artifact=found, options=options)


def adapter_checks(case: Case, base: str) -> list[Requirement]:
    """Kind of adapter, the base's own requirements, and the dimensions where the base was named by option."""
    from turnout.backends.requirements import common
    from turnout.backends.transformers import TransformersBackend
    from turnout.backends.transformers_requirements import directory_requirements

    found = [*_kind(case), *_dimensions(case, base)]
    try:
        beneath = base_case(case, base)
    except LoadError as error:
        return [*found, unmet(Kind.ARTIFACT, error.code, error.message, observed=base, where=case.artifact.entry)]
    backend = TransformersBackend()
    asked = common(backend, beneath, backend.describe()) + directory_requirements(beneath)
    # Head and task are the adapter's to bring; everything else must hold for the base as well.
    return found + [r for r in asked if r.reason is not None and r.id not in ("head.missing", "task.not_offered")]


def _kind(case: Case) -> list[Requirement]:
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    kind = _fact(case.artifact, "peft_type").upper()
    known = {str(getattr(name, "value", name)) for name in PEFT_TYPE_TO_CONFIG_MAPPING}
    if kind in known or any(f.code == "adapter.type_unsupported" for f in case.artifact.findings):
        return [met("adapter.type", Kind.ARTIFACT, kind)]
    message = f"the installed peft knows no adapter of the type `{kind}`"
    expected = ", ".join(sorted(known))
    return [unmet(Kind.ARTIFACT, "adapter.type_unsupported", message, observed=kind, expected=expected)]


def _fact(artifact: Artifact, name: str) -> str:
    fact = artifact.facts.get(name)
    return str(fact.value) if fact is not None and fact.value else ""


def _dimensions(case: Case, base: str) -> list[Requirement]:
    """The reader's comparison with the base, for a base that only the option names."""
    from turnout.package.formats.peft import base_tensors, compare_with_base

    if any(f.code in ("adapter.base_mismatch",) for f in case.artifact.findings):
        return []  # said already
    probe = Artifact(case.artifact.id, case.artifact.kind, case.artifact.entry, tensors=case.artifact.tensors)
    stored = base_tensors(base, probe)
    if stored is not None:
        compare_with_base(probe, stored)
    return [
        unmet(Kind.SHAPE, f.code, f.message, observed=f.observed, expected=f.expected, where=f.path)
        for f in probe.findings
        if f.code == "adapter.base_mismatch"
    ] or [met("adapter.base", Kind.ARTIFACT, base)]


def dry_bind(case: Case, base: str) -> models.Binding:
    """Base and adapter bound on the meta device."""
    models.quiet()
    beneath = base_case(case, base)
    config = models.read_config(beneath)
    return _with_adapter(case, models.dry_bind(beneath, config, _class(beneath, config)), "meta")


def bind(case: Case, base: str, dtype: Any) -> models.Binding:
    """Base and adapter loaded; the adapter stays beside the weights, it is not merged into them."""
    models.quiet()
    beneath = base_case(case, base)
    config = models.read_config(beneath)
    cls = _class(beneath, config)
    binding = models.from_pretrained(beneath, cls, config, models.folder(beneath), {"": case.device}, dtype)
    if binding.unexpected:
        binding.unexpected = models.dry_bind(beneath, config, cls).unexpected
    return _with_adapter(case, binding, case.device)


def _class(case: Case, config: Any) -> Any:
    cls = models.model_class(case, config)
    if cls is None:
        raise LoadError(
            f"Transformers has no class of `{config.model_type}` for `{case.task}`", code="architecture.unsupported"
        )
    return cls


def _with_adapter(case: Case, binding: models.Binding, device: str) -> models.Binding:
    """Puts the adapter on the model and adds its tensors to the binding.

    PEFT initialises what a file does not hold, so its keys are compared with the file's. A head that the
    adapter replaces (``modules_to_save``) need not be in the base.
    """
    from peft import PeftConfig, get_peft_model
    from peft.utils import load_peft_weights, set_peft_model_state_dict
    from peft.utils.save_and_load import get_peft_model_state_dict

    place = models.folder(case)
    with models.hushed():
        config = PeftConfig.from_pretrained(place)
        config.inference_mode = True
        wrapped = get_peft_model(binding.model, config)
        weights = load_peft_weights(place, device="cpu")
        expected = set(get_peft_model_state_dict(wrapped, state_dict=None, save_embedding_layers=False))
        stored = set(weights)
        if device != "meta":
            result = set_peft_model_state_dict(wrapped, weights)
            binding.errors += [f"{name} is no part of the model" for name in result.unexpected_keys]
    replaced = tuple(f"{name}." for name in config.modules_to_save or ()) if hasattr(config, "modules_to_save") else ()
    binding.missing = [name for name in binding.missing if not (replaced and name.startswith(replaced))]
    binding.missing += sorted(expected - stored)
    binding.unexpected += sorted(stored - expected)
    binding.model = wrapped
    return binding
