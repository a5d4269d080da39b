"""Loaded Transformers models bound to a task: generation, one forward pass, forecast, decision."""

from __future__ import annotations

import contextlib
import inspect
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from turnout.backends import transformers_models as models
from turnout.backends.base import BindingReport, LoadPlan
from turnout.backends.transformers_requirements import history_needed
from turnout.errors import InputError, LoadError
from turnout.package.facts import ArtifactKind
from turnout.tasks.adapter import adapter_for
from turnout.tasks.contract import ForecastOutput, TensorsOutput, TextOutput
from turnout.tasks.decoding import TextStream
from turnout.tasks.language import load_tokenizer
from turnout.types import Request, Sampling, Task

Emit = Callable[[str], None]
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
# Names of a configuration for the number of positions a model was made for.
POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length", "n_ctx")


class ModelSession:
    """Common half: holds the model until ``close``."""

    def __init__(self, plan: LoadPlan, model: Any, binding: BindingReport) -> None:
        self.plan = plan
        self.binding = binding
        self.dtype = plan.dtype
        self.model = model

    @property
    def device(self) -> Any:
        """Where the model's tensors are."""
        return self.model.device

    def close(self) -> None:
        """Frees the model; may be called twice."""
        import gc

        self.model = None
        gc.collect()

    def run(self, request: Request, emit: Emit | None = None) -> Any:
        """Output value of the task's contract."""
        raise NotImplementedError


def session_for(plan: LoadPlan, model: Any, binding: BindingReport) -> ModelSession:
    """Session of the plan's task over a loaded model. Raises ``LoadError`` for a part that does not load."""
    model.eval()
    task = plan.case.task
    if task in models.GENERATING:
        return GenerationSession(plan, model, binding)
    if task == Task.TIME_SERIES:
        return ForecastSession(plan, model, binding)
    if task == Task.DECISION:
        return DecisionSession(plan, model, binding)
    if task == Task.ASR:
        from turnout.backends.transformers_audio import SpeechSession

        return SpeechSession(plan, model, binding)
    return ForwardSession(plan, model, binding)


# ---- tokenizers ------------------------------------------------------------------------


def auto_tokenizer(plan: LoadPlan) -> Any:
    """The library's own tokenizer of the package, or of the place that the option names.

    Raises ``LoadError`` with the library's first line.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    case = plan.case
    named = case.options.get("tokenizer")
    try:
        with models.hushed():
            if named:
                path = Path(str(named))
                path = path if path.is_absolute() or path.exists() else Path(case.root) / path
                if path.is_file():
                    return PreTrainedTokenizerFast(tokenizer_file=str(path))
                return AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
            if case.artifact.kind is ArtifactKind.GGUF:
                from turnout.backends.transformers_gguf import gguf_tokenizer

                return gguf_tokenizer(case)
            return AutoTokenizer.from_pretrained(
                tokenizer_folder(plan), local_files_only=True, trust_remote_code=models.trusted(case)
            )
    except Exception as error:  # the library raises OSError, ValueError, KeyError, bare Exception
        message = f"the tokenizer does not load: {models.first_line(error)}"
        raise LoadError(message, code="tokenizer.unsupported_kind") from error


def tokenizer_folder(plan: LoadPlan) -> str:
    """Directory of the tokenizer: an adapter may bring its own, else its base's is used."""
    here = models.folder(plan.case)
    if plan.case.artifact.kind is ArtifactKind.PEFT_ADAPTER:
        own = any(
            (Path(here) / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
        )
        if not own:
            from turnout.backends.transformers_requirements import adapter_base

            return adapter_base(plan.case) or here
    return here


@contextlib.contextmanager
def adapter_options(plan: LoadPlan) -> Iterator[dict[str, Any]]:
    """Options for a task adapter; a tokenizer only the library can read is converted for it."""
    options = dict(plan.case.options)
    contract_needs = plan.case.task not in (Task.IMAGE_CLASSIFICATION,)
    try:
        if contract_needs:
            load_tokenizer(plan.case.root, plan.case.artifact, options)
        yield options
        return
    except InputError as error:
        if error.code not in ("tokenizer.unsupported_kind", "tokenizer.missing"):
            raise
    tokenizer = auto_tokenizer(plan)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise LoadError("the tokenizer keeps no character offsets", code="tokenizer.unsupported_kind")
    with tempfile.TemporaryDirectory() as place:
        backend.save(str(Path(place) / "tokenizer.json"))
        yield {**options, "tokenizer": str(Path(place) / "tokenizer.json")}


# ---- one forward pass ------------------------------------------------------------------


class ForwardSession(ModelSession):
    """Tasks of one forward pass per batch; encoding and decoding are the task adapter's."""

    def __init__(self, plan: LoadPlan, model: Any, binding: BindingReport) -> None:
        super().__init__(plan, model, binding)
        case = plan.case
        with adapter_options(plan) as options:
            self.adapter = adapter_for(case.root, case.artifact, case.task, options)
        self._accepts = set(inspect.signature(model.forward).parameters)
        text = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
        if int(getattr(text, "type_vocab_size", 0) or 0) < 2:
            self._accepts.discard("token_type_ids")  # a single type: nothing to tell apart
        # Heads that look for the last token by its id rather than by the mask.
        self._by_padding_id = "SequenceClassification" in type(model).__name__ and not hasattr(text, "type_vocab_size")
        self._pad_id = getattr(text, "pad_token_id", None)

    def run(self, request: Request, emit: Emit | None = None) -> Any:
        """Output of the task's adapter over ``infer``."""
        return self.adapter.run(request, self.infer)

    def infer(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Outputs as float32 arrays by name. Raises ``InputError`` when no input fits."""
        import numpy as np

        if not set(inputs) & self._accepts and len(inputs) == 1:
            inputs = {self.model.main_input_name: next(iter(inputs.values()))}
        if self._by_padding_id and "attention_mask" in inputs:
            # Row by row without padding: whatever id the package pads with, the last token is the last.
            rows = []
            for row, mask in enumerate(inputs["attention_mask"]):
                kept = {name: value[row : row + 1, : int(mask.sum())] for name, value in inputs.items()}
                rows.append(self._forward(kept))
            return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
        return self._forward(inputs)

    def _forward(self, inputs: dict[str, Any]) -> dict[str, Any]:
        import torch

        fitting = {name: self._tensor(value) for name, value in inputs.items() if name in self._accepts}
        if not fitting:
            raise InputError(
                f"`{type(self.model).__name__}` takes none of the inputs {', '.join(inputs)}", code="graph.io_mismatch"
            )
        if "use_cache" in self._accepts:
            fitting["use_cache"] = False
        with torch.inference_mode():
            outputs = self.model(**fitting, return_dict=True)
        return {
            name: value.float().cpu().numpy()
            for name, value in outputs.items()
            if isinstance(value, torch.Tensor) and value.is_floating_point()
        }

    def _tensor(self, value: Any) -> Any:
        import torch

        tensor = torch.from_numpy(value) if not isinstance(value, torch.Tensor) else value
        if tensor.is_floating_point():
            tensor = tensor.to(self.model.dtype)
        return tensor.to(self.device)


# ---- generation ------------------------------------------------------------------------


class GenerationSession(ModelSession):
    """Text from text: decoders, chat, and encoders with decoders."""

    def __init__(self, plan: LoadPlan, model: Any, binding: BindingReport) -> None:
        super().__init__(plan, model, binding)
        self.tokenizer = auto_tokenizer(plan)
        self.template = _template(plan) if plan.case.task == Task.CHAT else None
        self.positions = _positions(model.config, plan.case.options)

    def run(self, request: Request, emit: Emit | None = None) -> TextOutput:
        """Generated text. Raises ``InputError`` when the prompt fills the context already."""
        import torch

        ids = self.encode(request)
        room = self._room(len(ids), request.sampling.max_tokens)
        config = self.generation_config(request.sampling, room)
        stream = TextStream(self._text, request.sampling.stop, emit)
        inputs = torch.tensor([ids], dtype=torch.long, device=self.device)
        watcher = _Watcher(stream, _ids(config.eos_token_id))
        with models.hushed(), torch.inference_mode(), _seeded(request.sampling.seed):
            self.model.generate(
                input_ids=inputs,
                attention_mask=torch.ones_like(inputs),
                generation_config=config,
                streamer=watcher,
                stopping_criteria=_criteria(lambda: stream.stopped),
            )
        reason = "stop" if watcher.ended or stream.stopped else "length"
        return TextOutput(stream.finish(), reason, len(ids), len(stream.ids))

    def encode(self, request: Request) -> list[int]:
        """Token ids of the request's prompt, text or messages."""
        if self.template is not None:
            try:
                text = self.tokenizer.apply_chat_template(
                    list(request.inputs["messages"]),
                    chat_template=self.template,
                    add_generation_prompt=True,
                    tokenize=False,
                )
            except Exception as error:  # jinja's errors, and whatever a template raises
                message = f"the chat template refuses these messages: {models.first_line(error)}"
                raise InputError(message, code="template.invalid") from error
            ids = self.tokenizer(text, add_special_tokens=False).input_ids
        else:
            name = "prompt" if self.plan.case.task == Task.TEXT_GENERATION else "text"
            ids = self.tokenizer(str(request.inputs[name])).input_ids
        if not ids:
            bos = self.tokenizer.bos_token_id
            if bos is None:
                raise InputError("the prompt gives no tokens")
            ids = [bos]
        return [int(token) for token in ids]

    def generation_config(self, sampling: Sampling, room: int) -> Any:
        """The package's generation settings with the request's sampling: greedy at temperature 0."""
        import copy

        config = copy.deepcopy(self.model.generation_config)
        config.max_length, config.max_new_tokens, config.min_length = None, room, 0
        config.num_beams, config.num_return_sequences = 1, 1
        config.do_sample = sampling.temperature > 0
        config.temperature = sampling.temperature if config.do_sample else None
        config.top_p = sampling.top_p if config.do_sample else None
        config.top_k = sampling.top_k if config.do_sample else None
        for name in ("min_p", "typical_p", "early_stopping", "length_penalty", "penalty_alpha", "epsilon_cutoff"):
            setattr(config, name, None)
        config.return_dict_in_generate = False
        ends = _ids(config.eos_token_id)
        if self.plan.case.artifact.generation is not None:
            ends |= set(self.plan.case.artifact.generation.eos_ids)
        if not ends and self.tokenizer.eos_token_id is not None:
            ends = {int(self.tokenizer.eos_token_id)}
        config.eos_token_id = sorted(ends) or None
        if config.pad_token_id is None:
            config.pad_token_id = min(ends, default=0)
        return config

    def _room(self, prompt: int, wanted: int) -> int:
        if self.model.config.is_encoder_decoder or not self.positions:
            return wanted
        if prompt >= self.positions:
            raise InputError(
                f"the prompt has {prompt} tokens, the model's context is {self.positions}",
                hints=["shorten the prompt"],
            )
        return min(wanted, self.positions - prompt)

    def _text(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text


class _Watcher:
    """Streamer of ``generate``: the prompt comes first, then one id at a time."""

    def __init__(self, stream: TextStream, ends: set[int]) -> None:
        self.stream, self.ends, self.ended = stream, ends, False
        self._prompt = True

    def put(self, value: Any) -> None:
        if self._prompt:
            self._prompt = False
            return
        for token in value.reshape(-1).tolist():
            if token in self.ends:
                self.ended = True
            else:
                self.stream.feed(int(token))

    def end(self) -> None:
        """Nothing is buffered here."""


def _criteria(stopped: Callable[[], bool]) -> Any:
    import torch
    from transformers import StoppingCriteria, StoppingCriteriaList

    class Stopped(StoppingCriteria):
        def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
            return torch.full((input_ids.shape[0],), stopped(), dtype=torch.bool, device=input_ids.device)

    return StoppingCriteriaList([Stopped()])


@contextlib.contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    """Runs with a seed of its own and puts the process's random state back."""
    import torch

    if seed is None:
        yield
        return
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def _ids(value: Any) -> set[int]:
    if value is None:
        return set()
    return {int(item) for item in value} if isinstance(value, (list, tuple, set)) else {int(value)}


def _positions(config: Any, options: dict[str, Any]) -> int:
    """Tokens of context: the configuration's, or less where the option ``context`` says so; 0: no limit."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    stated = next((int(getattr(text, name)) for name in POSITIONS if getattr(text, name, None)), 0)
    asked = int(options.get("context") or 0)
    return min(asked, stated) if asked and stated else asked or stated


def _template(plan: LoadPlan) -> str:
    named = plan.case.options.get("chat_template")
    if named:
        return Path(str(named)).read_text(encoding="utf-8")
    templates = plan.case.artifact.templates
    default = next((t for t in templates if t.name == "default"), templates[0] if templates else None)
    if default is None:
        raise LoadError("the package has no chat template", code="template.missing")
    return default.text


# ---- numbers ---------------------------------------------------------------------------


class ForecastSession(ModelSession):
    """A history to the values that follow: mean and quantiles over the model's samples."""

    def run(self, request: Request, emit: Emit | None = None) -> ForecastOutput:
        """Forecast of the model's horizon; samples are drawn with ``sampling.seed`` (0 by default)."""
        import numpy as np
        import torch

        history = np.asarray(request.inputs["history"], dtype=np.float32)
        context, lag = history_needed(self.model.config)
        if history.ndim != 1 or len(history) < context + lag:
            raise InputError(
                f"a history of {history.shape[0]} values is too short: {context + lag} are needed "
                f"(context {context} and longest lag {lag})"
                if history.ndim == 1
                else f"the history has {history.ndim} axes, one is needed"
            )
        if not np.isfinite(history).all():
            raise InputError("the history holds values that are not finite")
        past = torch.from_numpy(history[-(context + lag) :])[None].to(self.model.dtype)  # [1, context + lag]
        with torch.inference_mode(), _seeded(request.sampling.seed or 0):
            samples = self._samples(past)  # [samples, horizon]
        levels = {str(level): np.quantile(samples, level, axis=0).tolist() for level in QUANTILES}
        return ForecastOutput(samples.mean(axis=0).tolist(), levels)

    def _samples(self, past: Any) -> Any:
        import torch

        if type(self.model).__name__.startswith("PatchTST"):
            made = self.model.generate(past_values=past[..., None])
            return made.sequences[0, :, :, 0].float().numpy()
        horizon = self.model.config.prediction_length
        made = self.model.generate(
            past_values=past,
            past_time_features=torch.zeros(1, past.shape[1], 0, dtype=past.dtype),
            past_observed_mask=torch.ones_like(past),
            future_time_features=torch.zeros(1, horizon, 0, dtype=past.dtype),
        )
        return made.sequences[0].float().numpy()


class DecisionSession(ModelSession):
    """States, actions and returns of a trajectory to the model's predictions."""

    def run(self, request: Request, emit: Emit | None = None) -> TensorsOutput:
        """``state_preds``, ``action_preds``, ``return_preds`` of each step, without a batch axis.

        Inputs: states [steps, state_dim], actions [steps, act_dim], returns_to_go [steps] or [steps, 1],
        timesteps int [steps]. Raises ``InputError`` naming the shape that does not fit.
        """
        import numpy as np
        import torch

        config = self.model.config
        widths = {"states": config.state_dim, "actions": config.act_dim, "returns_to_go": 1}
        steps = np.asarray(request.inputs["timesteps"]).reshape(-1)
        if len(steps) == 0 or steps.min() < 0 or steps.max() >= config.max_ep_len:
            raise InputError(f"timesteps must lie in [0, {config.max_ep_len})")
        inputs = {"timesteps": torch.from_numpy(steps.astype(np.int64))[None]}
        for name, width in widths.items():
            value = np.asarray(request.inputs[name], dtype=np.float32)
            value = value.reshape(-1, 1) if name == "returns_to_go" and value.ndim < 2 else value
            if value.shape != (len(steps), width):
                raise InputError(f"`{name}` has the shape {list(value.shape)}, expected {[len(steps), width]}")
            inputs[name] = torch.from_numpy(value)[None].to(self.model.dtype)
        inputs["rewards"] = torch.zeros_like(inputs["returns_to_go"])
        inputs["attention_mask"] = torch.ones(1, len(steps), dtype=torch.long)
        with torch.inference_mode():
            outputs = self.model(**inputs, return_dict=True)
        names = ("state_preds", "action_preds", "return_preds")
        return TensorsOutput({name: outputs[name][0].float().numpy() for name in names})


def use_all_cores() -> None:
    """Threads of the library: every core, unless the environment limits them."""
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(os.cpu_count() or 1)
