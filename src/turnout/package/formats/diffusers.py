"""Diffusers bundles (model_index.json with component folders), single-file checkpoints, DDUF."""

from __future__ import annotations

import re
from typing import Any

from turnout.package.facts import (
    Artifact,
    ArtifactKind,
    CodeNeed,
    Component,
    Fact,
    Finding,
    Recipe,
    Severity,
    Status,
    Strength,
    TaskEvidence,
    TensorInfo,
    TensorInventory,
)
from turnout.package.formats.pickle import read_pickle, unsafe_finding
from turnout.package.formats.safetensors import read_safetensors
from turnout.package.scan import ReadError, Scan, join, parent_of
from turnout.types import Task

INDEX = "model_index.json"
WEIGHTS = ("diffusion_pytorch_model", "model", "pytorch_model")
# Tensor-name beginnings by which original single-file checkpoints are told apart.
SINGLE_FILE = {
    "stable-diffusion-xl": ("conditioner.embedders.1.",),
    "stable-diffusion-3": ("model.diffusion_model.joint_blocks.",),
    "flux": ("double_blocks.0.", "model.diffusion_model.double_blocks.0."),
    "stable-diffusion": ("model.diffusion_model.input_blocks.",),
}
IMAGE_TO_IMAGE = re.compile(r"Img2Img|Inpaint|ImageToImage|Edit|Upscale")


def detect(scan: Scan) -> list[Artifact]:
    """Bundles, then single files that no bundle or model directory accounts for."""
    found = []
    for rel in scan.glob(INDEX):
        if scan.wanted(rel) or scan.focus is None:
            found.append(_bundle(scan, parent_of(rel), rel))
    for rel in scan.glob("*.dduf"):
        if scan.wanted(rel):
            found.append(_dduf(scan, rel))
    claimed: set[str] = scan.once("claimed", set)
    for artifact in found:
        claimed.update(artifact.files)
    found += _single_files(scan, claimed)
    return found


def _dduf(scan: Scan, rel: str) -> Artifact:
    artifact = Artifact(f"dduf:{rel}", ArtifactKind.DDUF, rel, [rel], size_bytes=scan.size_of([rel]))
    artifact.tasks = [TaskEvidence(Task.TEXT_TO_IMAGE, f"layout:{rel}", Strength.NAME)]
    return artifact


# ---- bundles -----------------------------------------------------------------------------------


def _bundle(scan: Scan, directory: str, rel: str) -> Artifact:
    artifact = Artifact(f"diffusers:{directory or '.'}", ArtifactKind.DIFFUSERS, directory, [rel])
    try:
        index = scan.json(rel)
    except ReadError as error:
        artifact.findings.append(error.finding)
        return artifact
    if not isinstance(index, dict):
        artifact.findings.append(Finding("config.invalid", Severity.ERROR, f"`{rel}` is not a JSON object", rel))
        return artifact
    name = index.get("_class_name")
    pipeline = name if isinstance(name, str) else str(name[-1]) if isinstance(name, list) and name else ""
    artifact.facts["pipeline"] = Fact(pipeline, f"{rel}#/_class_name", Strength.CONFIG)
    artifact.facts["version"] = Fact(index.get("_diffusers_version"), f"{rel}#/_diffusers_version", Strength.CONFIG)
    if isinstance(name, list):
        _needs_code(artifact, f"the pipeline class `{pipeline}` comes with the package", rel, str(name))
    variants: set[str] = set()
    for role, value in index.items():
        if not role.startswith("_") and isinstance(value, list) and len(value) == 2:
            _component(scan, directory, role, value, artifact, variants)
    artifact.facts["variants"] = Fact(sorted(variants), f"layout:{directory or '.'}", Strength.LAYOUT)
    artifact.recipe = _recipe(scan, directory, pipeline, rel)
    task = Task.IMAGE_TO_IMAGE if IMAGE_TO_IMAGE.search(pipeline) else Task.TEXT_TO_IMAGE
    artifact.tasks.append(TaskEvidence(task, f"{rel}#/_class_name", Strength.CONFIG, pipeline))
    artifact.files = list(dict.fromkeys(artifact.files))
    artifact.size_bytes = scan.size_of(artifact.files)
    return artifact


def _needs_code(artifact: Artifact, message: str, path: str, observed: str) -> None:
    artifact.code = CodeNeed.REQUIRED
    artifact.findings.append(
        Finding("code.required", Severity.WARNING, message, path, observed, "a class of the library")
    )


def _component(scan: Scan, directory: str, role: str, value: list[Any], artifact: Artifact, variants: set[str]) -> None:
    library, name = value
    if not all(part is None or isinstance(part, str) for part in value):
        where = join(directory, INDEX)
        message = f"the component `{role}` is not named by a library and a class"
        artifact.findings.append(
            Finding("config.invalid", Severity.ERROR, message, where, str(value)[:80], "two texts")
        )
        return
    try:
        place = scan.refer(directory, role)
    except ReadError as error:
        artifact.findings.append(error.finding)
        return
    component = Component(role, Status.PRESENT, library, name, place)
    artifact.components.append(component)
    if library is None or name is None:
        component.status = Status.MISSING
        return
    component.files = [f for f in scan.entries if parent_of(f) == place]
    artifact.files += component.files
    if not component.files:
        component.status = Status.MISSING
        artifact.findings.append(
            Finding(
                "component.missing",
                Severity.ERROR,
                f"the component `{role}` has no folder",
                place,
                "absent",
                f"{library}.{name}",
            )
        )
        return
    code = join(place, f"{str(library).rsplit('.', 1)[-1]}.py")
    if scan.has(code):
        component.code = CodeNeed.REQUIRED
        _needs_code(artifact, f"the component `{role}` is a Python file of the package", code, str(library))
    _weights(scan, component, artifact, variants)


def _weights(scan: Scan, component: Component, artifact: Artifact, variants: set[str]) -> None:
    """Weights of a component that has any: the plain files, or only files of a variant."""
    config = join(component.path, "config.json")
    if not scan.has(config):
        return
    for rel in scan.glob("*.index*.json", component.path):
        _check_index(scan, rel, artifact)
    plain, variant_files = _find_weights(scan, component.path)
    if plain:
        for rel in plain:
            _read(scan, rel, component, artifact)
        return
    if variant_files:
        variants |= set(variant_files)
        for rel in variant_files[min(variant_files)]:
            _read(scan, rel, component, artifact)
        return
    component.status = Status.INVALID
    artifact.findings.append(
        Finding(
            "artifact.missing",
            Severity.ERROR,
            f"the component `{component.role}` has no weights",
            component.path,
            "no weights",
            "diffusion_pytorch_model.safetensors or model.safetensors",
        )
    )


def _check_index(scan: Scan, rel: str, artifact: Artifact) -> None:
    """Shards that an index names and that are absent or outside the package."""
    index = scan.json_object(rel) or {}
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        artifact.findings.append(Finding("index.inconsistent", Severity.ERROR, f"`{rel}` has no weight map", rel))
        return
    for name in dict.fromkeys(weight_map.values()):
        try:
            shard = scan.refer(parent_of(rel), name)
        except ReadError as error:
            artifact.findings.append(error.finding)
            return
        if not scan.has(shard):
            message = f"shard `{name}` of `{rel}` is not in the package"
            artifact.findings.append(Finding("artifact.shard_missing", Severity.ERROR, message, shard, name, "present"))
            return


def _find_weights(scan: Scan, place: str) -> tuple[list[str], dict[str, list[str]]]:
    plain: list[str] = []
    variants: dict[str, list[str]] = {}
    for suffix in ("safetensors", "bin"):
        pattern = re.compile(rf"({'|'.join(WEIGHTS)})(?:\.(?P<variant>[a-z][\w]*))?(?:-\d+-of-\d+)?\.{suffix}")
        for rel in scan.entries:
            match = pattern.fullmatch(rel.rsplit("/", 1)[-1]) if parent_of(rel) == place else None
            if match and match["variant"]:
                variants.setdefault(match["variant"], []).append(rel)
            elif match:
                plain.append(rel)
        if plain:
            break
    return plain, variants


def _read(scan: Scan, rel: str, component: Component, artifact: Artifact) -> None:
    if rel.endswith(".bin"):
        try:
            facts = read_pickle(scan, rel)
        except ReadError as error:
            artifact.findings.append(error.finding)
            return
        if facts is not None and facts.unsafe:
            artifact.code = CodeNeed.FORBIDDEN
            artifact.findings.append(unsafe_finding(rel, facts.unsafe))
        inventory = facts.inventory if facts is not None else None
    else:
        inventory = read_safetensors(scan, rel)
    if inventory is None:
        return
    artifact.tensors.shards.append(rel)
    artifact.tensors.problems += inventory.problems
    for name, tensor in inventory.tensors.items():
        full = f"{component.role}/{name}"
        artifact.tensors.tensors[full] = TensorInfo(
            full, tensor.dtype, tensor.shape, tensor.file, tensor.offset, tensor.nbytes
        )


def _recipe(scan: Scan, directory: str, pipeline: str, rel: str) -> Recipe:
    scheduler = scan.json_object(join(join(directory, "scheduler"), "scheduler_config.json")) or {}
    names = ("_class_name", "prediction_type", "timestep_spacing", "beta_schedule", "num_train_timesteps", "shift")
    settings = {name.strip("_"): scheduler[name] for name in names if name in scheduler}
    return Recipe("diffusion", {"pipeline": pipeline, **settings}, rel)


# ---- single files ------------------------------------------------------------------------------


def _single_files(scan: Scan, claimed: set[str]) -> list[Artifact]:
    found = []
    for rel in [*scan.glob("*.safetensors"), *scan.glob("*.ckpt")]:
        if rel in claimed or not scan.wanted(rel) or scan.has(join(parent_of(rel), "config.json")):
            continue
        if scan.has(join(parent_of(rel), "adapter_config.json")) or scan.glob("*.index.json", parent_of(rel)):
            continue
        inventory = read_safetensors(scan, rel) if rel.endswith(".safetensors") else _of_torch(scan, rel)
        family, source = _family(inventory)
        if not family and rel.endswith(".ckpt"):
            continue  # a torch file of some other kind
        kind = ArtifactKind.DIFFUSERS_SINGLE_FILE if family else ArtifactKind.SAFETENSORS
        artifact = Artifact(f"{kind}:{rel}", kind, rel, [rel], inventory, size_bytes=scan.size_of([rel]))
        if family:
            artifact.facts["family"] = Fact(family, source, Strength.HEADER)
            artifact.tasks = [TaskEvidence(Task.TEXT_TO_IMAGE, source, Strength.HEADER)]
        claimed.add(rel)
        found.append(artifact)
    return found


def _of_torch(scan: Scan, rel: str) -> TensorInventory:
    """Tensors of a checkpoint that is safe to load, else none (the reader of torch files says why)."""
    try:
        facts = read_pickle(scan, rel)
    except ReadError:
        return TensorInventory()
    return facts.inventory if facts is not None and not facts.unsafe else TensorInventory()


def _family(inventory: TensorInventory) -> tuple[str, str]:
    """Family of a single-file checkpoint and the tensor that tells, both empty when it is none."""
    for family, prefixes in SINGLE_FILE.items():
        name = next((n for n in inventory.tensors if n.startswith(prefixes)), None)
        if name is not None:
            return family, f"tensor:{name}"
    return "", ""
