"""Decoders through Transformers' OpenVINO exporter, for families that are not written by hand here.

The class is traced with a cache of two sequences, so that batch, past and new tokens stay dynamic. It
takes seconds per layer and the memory of the float32 model; the result is cached by the caller.
"""

from __future__ import annotations

import warnings
from typing import Any

from turnout.backends.base import Case
from turnout.backends.openvino_executor_weights import compress
from turnout.backends.openvino_reading import first_line
from turnout.errors import LoadError


def exported_graph(case: Case, quantize: str) -> tuple[Any, Any]:
    """A stateful ``openvino.Model`` of the case's Transformers class, and the class's object whose weights
    it reads. Raises ``LoadError``."""
    import torch
    import transformers
    from transformers.exporters.exporter_openvino import OpenVINOConfig, OpenVINOExporter

    entry = case.file(case.artifact.entry)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the tracer speaks of every branch
            model = transformers.AutoModelForCausalLM.from_pretrained(
                entry, dtype=torch.float32, local_files_only=True, trust_remote_code=False
            ).eval()
            program = OpenVINOExporter().export(model, sample_of(model), config=OpenVINOConfig(dynamic=True)).program
    except Exception as error:  # whatever the tracer trips over
        raise LoadError(
            f"Transformers' exporter cannot turn `{case.artifact.entry or case.root}` into an OpenVINO graph: "
            f"{first_line(error)}",
            code="architecture.unsupported",
        ) from error
    if quantize:
        compress(program, quantize)
    return program, model


def sample_of(model: Any) -> dict[str, Any]:
    """Inputs of a step of three tokens after seven, for two sequences."""
    import torch

    with torch.inference_mode(False), torch.no_grad():
        prompt = torch.ones(2, 7, dtype=torch.long)
        past = model(prompt, use_cache=True).past_key_values
    return {
        "input_ids": torch.ones(2, 3, dtype=torch.long),
        "attention_mask": torch.ones(2, 10, dtype=torch.long),
        "position_ids": torch.arange(7, 10)[None].repeat(2, 1),
        "cache": past,
        "use_cache": True,
    }
