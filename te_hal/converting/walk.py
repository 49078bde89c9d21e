"""The walk through a model: which modules are replaced, and by what."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from torch import nn

from te_hal.converting.attention import attention
from te_hal.converting.conversion import Conversion, Converted, Left
from te_hal.converting.encoder_layer import encoder_layer
from te_hal.converting.linear import linear
from te_hal.converting.norms import layernorm, rmsnorm
from te_hal.converting.replacement import reason_to_stay
from te_hal.quantization.availability import get_default_recipe
from te_hal.quantization.operand_formats import recipe_formats
from te_hal.recipe import CustomRecipe, Recipe
from te_hal.schema.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    from collections.abc import Callable

    from te_hal.quantization.operand_formats import Formats

    Filter = Callable[[str, nn.Module], bool]

#: By the class itself; what is derived from one may compute something else.
_KINDS: dict[type[nn.Module], Callable[[Any, Any], nn.Module | str]] = {
    nn.Linear: linear,
    nn.LayerNorm: layernorm,
    nn.RMSNorm: rmsnorm,
    nn.MultiheadAttention: attention,
    nn.TransformerEncoderLayer: encoder_layer,
}

_FILTERED = "the filter says so"


def convert(model: nn.Module, *, recipe: Recipe | None = None, filter: Filter | None = None) -> Conversion:
    """Replace torch's layers in a model by te_hal's, in place.

    ``nn.Linear``, ``nn.LayerNorm``, ``nn.RMSNorm``, ``nn.MultiheadAttention`` and ``nn.TransformerEncoderLayer`` are
    replaced, the last two by modules that are called as torch's are. Parameters are handed over as they are: nothing is
    copied, ties between weights stay, and an optimizer made before goes on. An encoder layer that computes something
    that TransformerLayer does not is converted part by part.

    Args:
        model: changed in place.
        recipe: under which it shall run: layers whose sizes its products do not take stay. None: the default recipe.
        filter: called with the name and the module of each candidate; where it answers False, that stays, and so do
            the parts of it.

    Returns:
        What was converted, and what stays and why.

    Raises:
        ArgumentTypeError: no module; no recipe; a filter that cannot be called with two arguments, or that answers with
            something else than a bool.
        ArgumentError: the model itself is one of these layers and cannot be replaced in place; a CustomRecipe.
    """
    walk = _Walk(_checked(model, recipe, filter), filter)
    walk.visit("", model)
    for owner, child in walk.places:
        old = owner.get_submodule(child)
        setattr(owner, child, walk.made[id(old)])
    for module in model.modules():
        _close_shortcuts(module)
    return Conversion(tuple(walk.converted), tuple(walk.left))


class _Walk:
    """Finds what to replace, and makes it, before anything of the model changes.

    Attributes:
        made: new modules by the old one's id.
        places: owners and names of children that are replaced.
        converted, left: for the report.
    """

    def __init__(self, formats: Formats, filter: Filter | None) -> None:
        self._formats, self._filter = formats, filter
        self._seen: set[int] = set()
        self.made: dict[int, nn.Module] = {}
        self.places: list[tuple[nn.Module, str]] = []
        self.converted: list[Converted] = []
        self.left: list[Left] = []

    def visit(self, name: str, module: nn.Module) -> None:
        """Look at the children of a module that stays."""
        for child, part in module._modules.items():  # noqa: SLF001 - named_children tells a shared one once
            if part is None:
                continue
            path = f"{name}.{child}" if name else child
            if id(part) not in self._seen:
                self._seen.add(id(part))
                self._look_at(path, part)
            if id(part) in self.made:
                self.places.append((module, child))

    def _look_at(self, name: str, module: nn.Module) -> None:
        kind = next((kind for kind in _KINDS if isinstance(module, kind)), None)
        if kind is None:
            self.visit(name, module)
            return
        made = self._counterpart(name, module, kind)
        if isinstance(made, nn.Module):
            self.made[id(module)] = made
            self.converted.append(Converted(name, f"nn.{kind.__name__}", type(made).__name__))
            return
        self.left.append(Left(name, type(module).__name__, made))
        # torch's attention reads its parts' parameters past them; an encoder layer calls its parts.
        if type(module) is nn.TransformerEncoderLayer and made is not _FILTERED:
            self.visit(name, module)

    def _counterpart(self, name: str, module: nn.Module, kind: type[nn.Module]) -> nn.Module | str:
        if type(module) is not kind:
            return f"it is derived from nn.{kind.__name__} and may compute something else"
        if self._filter is not None and not _answer(self._filter, name, module):
            return _FILTERED
        return reason_to_stay(module) or _KINDS[kind](module, self._formats)


def _close_shortcuts(module: nn.Module) -> None:
    """Keep torch's transformer containers from computing past the modules that they hold, which they do in eval."""
    if isinstance(module, nn.TransformerEncoder):
        module.use_nested_tensor = False
    if type(module) is nn.TransformerEncoderLayer:
        module.activation_relu_or_gelu = 0


def _answer(filter: Filter, name: str, module: nn.Module) -> bool:
    answer = filter(name, module)
    if isinstance(answer, bool):
        return answer
    raise ArgumentTypeError(
        f"convert: filter of {name!r}",
        got=f"{answer!r} as its answer",
        accepted="True (convert it) or False (leave it)",
        todo="have it return a bool, bool(...) around what it has found",
    )


def _check_filter(filter: object) -> None:
    accepted, todo = "a callable of name and module", "pass lambda name, module: ..., which returns a bool"
    if not callable(filter):
        raise ArgumentTypeError("convert: filter", got=type(filter).__name__, accepted=accepted, todo=todo)
    try:
        signature = inspect.signature(filter)
    except ValueError:  # some of C tell nothing
        return
    try:
        signature.bind("", None)
    except TypeError as error:
        got = f"a callable of {signature}"
        raise ArgumentTypeError("convert: filter", got=got, accepted=accepted, todo=todo) from error


def _checked(model: object, recipe: object, filter: object) -> Formats:
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError("convert: model", got=type(model).__name__, accepted="an nn.Module", todo="pass one")
    if filter is not None:
        _check_filter(filter)
    chosen = get_default_recipe() if recipe is None else recipe
    if not isinstance(chosen, Recipe):
        got = type(chosen).__name__
        raise ArgumentTypeError("convert: recipe", got=got, accepted="a recipe, or None", todo="pass one")
    if isinstance(chosen, CustomRecipe):
        raise ArgumentError(
            "convert: recipe",
            got="a CustomRecipe, whose factory is asked module by module",
            accepted="a built-in recipe, whose formats tell which sizes fit",
            todo="pass the built-in recipe that the factory's formats are nearest to, or None",
        )
    if type(model) in _KINDS:
        raise ArgumentError(
            "convert: model",
            got=f"an nn.{type(model).__name__} itself",
            accepted="a module that holds such layers, which are replaced inside it",
            todo="wrap it, nn.Sequential(layer), and take the layer out again",
        )
    return recipe_formats(chosen)
