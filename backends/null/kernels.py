"""One kernel per op, generated from its schema, signature included."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from te_hal.schema.catalog import SCHEMAS
from te_hal.schema.formats import element_format
from te_hal.schema.op import REQUIRED, OpSchema, Output
from te_hal.schema.shapes import output_dtype, output_shape
from te_hal.schema.storage import QuantizedStorage, StorageKind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def _kernel(schema: OpSchema) -> Callable[..., Any]:
    """A function with the schema's signature. Its text names every parameter, so a call costs no binding."""
    namespace: dict[str, Any] = {"SCHEMA": schema, "results": _results}
    exec(compile(kernel_source(schema), f"<null kernel {schema.name}>", "exec"), namespace)  # noqa: S102 - own text
    kernel: Callable[..., Any] = namespace[schema.name]
    for name, _, default in schema.signature:
        if default is not REQUIRED and kernel.__kwdefaults__ and name in kernel.__kwdefaults__:
            kernel.__kwdefaults__[name] = default
    return kernel


def kernel_source(schema: OpSchema) -> str:
    """The Python text of an op's kernel. Keyword defaults stand as None and are set afterwards."""
    names = [name for name, _, _ in schema.signature]
    parameters = []
    for name, keyword_only, default in schema.signature:
        if keyword_only and "*" not in parameters:
            parameters.append("*")
        parameters.append(name if default is REQUIRED else f"{name}=None")
    lines = [f"def {schema.name}({', '.join(parameters)}):"]
    if "out" in names:
        lines += ["    if out is not None:", "        return out"]
    if schema.outputs:
        lines.append(f"    return results(SCHEMA, {{{', '.join(f'{name!r}: {name}' for name in names)}}})")
    elif len(lines) == 1:
        lines.append("    return None")
    return "\n".join(lines) + "\n"


def _results(schema: OpSchema, arguments: Mapping[str, Any]) -> object:
    device = arguments[schema.operands[0].name].device
    made = tuple(_empty(schema, output, arguments, device) for output in schema.outputs)
    return made[0] if len(made) == 1 else made


def _empty(schema: OpSchema, output: Output, arguments: Mapping[str, Any], device: torch.device) -> object:
    shape = output_shape(schema, output.shape, arguments)
    dtype = output_dtype(output.dtype, arguments)
    if schema.returns_storage:
        return _empty_storage(shape, dtype, arguments, device)
    return torch.empty(shape, dtype=dtype, device=device)


def _empty_storage(
    shape: tuple[int, ...], dtype: torch.dtype, arguments: Mapping[str, Any], device: torch.device
) -> QuantizedStorage:
    kind = StorageKind.of(
        element_format(dtype),
        arguments["mode"],
        rowwise=arguments["rowwise"],
        columnwise=arguments["columnwise"],
        order=arguments["columnwise_order"],
    )
    return QuantizedStorage.empty(kind, shape, arguments["input"].dtype, device)


KERNELS: dict[str, Callable[..., Any]] = {name: _kernel(schema) for name, schema in SCHEMAS.items()}
