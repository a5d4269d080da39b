"""Products with small weights, kernel beside kernel: ``python tests/bench_linear.py [--threads 2] [--rounds 9]``.

Every round runs each kernel once over copies of its weight that together exceed a core's caches; kernels take
turns, so that another process's noise falls on all. Printed are the median and the least time, the weight's bytes
read per second and the operations per second at the least time. The numbers of docs/benchmarks/quantization.md
and the choices in turnout/quantize come from here.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

from turnout.quantize import int8, lowbit

SHAPES = ((1024, 1024), (3072, 1024), (1024, 3072), (151936, 1024))  # out, in
ROWS = (1, 4, 16, 128, 512)
COLD = 48 << 20  # weights of one kernel and round
Kernel = Callable[[torch.Tensor], Any]


def kernels(weight: torch.Tensor) -> dict[str, tuple[float, Kernel]]:
    """Name to bytes and product of one weight float32 [out, in] with float32 rows."""
    out, inputs = weight.shape
    half = weight.bfloat16()
    codes, steps = int8.quantized(weight)
    packed = torch.ops.onednn.qlinear_prepack(codes, None)
    layer = int8.linear_class()(packed, steps, None, int8.Activations(), torch.float32)
    found: dict[str, tuple[float, Kernel]] = {
        "bf16": (2, lambda x: torch.nn.functional.linear(x.bfloat16(), half)),
        "q8 Int8Linear": (1, layer),
        "q8 _int_mm": (1, lambda x: torch._int_mm(x.to(torch.int8), codes.t()).float().mul_(steps)),
        "q8 weight only": (1, lambda x: torch.ops.aten._weight_int8pack_mm(x.bfloat16(), codes, steps.bfloat16())),
        "q8 linear_dynamic": (1, _dynamic(codes, steps)),
    }
    if out < 100_000:
        found["f32"] = (4, lambda x: torch.nn.functional.linear(x, weight))
        found["q4 weight only"] = (0.625, _int4(weight))
        for bits in (3, 4, 5, 6):
            folded = lowbit.fold(weight, bits)
            made = lowbit.linear_class()(folded, None, int8.Activations(), torch.float32)
            found[f"q{bits} LowbitLinear"] = (folded.bytes / weight.numel(), made)
    return {name: (size * out * inputs, kernel) for name, (size, kernel) in found.items()}


def _dynamic(codes: torch.Tensor, steps: torch.Tensor) -> Kernel:
    zeros = torch.zeros(len(steps), dtype=torch.long)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # quantized tensors are deprecated
        whole = torch._make_per_channel_quantized_tensor(codes, steps.double(), zeros, 0)
    packed = torch.ops.quantized.linear_prepack(whole, None)
    return lambda x: torch.ops.quantized.linear_dynamic(x, packed, False)


def _int4(weight: torch.Tensor) -> Kernel:
    groups = weight.view(weight.shape[0], -1, 32)
    scale = (groups.abs().amax(2) / 7).clamp_min(1e-9)
    codes = ((groups / scale.unsqueeze(2)).round().clamp(-8, 7) + 8).int().view(weight.shape)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    both = torch.stack([scale, torch.zeros_like(scale)], 2).transpose(0, 1).contiguous().bfloat16()
    return lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(x.bfloat16(), packed, 32, both)


def measure(shape: tuple[int, int], rows: tuple[int, ...], rounds: int, only: str) -> None:
    """Prints the table of one shape."""
    copies = max(1, COLD // (shape[0] * shape[1]))
    made = [kernels(torch.randn(shape) * 0.02) for _ in range(copies)]
    names = [name for name in made[0] if only in name]
    for count in rows:
        x = torch.randn(count, shape[1])
        times: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(rounds + 1):
            for name in names:
                begin = time.perf_counter()
                for each in made:
                    each[name][1](x.clone())  # a new tensor: layers keep the last input they quantised
                if turn:
                    times[name].append((time.perf_counter() - begin) / copies)
        print(f"\n{shape[0]} x {shape[1]}, {count} rows{'median us':>21}{'least us':>11}{'GB/s':>8}{'TOP/s':>8}")
        for name in names:
            least = min(times[name])
            speed = 2 * shape[0] * shape[1] * count / least / 1e12
            middle = statistics.median(times[name])
            rate = made[0][name][0] / least / 1e9
            print(f"{name:28}{middle * 1e6:12.0f}{least * 1e6:11.0f}{rate:8.1f}{speed:8.3f}", flush=True)


def main() -> None:
    """Reads the options and measures every shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rows", type=int, nargs="*", default=list(ROWS))
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="the first so many shapes")
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {options.threads} threads")
    with torch.inference_mode():
        for shape in SHAPES[: options.shapes]:
            measure(shape, tuple(options.rows), options.rounds, options.only)


if __name__ == "__main__":
    main()
