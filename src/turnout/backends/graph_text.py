"""Text from decoder graphs, with or without past and present states; knows no model library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from turnout.package.facts import Artifact, GraphPort
from turnout.tasks.adapter import Infer
from turnout.tasks.contract import TextOutput
from turnout.tasks.decoding import TextStream, generator, sample
from turnout.tasks.numeric import numpy_dtype
from turnout.tasks.prompting import Prompter
from turnout.types import Request


def default_input(name: str, feeds: dict[str, Any]) -> Any | None:
    """An input that follows from ``input_ids`` [batch, tokens]: mask, segment or position ids."""
    import numpy as np

    ids = feeds.get("input_ids")
    if ids is None:
        return None
    if name == "attention_mask":
        return np.ones_like(ids)
    if name == "token_type_ids":
        return np.zeros_like(ids)
    if name == "position_ids":  # as Transformers counts them: the first token that is no padding is 0
        mask = np.asarray(feeds.get("attention_mask", np.ones_like(ids)))
        return np.maximum(mask.cumsum(axis=1) - 1, 0) if mask.shape == np.shape(ids) else None
    return None


# What this module and the text adapters can give a graph, besides past states.
TEXT_INPUTS = frozenset({"input_ids", "attention_mask", "token_type_ids", "position_ids", "use_cache_branch"})
DECODER_INPUTS = frozenset({"input_ids", "encoder_hidden_states", "encoder_attention_mask", "use_cache_branch"})


def strange_inputs(ports: Sequence[GraphPort], known: frozenset[str] = TEXT_INPUTS) -> list[str]:
    """Inputs of a text graph that nobody here can give."""
    return [p.name for p in ports if p.name not in known and not p.name.startswith("past")]


def lost_states(inputs: Sequence[GraphPort], outputs: Sequence[GraphPort]) -> list[str]:
    """Past inputs of a decoder that none of its outputs carries on."""
    names = {p.name for p in outputs}
    return [p.name for p in inputs if p.name.startswith("past") and present_of(p.name) not in names]


def no_past(name: str, shape: Sequence[Any] | None, dtype: str) -> Any | None:
    """Value of an input that says "nothing came before": an empty state, or the branch without a cache."""
    import numpy as np

    if name == "use_cache_branch":
        return np.array([False])
    return empty_state(GraphPort(name, dtype, list(shape or []))) if name.startswith("past") else None


class GraphGenerator:
    """Greedy or sampled decoding over one graph, one request at a time.

    A graph with ``past_key_values.*`` inputs and ``present.*`` outputs is fed one token after the
    prompt; a graph without is fed the whole sequence for every token.
    """

    def __init__(self, root: str, artifact: Artifact, options: dict[str, Any]) -> None:
        self.prompter = Prompter(root, artifact, options)
        graph = artifact.graph
        ports = graph.inputs if graph else []
        self.past = {p.name: p for p in ports if p.name.startswith("past")}
        self.names = {p.name for p in ports}
        self.recipe = ""

    def generate(self, request: Request, infer: Infer, emit: Callable[[str], None] | None = None) -> TextOutput:
        """Text for a request of text generation or chat. Raises ``InputError``."""
        import numpy as np

        prompt = self.prompter.ids(request)
        rng = generator(request.sampling.seed)
        stream = TextStream(self.prompter.text, request.sampling.stop, emit)
        states = {name: empty_state(port) for name, port in self.past.items()}
        fed, reason = list(prompt), "length"
        everything = list(prompt)
        for _ in range(self.prompter.room(len(prompt), request.sampling.max_tokens)):
            outputs = infer(self._feeds(fed, len(everything), states))
            token = sample(np.asarray(outputs["logits"], np.float32)[0, -1], request.sampling, rng)
            if token in self.prompter.eos_ids:
                reason = "stop"
                break
            everything.append(token)
            if not stream.feed(token):
                reason = "stop"
                break
            if states:
                states = {name: outputs[present_of(name)] for name in states}
                fed = [token]
            else:
                fed = everything
        return TextOutput(stream.finish(), reason, len(prompt), len(everything) - len(prompt))

    def _feeds(self, fed: list[int], total: int, states: dict[str, Any]) -> dict[str, Any]:
        import numpy as np

        feeds: dict[str, Any] = {
            "input_ids": np.array([fed], np.int64),
            "attention_mask": np.ones((1, total), np.int64),
            **states,
        }
        if "position_ids" in self.names:
            feeds["position_ids"] = np.arange(total - len(fed), total, dtype=np.int64)[None]
        if "use_cache_branch" in self.names:
            feeds["use_cache_branch"] = np.array([total != len(fed)])
        return feeds


def present_of(past: str) -> str:
    """Output that carries on a past input: optimum's names."""
    return past.replace("past_key_values", "present").replace("past_", "present_")


def empty_state(port: GraphPort) -> Any:
    """A state of no tokens: batch 1, unknown axes 0, known axes as they are."""
    import numpy as np

    shape = list(port.shape or [])
    dims = [1 if axis == 0 else dim if isinstance(dim, int) and dim > 0 else 0 for axis, dim in enumerate(shape)]
    return np.zeros(dims, numpy_dtype(port.dtype) or "float32")
