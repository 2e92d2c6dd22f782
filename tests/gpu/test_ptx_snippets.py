"""The snippets that hold the virtual machine, on a real GPU: both have to give the bits that the ISA defines.

Needs torch, cuda.bindings and numpy. The driver assembles the PTX text itself, so no compiler is needed.
"""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")
if not torch.cuda.is_available():
    pytest.skip("torch sees no CUDA device", allow_module_level=True)
cu = pytest.importorskip("cuda.bindings.driver")

import ptx_snippets  # noqa: E402

TARGET = {(9, 0): "sm_90a", (10, 0): "sm_100a"}.get(torch.cuda.get_device_capability())
if TARGET is None:
    pytest.skip("no snippet is for this GPU", allow_module_level=True)
pytestmark = pytest.mark.gpu

SNIPPETS = sorted(name for name, snippet in ptx_snippets.REGISTRY.items() if snippet.target == TARGET)
KINDS = {"f32": "FLOAT32", "u32": "UINT32", "f16": "FLOAT16", "bf16": "BFLOAT16", "u8": "UINT8"}


def call(name: str, *arguments: Any) -> Any:
    status, *results = getattr(cu, name)(*arguments)
    assert status == cu.CUresult.CUDA_SUCCESS, f"{name}: {status!r}"
    return results[0] if results else None


def load(text: str) -> Any:
    """The text's kernel, assembled by the driver; its log is the message of a failure."""
    log = bytearray(8192)
    options = [cu.CUjit_option.CU_JIT_ERROR_LOG_BUFFER, cu.CUjit_option.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES]
    status, module = cu.cuModuleLoadDataEx(text.encode() + b"\0", len(options), options, [log, len(log)])
    assert status == cu.CUresult.CUDA_SUCCESS, f"{status!r}: {log.rstrip(bytes(1)).decode(errors='replace')}"
    return module


def tensor_map(spec: ptx_snippets.TensorMapSpec, address: int) -> bytes:
    swizzle = "NONE" if not spec.swizzle_bytes else f"{spec.swizzle_bytes}B"
    encoded = call(
        "cuTensorMapEncodeTiled",
        getattr(cu.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{KINDS[spec.kind]}"),
        len(spec.extents),
        address,
        [cu.cuuint64_t(extent) for extent in spec.extents],
        [cu.cuuint64_t(stride) for stride in spec.strides or (16,)],  # of one dimension none is read
        [cu.cuuint32_t(extent) for extent in spec.box],
        [cu.cuuint32_t(1)] * len(spec.extents),
        cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(cu.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{swizzle}"),
        cu.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE,
        cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    return ctypes.string_at(encoded.getPtr(), 128)


def launch(snippet: ptx_snippets.Snippet) -> dict[str, Any]:
    """Run a snippet; its outputs."""
    arrays = {**snippet.inputs, **snippet.outputs}
    on_device = {
        name: torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8).copy()).cuda()
        for name, array in arrays.items()
    }
    values: list[bytes] = []
    for name in snippet.arguments:
        if name in snippet.maps:
            spec = snippet.maps[name]
            values.append(tensor_map(spec, on_device[spec.buffer].data_ptr()))
        elif name in snippet.scalars:
            kind, value = snippet.scalars[name]
            values.append(value if isinstance(value, bytes) else value.to_bytes(int(kind[1:]) // 8, "little"))
        else:
            values.append(on_device[name].data_ptr().to_bytes(8, "little"))
    storage = [ctypes.create_string_buffer(value, len(value)) for value in values]
    parameters = (ctypes.c_void_p * len(storage))(*(ctypes.addressof(block) for block in storage))
    torch.cuda.synchronize()
    module = load(snippet.text)
    try:
        function = call("cuModuleGetFunction", module, b"snippet")
        call(
            "cuLaunchKernel", function, *snippet.grid, snippet.threads, 1, 1, snippet.shared_bytes, 0,
            ctypes.addressof(parameters), 0,
        )  # fmt: skip
        call("cuCtxSynchronize")
    finally:
        cu.cuModuleUnload(module)
    return {
        name: on_device[name].cpu().numpy().view(array.dtype).reshape(array.shape)
        for name, array in snippet.outputs.items()
    }


@pytest.mark.parametrize("name", SNIPPETS)
def test_a_snippet_gives_the_expected_bits(name: str) -> None:
    snippet = ptx_snippets.REGISTRY[name]
    wrong = ptx_snippets.differences(snippet, launch(snippet))
    assert not wrong, wrong
