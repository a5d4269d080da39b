"""Transformers models under the generation engine: weights by Transformers, steps by our executors.

What can be said about a package is the same as for the `transformers` backend, so it is asked there.
``executor`` picks ``TorchExecutor`` (ragged batches over slot rows) where the class runs so, else
``RowExecutor`` (the library's own caches, one row at a time), and says why.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Mapping
from typing import Any

from turnout.backends import transformers_models as models
from turnout.backends.base import BackendBuild, Case, Evidence, Kind, LoadPlan, Requirement, met, unmet
from turnout.backends.requirements import truthy
from turnout.backends.torch_native_executor import TorchExecutor, TorchOptions, context_of
from turnout.backends.torch_native_probe import static_reasons
from turnout.backends.transformers import TransformersBackend
from turnout.engine.executor import Executor, Vocabulary
from turnout.engine.session import EngineSession
from turnout.errors import LoadError, NotSupportedError, TurnoutError, UsageError
from turnout.package.facts import ArtifactKind
from turnout.quantize.int8 import quantize_linears
from turnout.types import count_of

ALONE = 4  # slots of a session that is asked one request at a time: a running one and a few kept prefixes
WIDTHS = {"auto": 8, "q8": 8, "q6": 6, "q5": 5, "q4": 4, "q3": 3}  # bits of weights by the name of a scheme
COMPUTED = "float32"  # type between quantised layers
Prepare = Callable[[Any], Any]
COUNTS = ("slots", "cache_tokens", "context", "threads", "step_tokens", "max_adapters", "adapter_bytes")


class TorchNativeBackend:
    """Transformers directories and GGUF files expanded to floats, for tasks that generate text."""

    name = "torch-native"
    quantizes = frozenset(WIDTHS)
    reads = frozenset({ArtifactKind.TRANSFORMERS, ArtifactKind.GGUF})
    tasks = models.GENERATING

    def __init__(self) -> None:
        self._library = TransformersBackend()

    def describe(self) -> BackendBuild:
        """Versions of the same distributions as the `transformers` backend."""
        return dataclasses.replace(self._library.describe(), name=self.name)

    def devices(self) -> list[str]:
        """The CPU and CUDA devices."""
        return [device for device in self._library.devices() if device != "mps"]

    def requirements(self, case: Case) -> list[Requirement]:
        """What the library says of the case, and whether its context fits the model's positions."""
        found = self._library.requirements(case)
        if case.artifact.kind is ArtifactKind.TRANSFORMERS and count_of(case.options.get("context")):
            found += _context(case)
        return found

    def inquire(self, case: Case) -> list[Evidence]:
        """Nothing beyond ``requirements``."""
        return self._library.inquire(case)

    def plan(self, case: Case) -> LoadPlan:
        """Class, type to compute in and files, as the library's plan has them."""
        plan = self._library.plan(case)
        plan.backend = self.name
        return plan

    def dry_load(self, plan: LoadPlan) -> Evidence:
        """Binds every tensor by name and shape on the meta device; no weight is read."""
        return self._library.dry_load(plan)

    def load(self, plan: LoadPlan) -> EngineSession:
        """One request at a time through the generation engine. Raises ``LoadError``."""
        from turnout.engine.core import Engine

        executor: Any = self.executor(plan, {"slots": ALONE})
        try:
            engine = Engine(executor, self.vocabulary(plan))
            return EngineSession(plan, engine, executor.binding, plan.dtype)
        except BaseException:
            executor.close()
            raise

    def probe(self, session: EngineSession) -> Evidence:
        """Sixteen greedy tokens whose probabilities are numbers."""
        from turnout.engine.probe import probe

        return probe(session)

    # ---- for the engine --------------------------------------------------------------------

    def executor(
        self, plan: LoadPlan, options: TorchOptions | Mapping[str, Any] | None = None, prepare: Prepare | None = None
    ) -> Executor:
        """The plan's model, loaded, behind the executor protocol; its ``binding`` says where every tensor
        came from. ``options`` may also be a mapping of ``ExecutorOptions``. ``prepare`` may replace parts of the
        model before it is used; the case's option ``quantize`` does so.

        Raises ``LoadError`` and keeps nothing when a tensor has no file, another shape, or no place in
        the model.
        """
        from turnout.backends.transformers_sessions import use_all_cores

        if not isinstance(options, TorchOptions):
            options = options_of(plan.case, options or {})
        models.environment()
        if not options.threads:
            use_all_cores()
        if options.dtype:
            plan.dtype = options.dtype
        try:
            return _loaded(plan, options, prepare)
        except (TurnoutError, MemoryError):
            gc.collect()
            raise
        except Exception as error:  # the library raises OSError, ValueError, KeyError, RuntimeError ...
            gc.collect()
            raise LoadError(models.first_line(error), code=getattr(error, "code", None) or "runtime.failed") from error

    def vocabulary(self, plan: LoadPlan) -> Vocabulary:
        """The vocabulary of the library's own tokenizer. Raises ``LoadError``."""
        from turnout.backends.transformers_sessions import auto_tokenizer
        from turnout.tasks.vocabulary import named_ends

        models.environment()
        tokenizer = auto_tokenizer(plan)
        fast = getattr(tokenizer, "backend_tokenizer", None)
        if fast is None:
            raise LoadError(
                f"`{type(tokenizer).__name__}` is computed in Python; the engine needs a `tokenizers` tokenizer",
                code="tokenizer.unsupported_kind",
                hints=["name a `tokenizer.json` with `--option tokenizer=PATH`"],
            )
        fast.no_padding()
        fast.no_truncation()
        return named_ends(fast, plan.case.artifact)


def _loaded(plan: LoadPlan, options: TorchOptions, prepare: Prepare | None) -> Any:
    scheme = plan.case.options.get("quantize")
    binding = bind(plan)
    reasons = binding.reasons(plan.case.artifact.entry, truthy(plan.case.options.get("allow_unexpected")))
    if reasons:
        raise LoadError(reasons[0].message, code=reasons[0].code)
    report = binding.report()
    model = binding.model if prepare is None else prepare(binding.model)
    del binding
    if scheme and not options.kv_dtype and static_reasons(model.config, type(model)) == []:
        options = dataclasses.replace(options, kv_dtype="bfloat16")  # half the bytes to read in every step
    executor = executor_for(model, options)
    if scheme:  # after the executor's own check, which compares the float model with the library's attention
        bits = WIDTHS[str(scheme)]
        held = quantize_linears(model, models.torch_dtype(COMPUTED), bits=bits)
        executor.capabilities = dataclasses.replace(executor.capabilities, weights_bytes=held)
        plan.dtype = f"int{bits} weights, int8 activations, {COMPUTED}"
    executor.binding = report
    return executor


def executor_for(model: Any, options: TorchOptions) -> Any:
    """``TorchExecutor`` where the class runs over ragged rows, else ``RowExecutor`` with the reason as
    its first note. Raises ``NotSupportedError`` where neither can do what is asked."""
    try:
        return TorchExecutor(model, options)
    except NotSupportedError as refused:
        reason = refused.message
    if options.kv_dtype:
        raise NotSupportedError(f"a cache of {options.kv_dtype}: {reason}", code="option.unsupported")
    from turnout.backends.torch_native_rows import RowExecutor, RowOptions

    shared = {name: getattr(options, name) for name in COUNTS}
    executor = RowExecutor(model, RowOptions(**shared))
    notes = (f"one row at a time, as {reason}", *executor.capabilities.notes)
    executor.capabilities = dataclasses.replace(executor.capabilities, notes=notes)
    return executor


def options_of(case: Case, more: Mapping[str, Any] = {}) -> TorchOptions:
    """The case's options for an executor, and ``more`` of them by the names of ``ExecutorOptions``.

    Raises ``UsageError`` for a value that counts nothing.
    """
    asked = {**case.options, **{name: value for name, value in more.items() if value is not None}}
    given: dict[str, Any] = {}
    for name in COUNTS:
        if name in asked:
            given[name] = count_of(asked[name])
            if given[name] is None:
                raise UsageError(f"`{name}={asked[name]}` is no number", hints=["a whole number from 1 on"])
    return TorchOptions(**given, kv_dtype=str(asked.get("kv_dtype") or ""))


def bind(plan: LoadPlan) -> models.Binding:
    """The model with its weights, which stay in the mapped file where they are computed as stored."""
    case, dtype = plan.case, models.torch_dtype(plan.dtype)
    models.quiet()
    if case.artifact.kind is ArtifactKind.GGUF:
        from turnout.backends.transformers_gguf import bind as bind_gguf

        return bind_gguf(case, dtype)
    config = models.read_config(case)
    cls = models.model_class(case, config)
    if cls is None:
        raise LoadError(
            f"Transformers has no class of `{config.model_type}` for `{case.task}`", code="architecture.unsupported"
        )
    binding = models.from_pretrained(case, cls, config, models.folder(case), {"": case.device}, dtype)
    if binding.unexpected:
        binding.unexpected = models.dry_bind(case, config, cls).unexpected
    return binding


def _context(case: Case) -> list[Requirement]:
    try:
        config = models.read_config(case)
    except Exception:  # the library's own requirements name what is wrong with it
        return []
    try:
        context_of(config, count_of(case.options["context"]) or 0)
    except UsageError as error:
        asked = str(case.options["context"])
        return [unmet(Kind.OPTION, "option.unsupported", error.message, observed=asked, where="context")]
    return [met("context", Kind.OPTION)]
