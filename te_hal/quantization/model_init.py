"""quantized_model_init: modules made inside keep their gemm weights in FP8 instead of 16 or 32 bits."""

from __future__ import annotations

import copy
import threading
from typing import TYPE_CHECKING, NamedTuple

from te_hal.quantization.block_arguments import check_block
from te_hal.quantization.block_decorator import BlockDecorator
from te_hal.quantization.recipe_support import check_forced_backend
from te_hal.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MTFP8BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from te_hal.schema.errors import StateError, UnsupportedError

if TYPE_CHECKING:
    from types import TracebackType


_STORED = (
    DelayedScaling,
    Float8CurrentScaling,
    Float8BlockScaling,
    MXFP8BlockScaling,
    MTFP8BlockScaling,
    NVFP4BlockScaling,
    CustomRecipe,
)


class ModelInit(NamedTuple):
    """What modules that are made now do with their gemm weights.

    Attributes:
        recipe: whose weight quantizer they are stored by.
        preserve: keep a CPU copy of the unquantized initial value.
    """

    recipe: Recipe
    preserve: bool


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.frames: list[ModelInit | None] = []


_per_thread = _PerThread()


def current_model_init() -> ModelInit | None:
    """The innermost block of the calling thread; None outside of any and inside of one that is off."""
    frames = _per_thread.frames
    return frames[-1] if frames else None


class quantized_model_init(BlockDecorator):  # noqa: N801 - Transformer Engine's spelling
    """Make modules whose gemm weights live in FP8: 1 byte an element, and 1 more where a second copy is read.

    Weights are initialised in ``params_dtype`` and quantized one by one. Under delayed scaling the first scale is 1,
    as the module's state says. Biases and norms stay as they are. Such modules run under an autocast of the same
    family of recipes; without one they compute with the dequantized weights. Blocks nest. As a decorator it makes
    one for each call.

    On the meta device weights have codes without values: after ``model.to_empty(device=...)``, call
    ``reset_parameters()`` of each module, or load a checkpoint.

    Args:
        enabled: whether to.
        recipe: any; None: DelayedScaling with its defaults. Under a CustomRecipe a weight lives as what the factory's
            quantizer for its role makes, an IdentityTensor or HybridQuantizedTensor among them.
        preserve_high_precision_init_val: keep the initial value, unquantized and on the CPU: each weight gets
            ``get_high_precision_init_val()`` (None once cleared) and ``clear_high_precision_init_val()``.

    Raises:
        ArgumentTypeError: a flag is no bool, ``recipe`` no recipe.
        UnsupportedError: a recipe of another family, or one that the forced backend lacks.
        StateError: this object is already entered.
    """

    def __init__(
        self, enabled: bool = True, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False
    ) -> None:
        flags = {"enabled": enabled, "preserve_high_precision_init_val": preserve_high_precision_init_val}
        check_block("quantized_model_init", flags, recipe)
        self._init = ModelInit(recipe or DelayedScaling(), preserve_high_precision_init_val) if enabled else None
        self._frames: list[ModelInit | None] | None = None

    def _fresh(self) -> quantized_model_init:
        made = copy.copy(self)
        made._frames = None  # noqa: SLF001 - of this class
        return made

    def __enter__(self) -> None:
        if self._frames is not None:
            raise StateError(
                "quantized_model_init",
                got="an object that is already entered",
                accepted="one use at a time",
                todo="make a new one for the inner block",
            )
        if self._init is not None:
            _check_recipe(self._init.recipe)
        self._frames = _per_thread.frames
        self._frames.append(self._init)

    def __exit__(
        self, error: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._frames is not None:
            self._frames.pop()
            self._frames = None


def _check_recipe(recipe: Recipe) -> None:
    if not isinstance(recipe, _STORED):
        raise UnsupportedError(
            "quantized_model_init: recipe",
            got=type(recipe).__name__,
            accepted=", ".join(kind.__name__ for kind in _STORED),
            todo="use one of these; weights under other recipes are quantized at each step",
        )
    check_forced_backend(recipe)


def fp8_model_init(
    enabled: bool = True, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False
) -> quantized_model_init:
    """The older spelling of :class:`quantized_model_init`; same meaning and arguments."""
    return quantized_model_init(enabled, recipe, preserve_high_precision_init_val)
