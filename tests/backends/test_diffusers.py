"""The diffusers backend: pictures of the library's own pipelines, and what must be refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.shapes import bundles, hf

from turnout.backends.base import Action, Case, Outcome, Requirement, State
from turnout.backends.diffusers import DiffusersBackend, required_components
from turnout.errors import InputError, LoadError
from turnout.package.inspect import inspect
from turnout.types import Request, Sampling, Task

BACKEND = DiffusersBackend()
# A tokenizer of the shared shapes is no CLIPTokenizer; the library says so once in a warning of its own.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


def case_of(path: Path, **options: Any) -> Case:
    package = inspect(path)
    return Case(package.root, package.artifacts[0], Task.TEXT_TO_IMAGE, options=options)


def against(case: Case) -> dict[str, Requirement]:
    return {r.id: r for r in BACKEND.requirements(case) if r.state is not State.MET}


def picture(case: Case, seed: int = 0, prompt: str = "", **options: Any) -> np.ndarray:
    session = BACKEND.load(BACKEND.plan(case))
    output = session.run(Request(Task.TEXT_TO_IMAGE, {"prompt": prompt}, Sampling(seed=seed), options))
    session.close()
    session.close()
    image: np.ndarray = output.images[0]
    return image


def as_bytes(images: Any) -> np.ndarray:
    """Floats between 0 and 1 as the nearest of 256 levels."""
    return np.clip(np.asarray(images[0]) * 255 + 0.5, 0, 255).astype(np.uint8)


@pytest.fixture(scope="module")
def ddpm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bundles.diffusion(tmp_path_factory.mktemp("ddpm"))


@pytest.fixture(scope="module")
def stable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Stable Diffusion bundle with prompt, two encoders of a few kilobytes and 16 by 16 pixels."""
    import diffusers
    import transformers

    folder = tmp_path_factory.mktemp("stable")
    torch.manual_seed(0)
    hf.save_tokenizer(folder / "words")
    unet = diffusers.UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16, attention_head_dim=4,
    )  # fmt: skip
    vae = diffusers.AutoencoderKL(
        block_out_channels=(8, 8), norm_num_groups=4, latent_channels=4, sample_size=16, layers_per_block=1,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip
    text = transformers.CLIPTextModel(
        transformers.CLIPTextConfig(
            vocab_size=100, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            max_position_embeddings=12, bos_token_id=2, eos_token_id=3, pad_token_id=0,
        )
    )  # fmt: skip
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "words", model_max_length=12)
    diffusers.StableDiffusionPipeline(
        vae=vae, text_encoder=text, tokenizer=tokenizer, unet=unet, scheduler=diffusers.DDIMScheduler(),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    ).save_pretrained(folder / "model")  # fmt: skip
    return folder / "model"


# ---- numbers -----------------------------------------------------------------------------------


def test_one_seed_gives_the_picture_of_the_library(ddpm: Path) -> None:
    import diffusers

    case = case_of(ddpm)
    assert against(case) == {}
    ours = picture(case, seed=7, steps=3)
    pipeline = diffusers.DDPMPipeline.from_pretrained(ddpm)
    theirs = pipeline(num_inference_steps=3, generator=torch.Generator().manual_seed(7), output_type="np").images
    np.testing.assert_array_equal(ours, as_bytes(theirs))
    assert ours.shape == (8, 8, 3) and (picture(case, seed=8, steps=3) != ours).any()


def test_a_prompt_and_its_options_reach_the_pipeline(stable: Path) -> None:
    import diffusers

    case = case_of(stable)
    assert against(case) == {}
    given = {"steps": 2, "guidance": 3.0, "width": 16, "height": 16, "negative_prompt": "w5"}
    ours = picture(case, seed=1, prompt="w1 w2", **given)
    pipeline = diffusers.StableDiffusionPipeline.from_pretrained(stable)
    theirs = pipeline(
        "w1 w2", num_inference_steps=2, guidance_scale=3.0, width=16, height=16, negative_prompt="w5",
        generator=torch.Generator().manual_seed(1), output_type="np",
    ).images  # fmt: skip
    np.testing.assert_array_equal(ours, as_bytes(theirs))
    assert (picture(case, seed=1, prompt="w3", **given) != ours).any()


def test_steps_are_reported_and_the_probe_passes(stable: Path) -> None:
    session = BACKEND.load(BACKEND.plan(case_of(stable)))
    said: list[str] = []
    session.run(Request(Task.TEXT_TO_IMAGE, {"prompt": "w1"}, Sampling(seed=0), {"steps": 2}), said.append)
    assert said == ["step 1\n", "step 2\n"]
    assert BACKEND.probe(session).outcome is Outcome.PASS
    assert session.binding.loaded > 50 and not session.binding.unresolved
    session.close()


def test_a_variant_is_taken_when_asked_for(tmp_path: Path) -> None:
    bundle = bundles.only_fp16(tmp_path)
    refused = against(case_of(bundle))["artifact.missing"]
    assert refused.remedies[0].action is Action.SET_OPTION and refused.remedies[0].argv == ["--option", "variant=fp16"]
    case = case_of(bundle, variant="fp16")
    assert against(case) == {}
    assert picture(case, steps=2).shape == (8, 8, 3)


def test_element_type_is_an_option(ddpm: Path) -> None:
    plan = BACKEND.plan(case_of(ddpm, dtype="bfloat16"))
    session = BACKEND.load(plan)
    assert plan.dtype == session.dtype == "bfloat16"
    assert session.pipeline.unet.dtype is torch.bfloat16


# ---- refusals ----------------------------------------------------------------------------------


def edited(source: Path, target: Path, change: Any, file: str = "model_index.json") -> Path:
    shutil.copytree(source, target)
    value = json.loads((target / file).read_text())
    change(value)
    (target / file).write_text(json.dumps(value))
    return target


def test_unknown_pipeline(ddpm: Path, tmp_path: Path) -> None:
    case = case_of(edited(ddpm, tmp_path / "m", lambda i: i.update(_class_name="NoSuchPipeline")))
    assert against(case)["architecture.unknown"].observed == "NoSuchPipeline"
    with pytest.raises(LoadError) as caught:
        BACKEND.load(BACKEND.plan(case))
    assert caught.value.code == "architecture.unknown"


@pytest.mark.parametrize("value", [None, [None, None]])
def test_a_component_that_the_pipeline_needs(value: Any, ddpm: Path, tmp_path: Path) -> None:
    case = case_of(edited(ddpm, tmp_path / "m", lambda i: i.update(unet=value)))
    assert against(case)["component.missing"].expected == "unet"


def test_required_components_are_those_that_the_library_asks_for() -> None:
    import diffusers

    assert required_components(diffusers.DDPMPipeline) == ["unet", "scheduler"]
    wanted = required_components(diffusers.StableDiffusionPipeline)
    assert wanted == ["vae", "text_encoder", "tokenizer", "unet", "scheduler"]


def test_a_class_that_the_library_does_not_have(ddpm: Path, tmp_path: Path) -> None:
    case = case_of(edited(ddpm, tmp_path / "m", lambda i: i.update(unet=["diffusers", "UNet9DModel"])))
    assert against(case)["component.wrong_class"].observed == "diffusers.UNet9DModel"


def test_a_component_that_is_code_is_never_run(tmp_path: Path) -> None:
    bundle = bundles.component_is_code(tmp_path)
    assert "code.required" in against(case_of(bundle))
    assert not list(bundle.rglob("*.ran"))


def test_a_tensor_that_no_file_holds(tmp_path: Path) -> None:
    case = case_of(bundles.unet_lacks_tensor(tmp_path))
    evidence = BACKEND.dry_load(BACKEND.plan(case))
    assert (evidence.outcome, evidence.reasons[0].code) == (Outcome.FAIL, "tensor.missing")
    assert evidence.reasons[0].expected == "conv_in.weight"
    with pytest.raises(LoadError) as caught:
        BACKEND.load(BACKEND.plan(case))
    assert caught.value.code == "tensor.missing"


def test_a_tensor_of_another_shape(ddpm: Path, tmp_path: Path) -> None:
    shutil.copytree(ddpm, tmp_path / "m")
    file = tmp_path / "m/unet/diffusion_pytorch_model.safetensors"
    stored = load_file(file)
    stored["conv_in.weight"] = torch.zeros(8, 4, 3, 3)
    save_file(stored, file, metadata={"format": "pt"})
    evidence = BACKEND.dry_load(BACKEND.plan(case_of(tmp_path / "m")))
    reason = evidence.reasons[0]
    assert (reason.code, reason.observed, reason.expected) == (
        "tensor.shape_mismatch", "[8, 4, 3, 3]", "[8, 3, 3, 3]"
    )  # fmt: skip


def test_a_configuration_that_builds_nothing(ddpm: Path, tmp_path: Path) -> None:
    bundle = edited(ddpm, tmp_path / "m", lambda c: c.update(block_out_channels=[8]), "unet/config.json")
    evidence = BACKEND.dry_load(BACKEND.plan(case_of(bundle)))
    assert (evidence.outcome, evidence.reasons[0].code) == (Outcome.FAIL, "config.invalid")


@pytest.mark.parametrize("option", [{"variant": "bf16"}, {"pooling": "mean"}, {"dtype": "int3"}])
def test_options_that_mean_nothing_here(option: dict[str, Any], ddpm: Path) -> None:
    assert "option.unsupported" in against(case_of(ddpm, **option))


def test_archives_and_single_files_name_the_way_out(ddpm: Path, tmp_path: Path) -> None:
    archive = against(case_of(bundles.dduf(tmp_path / "d")))["config.unsupported_variant"]
    assert archive.observed == "DDUF" and (archive.remedies[0].argv or [""])[0] == "unzip"
    names = ["model.diffusion_model.input_blocks.0.0.weight", "first_stage_model.decoder.conv_in.weight"]
    save_file({name: torch.zeros(2) for name in names}, tmp_path / "sd.safetensors")
    single = against(case_of(tmp_path / "sd.safetensors"))["config.unsupported_variant"]
    assert single.remedies[0].action is Action.CONVERT


def test_request_options_of_another_pipeline_are_refused(ddpm: Path) -> None:
    with pytest.raises(InputError) as caught:
        picture(case_of(ddpm), guidance=3.0)
    assert "steps" in caught.value.hints[0] and "guidance" not in caught.value.hints[0]


def test_the_librarys_own_refusal_becomes_an_input_error(stable: Path) -> None:
    with pytest.raises(InputError) as caught:
        picture(case_of(stable), prompt="w1", width=15, height=16, steps=1)
    assert caught.value.code == "runtime.failed" and "divisible by 8" in caught.value.message


def test_a_closed_session_says_so(ddpm: Path) -> None:
    session = BACKEND.load(BACKEND.plan(case_of(ddpm)))
    session.close()
    with pytest.raises(LoadError):
        session.run(Request(Task.TEXT_TO_IMAGE, {"prompt": ""}))


# ---- bundles as they are found in the world ----------------------------------------------------


def dry(path: Path, **options: Any) -> Any:
    case = case_of(path, **options)
    assert against(case) == {}
    return BACKEND.dry_load(BACKEND.plan(case))


def renamed(source: Path, target: Path, file: str, change: Any) -> Path:
    """A copy whose tensors of ``file`` have other names, or are left out where ``change`` gives None."""
    shutil.copytree(source, target)
    stored = {change(name): tensor for name, tensor in load_file(target / file).items()}
    stored.pop(None, None)
    save_file(stored, target / file, metadata={"format": "pt"})
    return target


def test_a_safety_checker_is_a_class_of_the_library(stable: Path, tmp_path: Path) -> None:
    """``stable_diffusion`` is a room of diffusers, not a Python file of the package."""
    import transformers
    from diffusers.pipelines.stable_diffusion import StableDiffusionSafetyChecker

    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.CLIPConfig(
        projection_dim=16,
        text_config={**small, "vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2},
        vision_config={**small, "image_size": 32, "patch_size": 16, "projection_dim": 16},
    )
    checker = ["stable_diffusion", "StableDiffusionSafetyChecker"]
    extractor = ["transformers", "CLIPFeatureExtractor"]  # a name that Transformers itself has dropped
    bundle = edited(stable, tmp_path / "m", lambda i: i.update(safety_checker=checker, feature_extractor=extractor))
    torch.manual_seed(0)
    StableDiffusionSafetyChecker(config).save_pretrained(bundle / "safety_checker")
    transformers.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=32).save_pretrained(
        bundle / "feature_extractor"
    )
    evidence = dry(bundle)
    assert evidence.outcome is Outcome.PASS, evidence.reasons
    session = BACKEND.load(BACKEND.plan(case_of(bundle)))
    assert session.pipeline.safety_checker is not None
    session.close()
    lacking = renamed(bundle, tmp_path / "n", "safety_checker/model.safetensors",
                      lambda n: None if "visual_projection" in n else n)  # fmt: skip
    assert [r.expected for r in dry(lacking).reasons] == ["visual_projection.weight"]


def test_names_of_earlier_versions_bind(stable: Path, tmp_path: Path) -> None:
    """Stable Diffusion 1 was saved with other names in its autoencoder and its text encoder."""
    words = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}

    def older(name: str) -> str:
        for new, old in words.items():
            name = name.replace(new, old)
        return name

    bundle = renamed(stable, tmp_path / "a", "vae/diffusion_pytorch_model.safetensors", older)
    bundle = renamed(bundle, tmp_path / "b", "text_encoder/model.safetensors", lambda n: f"text_model.{n}")
    assert dry(bundle).outcome is Outcome.PASS
    given = {"steps": 1, "width": 16, "height": 16}
    same = picture(case_of(stable), prompt="w1", **given)
    np.testing.assert_array_equal(picture(case_of(bundle), prompt="w1", **given), same)


def test_a_text_encoder_lacks_a_tensor(stable: Path, tmp_path: Path) -> None:
    bundle = renamed(stable, tmp_path / "m", "text_encoder/model.safetensors",
                     lambda n: None if n.endswith("final_layer_norm.weight") else n)  # fmt: skip
    assert [(r.code, r.where) for r in dry(bundle).reasons] == [("tensor.missing", "text_encoder")]


def test_a_variant_beside_the_plain_files_is_really_taken(ddpm: Path, tmp_path: Path) -> None:
    shutil.copytree(ddpm, tmp_path / "m")
    file = tmp_path / "m/unet/diffusion_pytorch_model.safetensors"
    other = {n: torch.zeros_like(t) if n == "conv_in.weight" else t.half() for n, t in load_file(file).items()}
    save_file(other, file.with_name("diffusion_pytorch_model.fp16.safetensors"), metadata={"format": "pt"})
    plain, half = picture(case_of(tmp_path / "m"), steps=2), picture(case_of(tmp_path / "m", variant="fp16"), steps=2)
    assert (plain != half).any()
    other.pop("conv_in.weight")
    save_file(other, file.with_name("diffusion_pytorch_model.fp16.safetensors"), metadata={"format": "pt"})
    assert dry(tmp_path / "m").outcome is Outcome.PASS
    assert dry(tmp_path / "m", variant="fp16").reasons[0].code == "tensor.missing"


@pytest.mark.parametrize(
    ("role", "named"), [("unet", ["transformers", "CLIPTextModel"]), ("scheduler", ["diffusers", "AutoencoderKL"])]
)
def test_a_component_of_another_kind(role: str, named: list[str], stable: Path, tmp_path: Path) -> None:
    found = against(case_of(edited(stable, tmp_path / "m", lambda i: i.update({role: named}))))["component.wrong_class"]
    assert (found.state, found.observed) == (State.UNMET, ".".join(named))


def test_another_model_of_the_same_kind_is_for_a_run_to_tell(stable: Path, tmp_path: Path) -> None:
    bundle = edited(stable, tmp_path / "m", lambda i: i.update(vae=["diffusers", "AutoencoderTiny"]))
    found = against(case_of(bundle))["component.wrong_class"]
    assert (found.state, found.expected) == (State.UNKNOWN, "AutoencoderKL")


def test_a_library_that_is_neither(stable: Path, tmp_path: Path) -> None:
    bundle = edited(stable, tmp_path / "m", lambda i: i.update(unet=["os", "system"]))
    assert against(case_of(bundle))["code.required"].observed == "os.system"
    with pytest.raises(LoadError) as caught:
        BACKEND.load(BACKEND.plan(case_of(bundle)))
    assert caught.value.code == "code.required"


def test_a_tokenizer_without_its_files_is_found_before_the_load(stable: Path, tmp_path: Path) -> None:
    shutil.copytree(stable, tmp_path / "m")
    (tmp_path / "m/tokenizer/tokenizer.json").unlink()
    evidence = dry(tmp_path / "m")
    assert "`tokenizer` cannot be built" in evidence.reasons[0].message


def test_a_quantized_component_is_not_called_supported(ddpm: Path, tmp_path: Path) -> None:
    bundle = edited(
        ddpm,
        tmp_path / "m",
        lambda c: c.update(quantization_config={"quant_method": "bitsandbytes"}),
        "unet/config.json",
    )
    assert against(case_of(bundle))["quantization.unsupported"].observed == "bitsandbytes"


@pytest.mark.parametrize(
    ("name", "code"),
    [("../outside.safetensors", "artifact.path_escape"), ("gone.safetensors", "artifact.shard_missing")],
)
def test_shards_that_an_index_names(name: str, code: str, ddpm: Path, tmp_path: Path) -> None:
    shutil.copytree(ddpm, tmp_path / "m")
    file = tmp_path / "m/unet/diffusion_pytorch_model.safetensors"
    stored = load_file(file)
    index = {"metadata": {}, "weight_map": dict.fromkeys(stored, name)}
    (tmp_path / "m/unet/diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copy(file, tmp_path / "outside.safetensors")
    assert against(case_of(tmp_path / "m"))[code].observed == name


# ---- what a pipeline takes and gives -----------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "task", "serves"),
    [
        ("StableDiffusionPipeline", Task.TEXT_TO_IMAGE, True),
        ("StableDiffusionXLPipeline", Task.TEXT_TO_IMAGE, True),
        ("FluxPipeline", Task.TEXT_TO_IMAGE, True),
        ("DiTPipeline", Task.TEXT_TO_IMAGE, True),
        ("StableDiffusionImg2ImgPipeline", Task.IMAGE_TO_IMAGE, True),
        ("StableDiffusionImg2ImgPipeline", Task.TEXT_TO_IMAGE, False),
        ("StableDiffusionInpaintPipeline", Task.IMAGE_TO_IMAGE, False),
        ("StableDiffusionControlNetPipeline", Task.TEXT_TO_IMAGE, False),
        ("AudioLDM2Pipeline", Task.TEXT_TO_IMAGE, False),
        ("WanPipeline", Task.TEXT_TO_IMAGE, False),
        ("KandinskyPriorPipeline", Task.TEXT_TO_IMAGE, False),
    ],
)
def test_pipelines_are_asked_what_they_take_and_give(name: str, task: str, serves: bool) -> None:
    import diffusers

    from turnout.backends.diffusers_components import misfit

    assert (misfit(getattr(diffusers, name), task) == "") is serves


def test_a_pipeline_without_condition_takes_no_prompt(ddpm: Path) -> None:
    with pytest.raises(InputError, match="without a prompt"):
        picture(case_of(ddpm), prompt="a cat")


def test_a_given_picture_is_changed(stable: Path, tmp_path: Path) -> None:
    import diffusers
    from PIL import Image

    bundle = edited(stable, tmp_path / "m", lambda i: i.update(_class_name="StableDiffusionImg2ImgPipeline"))
    package = inspect(bundle)
    case = Case(package.root, package.artifacts[0], Task.IMAGE_TO_IMAGE)
    assert against(case) == {}
    session = BACKEND.load(BACKEND.plan(case))
    assert BACKEND.probe(session).outcome is Outcome.PASS
    given = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    options = {"steps": "4", "strength": "0.5"}  # as text, as they come from a command line
    ours = session.run(Request(Task.IMAGE_TO_IMAGE, {"prompt": "w1", "image": given}, Sampling(seed=3), options))
    session.close()
    pipeline = diffusers.StableDiffusionImg2ImgPipeline.from_pretrained(bundle)
    theirs = pipeline("w1", Image.fromarray(given), strength=0.5, num_inference_steps=4, output_type="np",
                      generator=torch.Generator().manual_seed(3)).images  # fmt: skip
    np.testing.assert_array_equal(ours.images[0], as_bytes(theirs))


def test_a_pipeline_of_classes_takes_a_class_as_prompt(tmp_path: Path) -> None:
    import diffusers

    torch.manual_seed(0)
    transformer = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=1, sample_size=8,
        patch_size=2, num_embeds_ada_norm=1000, activation_fn="gelu-approximate", norm_elementwise_affine=False,
    )  # fmt: skip
    vae = diffusers.AutoencoderKL(
        block_out_channels=(8,), norm_num_groups=4, latent_channels=4, sample_size=8, layers_per_block=1,
        down_block_types=("DownEncoderBlock2D",), up_block_types=("UpDecoderBlock2D",),
    )  # fmt: skip
    pipeline = diffusers.DiTPipeline(transformer, vae, diffusers.DDIMScheduler())
    pipeline.save_pretrained(tmp_path / "m")
    index = tmp_path / "m/model_index.json"  # where DiT keeps its names; saving leaves them out
    index.write_text(json.dumps(json.loads(index.read_text()) | {"id2label": {"3": "heron, bird", "4": "owl"}}))
    case = case_of(tmp_path / "m")
    assert against(case) == {}
    named, numbered = (picture(case, prompt=prompt, steps=2) for prompt in ("heron", "3"))
    np.testing.assert_array_equal(named, numbered)
    pipeline = diffusers.DiTPipeline.from_pretrained(tmp_path / "m")
    theirs = pipeline([3], num_inference_steps=2, generator=torch.Generator().manual_seed(0), output_type="np").images
    np.testing.assert_array_equal(named, as_bytes(theirs))
    for strange in ("dragon", "1000"):
        with pytest.raises(InputError, match="no class"):
            picture(case, prompt=strange, steps=2)
