"""Transformers directories: config.json with weights in safetensors or torch files, single or sharded."""

from __future__ import annotations

from turnout.package.facts import (
    Architecture,
    Artifact,
    ArtifactKind,
    CodeNeed,
    FileRole,
    Finding,
    Severity,
    TensorInventory,
)
from turnout.package.formats.context import Context, read_context
from turnout.package.formats.pickle import read_pickle, unsafe_finding
from turnout.package.formats.safetensors import read_safetensors
from turnout.package.formats.transformers_tasks import tasks_of
from turnout.package.scan import ReadError, Scan, join, parent_of

MAX_SHARDS = 4096
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
WEIGHT_NAMES = (
    ("model.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
)


def detect(scan: Scan) -> list[Artifact]:
    """Every directory with a config.json that names a model, or with weights of such a directory."""
    found = []
    for directory in scan.directories():
        if _is_model(scan, directory) and _focused(scan, directory):
            artifact = _artifact(scan, directory)
            claimed: set[str] = scan.once("claimed", set)
            claimed.update(artifact.files)
            found.append(artifact)
    return found


def detect_in(scan: Scan, directory: str) -> list[Artifact]:
    """The Transformers artifact of one directory, if it holds one."""
    return [_artifact(scan, directory)] if _is_model(scan, directory) else []


def _is_model(scan: Scan, directory: str) -> bool:
    if (
        scan.has(join(directory, "model_index.json"))
        or scan.has(join(parent_of(directory), "model_index.json"))
        and directory
    ):
        return False  # a part of a diffusers bundle
    if directory and scan.has(join(parent_of(directory), "modules.json")):
        config = scan.json_object(join(directory, "config.json")) or {}
        if "model_type" not in config:
            return False  # a layer of a sentence-transformers package
    if scan.has(join(directory, "adapter_config.json")) or not scan.has(join(directory, "config.json")):
        return False
    return _weights(scan, directory) is not None or _only_weights_lack(scan, directory)


def _only_weights_lack(scan: Scan, directory: str) -> bool:
    """A package whose configuration names a model and that holds no weights or graph of any kind."""
    config = scan.json_object(join(directory, "config.json")) or {}
    if not (isinstance(config.get("model_type"), str) and isinstance(config.get("architectures"), list)):
        return False
    return not any(entry.role in (FileRole.WEIGHTS, FileRole.GRAPH) for entry in scan.entries.values())


def _focused(scan: Scan, directory: str) -> bool:
    if scan.focus is None:
        return True
    names = {join(directory, name) for pair in WEIGHT_NAMES for name in pair} | {join(directory, "config.json")}
    return scan.focus in names or scan.focus.endswith(".safetensors")


def _weights(scan: Scan, directory: str) -> str | None:
    """Entry file of the weights in Transformers' order of search, None when there is none."""
    named = _named_weights(scan, directory)
    if named is not None:
        return named
    for single, index in WEIGHT_NAMES:
        for name in (single, index):
            if scan.has(join(directory, name)):
                return join(directory, name)
    loose = scan.glob("model-*-of-*.safetensors", directory) or scan.glob("*.safetensors", directory)
    return loose[0] if loose else None


def _check_named(scan: Scan, directory: str, artifact: Artifact) -> None:
    """Says what is wrong with a name under ``transformers_weights``."""
    name = (scan.json_object(join(directory, "config.json")) or {}).get("transformers_weights")
    where = f"{join(directory, 'config.json')}#/transformers_weights"
    try:
        if isinstance(name, str) and not scan.has(scan.refer(directory, name)):
            message = f"the weights `{name}` that the configuration names are not in the package"
            artifact.findings.append(Finding("artifact.missing", Severity.ERROR, message, where, "absent", name))
    except ReadError as error:
        error.finding.path = where
        artifact.findings.append(error.finding)


def _named_weights(scan: Scan, directory: str) -> str | None:
    """The file that config.json itself names under ``transformers_weights``, which comes before all others."""
    name = (scan.json_object(join(directory, "config.json")) or {}).get("transformers_weights")
    if not isinstance(name, str):
        return None
    try:
        rel = scan.refer(directory, name)
    except ReadError:
        return None  # said by _check_named
    return rel if scan.has(rel) else None


def _artifact(scan: Scan, directory: str) -> Artifact:
    context = read_context(scan, directory)
    entry = _weights(scan, directory) or ""
    artifact = Artifact(f"transformers:{directory or '.'}", ArtifactKind.TRANSFORMERS, directory)
    artifact.files = list(context.files)
    _check_named(scan, directory, artifact)
    _read_weights(scan, directory, entry, artifact)
    attach(artifact, context)
    _check_config(artifact, directory)
    _check_quantization(artifact)
    _check_vocabulary(artifact)
    tasks_of(artifact)
    artifact.files = list(dict.fromkeys(artifact.files))
    artifact.size_bytes = scan.size_of(artifact.files)
    return artifact


def attach(artifact: Artifact, context: Context) -> None:
    """Gives an artifact what its directory says: architecture, tokenizer, templates and so on."""
    artifact.architecture = context.architecture
    artifact.tokenizer = context.tokenizer
    artifact.templates = list(context.templates)
    artifact.processors = list(context.processors)
    artifact.generation = context.generation
    artifact.labels = context.labels
    artifact.recipe = context.recipe
    artifact.licence = context.licence
    artifact.code = artifact.code if artifact.code is CodeNeed.FORBIDDEN else context.code
    artifact.findings += context.findings
    artifact.files += [f for f in context.files if f not in artifact.files]
    if context.architecture is not None:
        artifact.quantization = context.architecture.quantization


# ---- weights -----------------------------------------------------------------------------------


def _read_weights(scan: Scan, directory: str, entry: str, artifact: Artifact) -> None:
    if not entry:
        expected = "model.safetensors, pytorch_model.bin or an index of shards"
        message = "the package has a configuration and no weights"
        where = directory or "."
        artifact.findings.append(Finding("artifact.missing", Severity.ERROR, message, where, "no weights", expected))
    elif entry.endswith(".index.json"):
        _read_index(scan, directory, entry, artifact)
    elif entry.endswith(".safetensors"):
        _read_single(scan, directory, entry, artifact)
    else:
        _read_torch(scan, entry, artifact)


def _read_single(scan: Scan, directory: str, entry: str, artifact: Artifact) -> None:
    artifact.files.append(entry)
    if entry not in (join(directory, "model.safetensors"), _named_weights(scan, directory)):
        message = "safetensors files without an index are not found by loaders"
        expected = "model.safetensors or model.safetensors.index.json"
        artifact.findings.append(Finding("artifact.missing", Severity.ERROR, message, directory, entry, expected))
        return
    artifact.tensors = read_safetensors(scan, entry)


def _read_torch(scan: Scan, rel: str, artifact: Artifact) -> None:
    artifact.files.append(rel)
    try:
        facts = read_pickle(scan, rel)
    except ReadError as error:
        artifact.findings.append(error.finding)
        return
    if facts is None:
        artifact.findings.append(Finding("artifact.corrupt", Severity.ERROR, f"`{rel}` is not a torch file", rel))
        return
    if facts.unsafe:
        artifact.code = CodeNeed.FORBIDDEN
        artifact.findings.append(unsafe_finding(rel, facts.unsafe))
    elif facts.form not in ("zip", "legacy"):
        message = f"`{rel}` holds no table of weights"
        artifact.findings.append(Finding("artifact.corrupt", Severity.ERROR, message, rel, facts.form, "a state dict"))
    artifact.tensors.shards.append(rel)
    artifact.tensors.problems += facts.inventory.problems
    artifact.tensors.tensors.update(facts.inventory.tensors)


def _read_index(scan: Scan, directory: str, entry: str, artifact: Artifact) -> None:
    artifact.files.append(entry)
    try:
        index = scan.json(entry)
    except ReadError as error:
        artifact.findings.append(error.finding)
        return
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        artifact.findings.append(Finding("index.inconsistent", Severity.ERROR, f"`{entry}` has no weight map", entry))
        return
    shards = list(dict.fromkeys(weight_map.values()))
    if len(shards) > MAX_SHARDS:
        message = f"`{entry}` names too many shards"
        artifact.findings.append(
            Finding("index.inconsistent", Severity.ERROR, message, entry, str(len(shards)), str(MAX_SHARDS))
        )
        return
    for name in shards:
        _read_shard(scan, directory, entry, name, artifact)
    _compare_index(entry, directory, weight_map, artifact)


def _read_shard(scan: Scan, directory: str, entry: str, name: str, artifact: Artifact) -> None:
    try:
        rel = scan.refer(directory, name)
    except ReadError as error:
        artifact.findings.append(error.finding)
        return
    artifact.files.append(rel)
    if not scan.has(rel):
        artifact.findings.append(
            Finding(
                "artifact.shard_missing",
                Severity.ERROR,
                f"shard `{name}` of `{entry}` is not in the package",
                rel,
                "absent",
                name,
            )
        )
        return
    if not name.endswith(".safetensors"):
        _read_torch(scan, rel, artifact)
        return
    shard = read_safetensors(scan, rel)
    again = artifact.tensors.tensors.keys() & shard.tensors.keys()
    if again:
        artifact.findings.append(
            Finding(
                "artifact.duplicate_tensor",
                Severity.ERROR,
                f"`{min(again)}` is in two shards",
                rel,
                rel,
                artifact.tensors.tensors[min(again)].file,
            )
        )
    artifact.tensors.tensors.update(shard.tensors)
    artifact.tensors.shards.append(rel)
    artifact.tensors.problems += shard.problems


def _compare_index(entry: str, directory: str, weight_map: dict[str, str], artifact: Artifact) -> None:
    """What the index says against what the shards hold; loaders go by the shards, so only a warning."""
    stored = artifact.tensors.tensors
    if artifact.findings or artifact.tensors.problems or not stored:
        return
    wrong = [n for n, f in weight_map.items() if n in stored and stored[n].file != join(directory, f)]
    absent = [n for n in weight_map if n not in stored]
    unnamed = [n for n in stored if n not in weight_map]
    for names, what in (
        (wrong, "names the wrong shard for"),
        (absent, "names a tensor no shard holds:"),
        (unnamed, "does not name the stored tensor"),
    ):
        if names:
            artifact.findings.append(
                Finding(
                    "index.inconsistent",
                    Severity.WARNING,
                    f"`{entry}` {what} `{names[0]}`" + (f" and {len(names) - 1} more" if len(names) > 1 else ""),
                    entry,
                )
            )


# ---- checks ------------------------------------------------------------------------------------


def _check_config(artifact: Artifact, directory: str) -> None:
    architecture = artifact.architecture
    path = join(directory, "config.json")
    if architecture is None:
        if not any(f.path == path for f in artifact.findings):
            artifact.findings.append(Finding("config.invalid", Severity.ERROR, "config.json cannot be used", path))
        return
    if not architecture.model_type:
        artifact.findings.append(
            Finding(
                "config.invalid",
                Severity.ERROR,
                "config.json has no `model_type`",
                f"{path}#/model_type",
                "absent",
                "the name of a model family",
            )
        )


def _check_quantization(artifact: Artifact) -> None:
    if artifact.quantization is not None and artifact.tensors.tensors:
        dtypes = artifact.tensors.dtypes()
        artifact.quantization.tensor_types = dtypes
        artifact.quantization.tensors_plain = set(dtypes) <= FLOATS


def _check_vocabulary(artifact: Artifact) -> None:
    """A token id that no embedding row answers to; more rows than tokens is ordinary padding."""
    tokenizer = artifact.tokenizer
    rows = embedding_rows(artifact.tensors, artifact.architecture)
    if tokenizer is None or tokenizer.max_id is None or rows is None or tokenizer.kind == "ctc-vocab":
        return
    if tokenizer.max_id >= rows:
        artifact.findings.append(
            Finding(
                "tokenizer.id_out_of_range",
                Severity.ERROR,
                f"the tokenizer gives ids up to {tokenizer.max_id}, the embedding has {rows} rows",
                tokenizer.path,
                str(tokenizer.max_id),
                f"at most {rows - 1}",
            )
        )


EMBEDDINGS = (
    "embed_tokens.weight",
    "word_embeddings.weight",
    "wte.weight",
    "embed_in.weight",
    "shared.weight",
    "tok_embeddings.weight",
    "token_embedding.weight",
    "word_embedding.weight",
    ".embeddings.weight",
)


def embedding_rows(tensors: TensorInventory, architecture: Architecture | None) -> int | None:
    """Rows of the token embedding, read from its tensor, else None."""
    rows = [t.shape[0] for n, t in tensors.tensors.items() if n.endswith(EMBEDDINGS) and len(t.shape) == 2]
    return max(rows) if rows else None
