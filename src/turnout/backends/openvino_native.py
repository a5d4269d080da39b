"""Hugging Face directories of plain decoders under the generation engine, computed by OpenVINO.

The graph is written from the configuration (``openvino_executor_decoder``) over the mapped weights, turned
into its paged form, and driven step by step by the engine. ``quantize`` stores the weights in 8 or 4 bits
while they are read. What the graph is not written for is refused by name.
"""

from __future__ import annotations

from typing import Any

from turnout.backends.base import (
    Action,
    BackendBuild,
    BindingReport,
    Case,
    Evidence,
    EvidenceLevel,
    Kind,
    LoadPlan,
    Remedy,
    Requirement,
    failed,
    met,
    passed,
    unmet,
)
from turnout.backends.openvino import OpenVINOBackend
from turnout.backends.openvino_executor_decoder import Decoder, decoder_graph
from turnout.backends.openvino_executor_source import open_executor
from turnout.backends.openvino_executor_vocabulary import vocabulary_of_case
from turnout.backends.openvino_executor_weights import Weights
from turnout.engine.executor import Executor, Vocabulary
from turnout.engine.session import EngineSession
from turnout.errors import TurnoutError
from turnout.package.facts import ArtifactKind
from turnout.types import Task

DTYPES = ("float32", "bfloat16")
ALONE = 4  # slots of a session that is asked one request at a time


class OpenVINONativeBackend:
    """Llama, Mistral, Qwen2 and Qwen3 directories; text generation and chat; on the CPU."""

    name = "openvino-native"
    reads = frozenset({ArtifactKind.TRANSFORMERS})
    tasks: frozenset[str] = frozenset({Task.TEXT_GENERATION, Task.CHAT})
    quantizes = frozenset({"q8", "q4", "auto"})

    def describe(self) -> BackendBuild:
        """Version of the installed OpenVINO; nothing is imported."""
        build = OpenVINOBackend().describe()
        build.name = self.name
        return build

    def devices(self) -> list[str]:
        """The CPU: pages on other devices are laid out otherwise."""
        return ["cpu"]

    def requirements(self, case: Case) -> list[Requirement]:
        """The configuration, the stored types and the tokenizer, each asked."""
        architecture = case.artifact.architecture
        if architecture is None:
            return [unmet(Kind.CONFIG, "config.missing", "there is no configuration")]
        found = []
        try:
            Decoder.of(architecture.config)
            found.append(met("architecture", Kind.ARCHITECTURE))
        except (TurnoutError, KeyError, TypeError, ValueError) as error:
            message = error.message if isinstance(error, TurnoutError) else f"the configuration lacks {error}"
            code = error.code if isinstance(error, TurnoutError) else "config.missing"
            found.append(unmet(Kind.ARCHITECTURE, code, message, where=case.artifact.entry))
        stored = architecture.quantization
        if stored is not None and not stored.tensors_plain:
            message = f"weights are stored by {stored.method}, which this graph does not read"
            found.append(unmet(Kind.QUANTIZATION, "quantization.unsupported", message, observed=stored.method))
        other = sorted({t.file for t in case.artifact.tensors.tensors.values() if not t.file.endswith(".safetensors")})
        if other:
            message = "weights are read from mapped safetensors files only"
            convert = Remedy(Action.CONVERT, "save the model as safetensors with Transformers' `save_pretrained`")
            found.append(
                unmet(
                    Kind.ARTIFACT,
                    "artifact.kind_unsupported",
                    message,
                    observed=other[0],
                    expected="safetensors",
                    where=other[0],
                    remedies=[convert],
                )
            )
        dtype = str(case.options.get("dtype") or DTYPES[0])
        if dtype not in DTYPES:
            message = f"the graph computes in {' or '.join(DTYPES)}"
            found.append(unmet(Kind.DTYPE, "option.unsupported", message, observed=dtype, expected=", ".join(DTYPES)))
        return [*found, _tokenizer(case)]

    def inquire(self, case: Case) -> list[Evidence]:
        """``requirements`` has put every question there is."""
        return [passed(EvidenceLevel.INQUIRED)]

    def plan(self, case: Case) -> LoadPlan:
        """A paged decoder graph."""
        dtype = str(case.options.get("dtype") or DTYPES[0])
        return LoadPlan(case, self.name, "paged decoder graph", dtype, list(case.artifact.files))

    def dry_load(self, plan: LoadPlan) -> Evidence:
        """Writes the graph over the mapped files: every tensor is bound by name and shape, none is read."""
        case = plan.case
        architecture = case.artifact.architecture
        assert architecture is not None  # requirements ask for it
        try:
            decoder_graph(Decoder.of(architecture.config), Weights(case.root, case.artifact.tensors.tensors))
        except TurnoutError as error:
            return failed(EvidenceLevel.DRY_LOADED, error.code, error.message)
        except Exception as error:  # the library raises RuntimeError for shapes that do not fit
            line = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            return failed(EvidenceLevel.DRY_LOADED, "tensor.shape_mismatch", line[:300])
        return passed(EvidenceLevel.DRY_LOADED)

    def load(self, plan: LoadPlan) -> EngineSession:
        """One request at a time through the generation engine. Raises ``LoadError``."""
        from turnout.engine.core import Engine

        executor = self.executor(plan, {"slots": ALONE})
        try:
            engine = Engine(executor, self.vocabulary(plan))
            binding = BindingReport(loaded=len(plan.case.artifact.tensors.tensors))
            return EngineSession(plan, engine, binding, plan.dtype)
        except BaseException:
            executor.close()
            raise

    def probe(self, session: EngineSession) -> Evidence:
        """Sixteen greedy tokens whose probabilities are numbers."""
        from turnout.engine.probe import probe

        return probe(session)

    def executor(self, plan: LoadPlan, options: Any = None) -> Executor:
        """The model for the generation engine; ``options`` is an ``ExecutorOptions`` or a mapping."""
        scheme = plan.case.options.get("quantize")
        executor = open_executor(plan, options)
        if scheme:
            plan.dtype = f"{'int4' if scheme == 'q4' else 'int8'} weights, int8 activations, {plan.dtype}"
        return executor

    def vocabulary(self, plan: LoadPlan) -> Vocabulary:
        """Token ids and texts of the package's tokenizer, or of the option ``tokenizer``."""
        return vocabulary_of_case(plan.case)


def _tokenizer(case: Case) -> Requirement:
    try:
        vocabulary_of_case(case)
    except TurnoutError as error:
        return unmet(Kind.COMPONENT, error.code, error.message)
    return met("tokenizer", Kind.COMPONENT)
