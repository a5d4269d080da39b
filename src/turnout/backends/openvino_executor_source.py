"""Where the graph of a decoder comes from, and which executor it gets.

A GenAI directory holds it. From GGUF, GenAI's reader builds it; no call hands the graph out, but a pipeline
can save it, which is done once per file. From a Hugging Face directory of a plain decoder the graph is
written here (``openvino_executor_decoder``); other decoders go through Transformers' exporter
(``openvino_executor_export``). Quantized and exported graphs are kept in turnout's cache.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from turnout.backends.base import Case, LoadPlan
from turnout.backends.openvino import core
from turnout.backends.openvino_executor import OpenVINOExecutor
from turnout.backends.openvino_executor_decoder import Decoder, decoder_graph
from turnout.backends.openvino_executor_export import exported_graph
from turnout.backends.openvino_executor_graph import Unpaged, paged_form, weights_bytes, windows_of
from turnout.backends.openvino_executor_options import Settings
from turnout.backends.openvino_executor_rows import OpenVINORowExecutor
from turnout.backends.openvino_executor_weights import Weights
from turnout.backends.openvino_gguf import gguf_requirements, model_path, refuse_for_good
from turnout.backends.openvino_reading import first_line
from turnout.config import cache_dir
from turnout.engine.executor import Executor
from turnout.errors import LoadError, NotSupportedError, TurnoutError, UsageError
from turnout.package.facts import Artifact, ArtifactKind

CONTEXT = 4096  # where neither the model nor the caller says
GRAPH = "openvino_model.xml"
REVISION = 1  # of the graphs written here: a change makes cached ones stale
Source = Callable[[], tuple[Any, Any]]  # a fresh graph, and what must live as long as it


def open_executor(plan: LoadPlan, options: Any = None) -> Executor:
    """Executor of a plan's model on the CPU. ``options``: a mapping or ``ExecutorOptions``; they go before
    the case's. Raises ``LoadError``, ``UsageError`` or ``NotSupportedError``."""
    case = plan.case
    if case.device != "cpu":
        raise NotSupportedError(f"the OpenVINO executor runs on cpu, not on `{case.device}`", code="device.unsupported")
    settings = Settings.of({"dtype": plan.dtype}, case.options, options)
    config = config_of(case.artifact)
    context = context_of(case.artifact, settings.context)
    source = source_of(case, settings, context)
    model, owner = source()
    try:
        return paged_executor(model, settings, context, config, owner)
    except Unpaged as why:
        model, owner = source()
        return OpenVINORowExecutor(model, settings, context, why.reason, _compiled)


def paged_executor(
    model: Any, settings: Settings, context: int, config: dict[str, Any] | None, owner: Any = None
) -> OpenVINOExecutor:
    """Executor of a stateful decoder graph, which is changed. ``config`` is the Transformers configuration
    where there is one. Raises ``Unpaged`` or ``LoadError``."""
    layers = sum(1 for op in model.get_ops() if op.get_type_name() == "ScaledDotProductAttention")
    windows = windows_of(config, layers, context) if config else None
    weights = weights_bytes(model)
    gathers = paged_form(model, windows)
    try:
        compiled = _compiled(model, settings.properties())
    except Exception as error:  # the library raises RuntimeError and others
        raise LoadError(
            f"OpenVINO compiles no paged form of it in {settings.dtype} with a {settings.kv_dtype or settings.dtype} "
            f"cache: {first_line(error)}"
        ) from error
    return OpenVINOExecutor(compiled, gathers, settings, context, weights, owner)


def _compiled(model: Any, properties: dict[str, Any]) -> Any:
    return core().compile_model(model, "CPU", properties)


def config_of(artifact: Artifact) -> dict[str, Any] | None:
    """A Transformers configuration; None for GGUF, whose windows are refused elsewhere, and where there is none."""
    if artifact.kind is ArtifactKind.GGUF or artifact.architecture is None:
        return None
    return artifact.architecture.config or None


def context_of(artifact: Artifact, asked: int) -> int:
    """Positions of one sequence. Raises ``UsageError`` when more are asked than the model was made for."""
    known = artifact.architecture.dims.get("max_position_embeddings", 0) if artifact.architecture else 0
    if known and asked > known:
        raise UsageError(f"option `context={asked}`: the model was made for {known} tokens")
    return asked or known or CONTEXT


# ---- sources ---------------------------------------------------------------------------


def source_of(case: Case, settings: Settings, context: int) -> Source:
    """The case's graph for at most ``context`` positions. Raises ``UsageError`` for ``quantize`` where
    weights are quantized already."""
    kind = case.artifact.kind
    if kind is ArtifactKind.TRANSFORMERS:
        return _hugging_face(case, settings.quantize, context)
    if settings.quantize:
        raise UsageError(f"option `quantize={settings.quantize}` is for Hugging Face directories, this is {kind}")
    if kind is ArtifactKind.GGUF:
        return _read(_saved_gguf(case))
    if kind in (ArtifactKind.OPENVINO_GENAI, ArtifactKind.OPENVINO_IR):
        entry = Path(case.file(case.artifact.entry))
        return _read(entry / GRAPH if entry.is_dir() else entry)
    raise NotSupportedError(f"the OpenVINO executor reads no {kind} artifacts", code="artifact.kind_unsupported")


def _read(path: Path) -> Source:
    def read() -> tuple[Any, Any]:
        try:
            return core().read_model(os.fspath(path)), None
        except Exception as error:  # the library raises RuntimeError and others
            raise LoadError(f"OpenVINO does not read `{path.name}`: {first_line(error)}") from error

    return read


def _hugging_face(case: Case, quantize: str, context: int) -> Source:
    architecture = case.artifact.architecture
    if architecture is None:
        raise LoadError("there is no configuration", code="config.missing")
    if architecture.quantization is not None and not architecture.quantization.tensors_plain:
        raise NotSupportedError(
            f"weights are stored by {architecture.quantization.method}", code="quantization.unsupported"
        )

    def written() -> tuple[Any, Any]:
        weights = Weights(case.root, case.artifact.tensors.tensors, quantize)
        return decoder_graph(Decoder.of(architecture.config), weights), weights

    def exported() -> tuple[Any, Any]:
        return exported_graph(case, quantize)

    plain = _written_here(architecture.config, context)
    if plain and not quantize:
        return written
    what, make = ("written", written) if plain else ("exported", exported)
    return _read(_cached(case, f"{what} {quantize}", lambda folder: _save(make, folder)))


def _written_here(config: dict[str, Any], context: int) -> bool:
    """Whether the graph written here computes this configuration: it has no windows in its mask."""
    try:
        decoder = Decoder.of(config)
        return not any(windows_of(config, decoder.layers, context))
    except (TurnoutError, Unpaged):
        return False


def _save(source: Source, folder: Path) -> None:
    import openvino

    model, _owner = source()
    openvino.save_model(model, os.fspath(folder / GRAPH), compress_to_fp16=False)


def _saved_gguf(case: Case) -> Path:
    refuse_for_good(gguf_requirements(case))

    def save(folder: Path) -> None:
        import openvino_genai

        # The pipeline writes beside the file that it was given.
        link = folder / "model.gguf"
        link.symlink_to(os.path.realpath(model_path(case)))
        try:
            openvino_genai.LLMPipeline(os.fspath(link), "CPU", enable_save_ov_model=True)
        except Exception as error:  # the library raises RuntimeError and others
            raise LoadError(f"OpenVINO GenAI cannot load it: {first_line(error)}") from error
        finally:
            link.unlink()
        if not (folder / GRAPH).exists():
            raise LoadError("OpenVINO GenAI saved no graph of it")

    return _cached(case, "gguf", save)


def _cached(case: Case, what: str, make: Callable[[Path], None]) -> Path:
    """The graph that ``make`` writes into a folder, made once per content of the case's files."""
    import openvino

    mark = hashlib.sha256(f"{REVISION}\0{what}\0{openvino.__version__}".encode())
    for name in sorted(case.artifact.files):
        path = case.file(name)
        stat = os.stat(path)
        mark.update(f"\0{os.path.realpath(path)}\0{stat.st_size}\0{stat.st_mtime_ns}".encode())
    target = cache_dir() / "openvino" / mark.hexdigest()[:24]
    if not (target / GRAPH).exists():
        partial = target.with_name(f"{target.name}.{os.getpid()}.part")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            make(partial)
            try:
                partial.rename(target)
            except OSError:  # another process was faster
                if not (target / GRAPH).exists():
                    raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return target / GRAPH
