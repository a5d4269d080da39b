"""The CTranslate2 backend: greedy tokens of Transformers, and what must be refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.shapes import classical, hf

from turnout.backends.base import Action, Case, Outcome, Requirement, State
from turnout.backends.ctranslate2 import CTranslate2Backend, newest_binary_version
from turnout.errors import InputError, LoadError
from turnout.package.inspect import inspect
from turnout.types import Request, Sampling, Task

BACKEND = CTranslate2Backend()
PROMPT = "w1 w2 w3"


def case_of(path: Path, task: str = Task.TEXT_GENERATION, **options: Any) -> Case:
    package = inspect(path)
    return Case(package.root, package.artifacts[0], task, options=options)


def against(case: Case) -> dict[str, Requirement]:
    return {r.id: r for r in BACKEND.requirements(case) if r.state is not State.MET}


def text(case: Case, inputs: dict[str, Any], **sampling: Any) -> Any:
    session = BACKEND.load(BACKEND.plan(case))
    output = session.run(Request(case.task, inputs, Sampling(**sampling)))
    session.close()
    session.close()
    return output


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return classical.ct2_decoder(tmp_path_factory.mktemp("decoder"))


@pytest.fixture(scope="module")
def translator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny T5, converted by CTranslate2 from Transformers."""
    import ctranslate2
    import transformers

    folder = tmp_path_factory.mktemp("translator")
    config = transformers.T5Config(
        vocab_size=100, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_decoder_layers=1, num_heads=4,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=3, tie_word_embeddings=False,
    )  # fmt: skip
    hf.build(folder / "whole", "T5ForConditionalGeneration", config)
    copied = ["tokenizer.json", "tokenizer_config.json", "generation_config.json"]
    ctranslate2.converters.TransformersConverter(str(folder / "whole"), copy_files=copied).convert(
        str(folder / "model")
    )
    return folder / "model"


def generated(folder: Path, cls: str, prompt: str, count: int, **more: Any) -> str:
    """Greedy text of Transformers' own generate."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = getattr(transformers, cls).from_pretrained(folder).eval()
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    new = model.generate(input_ids=ids, max_new_tokens=count, do_sample=False, pad_token_id=0, **more)[0]
    start = 0 if model.config.is_encoder_decoder else ids.shape[1]
    decoded: str = tokenizer.decode(new[start:], skip_special_tokens=True)
    return decoded


# ---- tokens ------------------------------------------------------------------------------------


def test_greedy_tokens_are_those_of_transformers(decoder: Path) -> None:
    case = case_of(decoder)
    assert against(case) == {}
    output = text(case, {"prompt": PROMPT}, max_tokens=12)
    assert output.text == generated(decoder.parent / "whole", "LlamaForCausalLM", PROMPT, 12) != ""
    assert (output.prompt_tokens, output.completion_tokens, output.finish_reason) == (3, 12, "length")


def test_a_conversation_goes_through_the_template(decoder: Path) -> None:
    case = case_of(decoder, Task.CHAT)
    assert against(case) == {} and case.artifact.task_ids()[0] == Task.CHAT
    output = text(case, {"messages": [{"role": "user", "content": PROMPT}]}, max_tokens=8)
    assert output.text == generated(decoder.parent / "whole", "LlamaForCausalLM", f"user {PROMPT} assistant", 8)


def test_translations_are_those_of_transformers(translator: Path) -> None:
    case = case_of(translator, Task.TRANSLATION)
    assert against(case) == {}
    output = text(case, {"text": PROMPT}, max_tokens=8)
    assert output.text == generated(translator.parent / "whole", "T5ForConditionalGeneration", PROMPT, 8) != ""


def test_stop_texts_streaming_and_the_context(decoder: Path) -> None:
    case = case_of(decoder)
    whole = text(case, {"prompt": PROMPT}, max_tokens=12).text.split()
    session = BACKEND.load(BACKEND.plan(case))
    said: list[str] = []
    output = session.run(Request(case.task, {"prompt": PROMPT}, Sampling(max_tokens=12, stop=(whole[2],))), said.append)
    assert output.text == "".join(said) and output.finish_reason == "stop"
    assert output.text.split() == whole[: whole.index(whole[2])]
    # The format does not tell the context; the option does.
    bounded = case_of(decoder, context="64")
    assert text(bounded, {"prompt": "w1 " * 60}, max_tokens=20).completion_tokens == 4
    with pytest.raises(InputError):
        text(bounded, {"prompt": "w1 " * 64})


def test_one_seed_draws_one_text(decoder: Path) -> None:
    session = BACKEND.load(BACKEND.plan(case_of(decoder)))

    def draw(seed: int) -> str:
        sampling = Sampling(max_tokens=12, temperature=1.5, seed=seed)
        drawn: str = session.run(Request(Task.TEXT_GENERATION, {"prompt": PROMPT}, sampling)).text
        return drawn

    assert draw(1) == draw(1)
    assert len({draw(seed) for seed in range(4)}) > 1


@pytest.mark.parametrize("task", [Task.TEXT_GENERATION, Task.CHAT])
def test_the_probe_passes(task: str, decoder: Path) -> None:
    plan = BACKEND.plan(case_of(decoder, task))
    assert BACKEND.dry_load(plan).outcome is Outcome.PASS
    session = BACKEND.load(plan)
    evidence = BACKEND.probe(session)
    assert evidence.outcome is Outcome.PASS and evidence.measurements["tokens_per_s"] > 0
    session.close()
    with pytest.raises(LoadError):
        session.run(Request(task, {"prompt": PROMPT}))


def test_the_element_type_is_an_option_and_reported(decoder: Path) -> None:
    plan = BACKEND.plan(case_of(decoder, dtype="int8_float32"))
    session = BACKEND.load(plan)
    assert plan.dtype == session.dtype == "int8_float32"
    session.close()


# ---- refusals ----------------------------------------------------------------------------------


def test_a_file_from_the_future(tmp_path: Path) -> None:
    newest = newest_binary_version()
    found = against(case_of(classical.ct2_newer(tmp_path)))["dependency.version"]
    assert (found.observed, found.expected) == ("v99", f"at most v{newest}")
    assert found.remedies[0].action is Action.CONVERT


@pytest.mark.parametrize("task", [Task.TRANSLATION, Task.TEXT2TEXT])
def test_a_decoder_does_not_translate(task: str, decoder: Path) -> None:
    found = against(case_of(decoder, task))["task.not_offered"]
    assert (found.observed, found.expected) == ("TransformerDecoderSpec", "TransformerSpec")


def test_an_encoder_with_decoder_does_not_chat(translator: Path) -> None:
    assert "task.not_offered" in against(case_of(translator, Task.TEXT_GENERATION))


def test_an_element_type_that_the_processor_lacks(decoder: Path) -> None:
    found = against(case_of(decoder, dtype="bfloat99"))["option.unsupported"]
    assert found.observed == "bfloat99" and "float32" in found.expected


def test_a_file_cut_short_is_refused_in_the_librarys_words(decoder: Path, tmp_path: Path) -> None:
    shutil.copytree(decoder, tmp_path / "m")
    data = (decoder / "model.bin").read_bytes()
    (tmp_path / "m/model.bin").write_bytes(data[: len(data) // 2])
    evidence = BACKEND.dry_load(BACKEND.plan(case_of(tmp_path / "m")))
    assert evidence.outcome is Outcome.FAIL and "invalid payload size" in evidence.reasons[0].message
    assert "artifact.truncated" in [f.code for f in case_of(tmp_path / "m").artifact.findings]


def test_a_vocabulary_of_another_size_is_refused(decoder: Path, tmp_path: Path) -> None:
    shutil.copytree(decoder, tmp_path / "m")
    words = json.loads((decoder / "vocabulary.json").read_text())
    (tmp_path / "m/vocabulary.json").write_text(json.dumps(words[:-3]))
    (finding,) = case_of(tmp_path / "m").artifact.findings  # the library itself loads it
    assert (finding.code, finding.observed, finding.expected) == ("component.invalid", "97 words", "100 words")


# ---- streaming, ends, vectors ------------------------------------------------------------------


def test_pieces_come_while_the_model_runs(decoder: Path) -> None:
    """A stop text ends the computation, it does not only cut the answer."""
    session = BACKEND.load(BACKEND.plan(case_of(decoder)))
    said: list[str] = []
    whole = session.run(Request(Task.TEXT_GENERATION, {"prompt": PROMPT}, Sampling(max_tokens=12)), said.append)
    assert len(said) > 2 and "".join(said) == whole.text
    stop = whole.text.split()[2]
    cut = session.run(Request(Task.TEXT_GENERATION, {"prompt": PROMPT}, Sampling(max_tokens=12, stop=(stop,))))
    assert cut.completion_tokens < whole.completion_tokens == 12
    session.close()


def test_every_end_token_of_the_package_ends_the_text(decoder: Path, tmp_path: Path) -> None:
    whole = text(case_of(decoder), {"prompt": PROMPT}, max_tokens=8)
    assert whole.finish_reason == "length"
    third = hf.VOCABULARY.index(whole.text.split()[2])
    shutil.copytree(decoder, tmp_path / "m")
    (tmp_path / "m/generation_config.json").write_text(json.dumps({"eos_token_id": [3, third]}))
    output = text(case_of(tmp_path / "m"), {"prompt": PROMPT}, max_tokens=8)
    assert output.finish_reason == "stop" and output.text.split() == whole.text.split()[: output.completion_tokens]
    assert output.completion_tokens <= 2


def test_a_long_text_is_not_cut_in_silence(translator: Path) -> None:
    """The library's own default reads 1024 tokens of a text and drops the rest."""
    case = case_of(translator, Task.TRANSLATION)
    long = " ".join(f"w{i * 7 % 90}" for i in range(1100))
    ours = text(case, {"text": long}, max_tokens=8)
    assert ours.prompt_tokens == 1100
    assert ours.text == generated(translator.parent / "whole", "T5ForConditionalGeneration", long, 8)


def test_a_start_token_that_depends_on_the_text(translator: Path, tmp_path: Path) -> None:
    shutil.copytree(translator, tmp_path / "m")
    settings = json.loads((tmp_path / "m/config.json").read_text())
    (tmp_path / "m/config.json").write_text(json.dumps(settings | {"decoder_start_token": None}))
    case = case_of(tmp_path / "m", Task.TRANSLATION)
    assert against(case)["recipe.missing"].observed == "no decoder_start_token"
    with pytest.raises(LoadError) as caught:
        BACKEND.load(BACKEND.plan(case))
    assert caught.value.code == "recipe.missing"


def test_the_tokenizer_of_another_model(decoder: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({f"v{i}": i for i in range(50)}, unk_token="v0")).save(str(tmp_path / "tokenizer.json"))
    found = against(case_of(decoder, tokenizer=str(tmp_path / "tokenizer.json")))["component.invalid"]
    assert "50 of the tokenizer's 50 tokens" in (found.reason.message if found.reason else "")


def test_options_of_other_backends(decoder: Path) -> None:
    assert against(case_of(decoder, variant="fp16"))["option.unsupported"].observed == "variant"


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT, converted by CTranslate2 from Transformers."""
    import ctranslate2

    folder = tmp_path_factory.mktemp("encoder")
    hf.encoder(folder / "whole", position_embedding_type="absolute")  # the converter still asks for it
    copied = ["tokenizer.json", "tokenizer_config.json"]
    ctranslate2.converters.TransformersConverter(str(folder / "whole"), copy_files=copied).convert(
        str(folder / "model")
    )
    return folder / "model"


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_vectors_are_those_of_transformers(pooling: str, encoder: Path) -> None:
    import numpy as np
    import torch
    from transformers import AutoModel, AutoTokenizer

    case = case_of(encoder, Task.EMBEDDINGS, pooling=pooling)
    assert against(case) == {} and not case.artifact.findings
    session = BACKEND.load(BACKEND.plan(case))
    assert BACKEND.probe(session).outcome is Outcome.PASS
    texts = ["w1 w2 w3 w4 w5", "w9", "w7 w7"]
    output = session.run(Request(Task.EMBEDDINGS, {"texts": texts}))
    session.close()
    assert output.recipe == session.plan.recipe and not output.normalized
    model, tokenizer = (
        AutoModel.from_pretrained(encoder.parent / "whole").eval(),
        AutoTokenizer.from_pretrained(encoder),
    )
    for one, vector in zip(texts, output.vectors, strict=True):
        with torch.inference_mode():
            hidden = model(**tokenizer(one, return_tensors="pt")).last_hidden_state[0]
        expected = hidden[0] if pooling == "cls" else hidden.mean(0)
        np.testing.assert_allclose(vector, expected.numpy(), atol=1e-4)


def test_an_encoder_does_not_generate(encoder: Path) -> None:
    assert against(case_of(encoder))["task.not_offered"].observed == "TransformerEncoderSpec"
