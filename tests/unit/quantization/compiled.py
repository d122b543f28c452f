"""Compiles Triton's kernels to machine code, also for devices that this host lacks. Prints what it
compiled.
"""

from __future__ import annotations

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from torchft._quantization import kernels
from torchft._quantization.layout import Format

INTEGERS = ("numel", "chunk", "codes_at", "scales_at", "slice_bytes", "slices", "rank")


def compile_for(capability: int) -> int:
    """Compiles all kernels for both formats and all dtypes. Returns their number."""
    count = 0
    for fmt in Format:
        for dtype in ("fp32", "fp16", "bf16"):
            for kernel, constants in (
                (kernels._quantize, kernels._writing(fmt)),
                (kernels._dequantize, kernels._reading(fmt)),
                (kernels._reduce, kernels._writing(fmt, TO_CODES=True)),
                (kernels._reduce, kernels._writing(fmt, TO_CODES=False)),
            ):
                signature = {}
                for name in kernel.arg_names:
                    if name in constants:
                        signature[name] = "constexpr"
                    elif name in INTEGERS:
                        signature[name] = "i32"
                    else:
                        signature[name] = {"codes_ptr": "*u8", "scales_ptr": "*fp32", "divisor": "fp32"}.get(
                            name, f"*{dtype}"
                        )
                source = ASTSource(kernel, signature, constexprs=constants)
                made = triton.compile(
                    source, target=GPUTarget("cuda", capability, 32), options=kernels._OPTIONS
                )
                assert made.asm["cubin"]
                # If a product and a sum were fused, with one rounding, the bits would differ from plain
                # PyTorch.
                assert "fma.rn" not in made.asm["ptx"], kernel
                count += 1
    return count


if __name__ == "__main__":
    print(sum(compile_for(capability) for capability in (80, 90)))
