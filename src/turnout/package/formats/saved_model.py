"""TensorFlow SavedModel directories and Core ML models, recognised and listed."""

from __future__ import annotations

from turnout.package.facts import Artifact, ArtifactKind, Finding, Severity, Strength, TaskEvidence
from turnout.package.scan import Scan, join, parent_of
from turnout.types import Task


def detect(scan: Scan) -> list[Artifact]:
    """SavedModel directories by saved_model.pb, Core ML by .mlmodel."""
    found = [_saved_model(scan, rel) for rel in scan.glob("saved_model.pb") if scan.wanted(rel)]
    found += [_core_ml(scan, rel) for rel in scan.glob("*.mlmodel") if scan.wanted(rel)]
    return found


def _saved_model(scan: Scan, rel: str) -> Artifact:
    directory = parent_of(rel)
    files = [
        f for f in scan.entries if f == rel or f.startswith((join(directory, "variables/"), join(directory, "assets/")))
    ]
    artifact = Artifact(
        f"tf_saved_model:{directory or '.'}", ArtifactKind.TF_SAVED_MODEL, rel, files, size_bytes=scan.size_of(files)
    )
    artifact.tasks = [TaskEvidence(Task.TENSOR, f"layout:{rel}", Strength.LAYOUT)]
    problem = scan.check_weights_file(rel)
    if problem is not None:
        artifact.findings.append(problem)
    elif not scan.has(join(directory, "variables/variables.index")):
        artifact.findings.append(
            Finding(
                "artifact.missing",
                Severity.WARNING,
                "the model has no variables folder",
                rel,
                "absent",
                "variables/variables.index",
            )
        )
    return artifact


def _core_ml(scan: Scan, rel: str) -> Artifact:
    package = rel.split(".mlpackage/", 1)[0] + ".mlpackage" if ".mlpackage/" in rel else ""
    files = [f for f in scan.entries if f.startswith(package + "/")] if package else [rel]
    artifact = Artifact(
        f"coreml:{package or rel}", ArtifactKind.COREML, package or rel, files, size_bytes=scan.size_of(files)
    )
    artifact.tasks = [TaskEvidence(Task.TENSOR, f"layout:{rel}", Strength.LAYOUT)]
    return artifact
