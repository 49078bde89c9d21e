"""Recipe: what all recipes share. A recipe is data: which formats, how scales come about."""

from __future__ import annotations

import abc
import functools
import inspect
import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from te_hal.recipe.format import Format
from te_hal.schema.errors import ArgumentError, ArgumentTypeError, TeHalError, UnsupportedError
from te_hal.schema.refusals import declare

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from te_hal.schema.formats import ElementFormat, ScalingMode


@dataclass(frozen=True)
class MMParams:
    """Gemm settings of one product.

    Attributes:
        use_split_accumulator: in Transformer Engine, True asks for the more precise of two accumulations. Every
            te_hal gemm sums in fp32 (docs/numerics.md, G1), which satisfies both values.
    """

    use_split_accumulator: bool = True


@dataclass(frozen=True)
class QParams:
    """Quantization settings of one role (input, weight or grad_output).

    Attributes:
        power_2_scale: round scales down to powers of two.
        amax_epsilon: floor of the amax that a scale is computed from.
        random_hadamard_transform, stochastic_rounding, fp4_2d_quantization: for 4-bit recipes, which come later;
            True is refused by the 8-bit ones.
    """

    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False


@dataclass(repr=False)
class Recipe(abc.ABC):
    """Base of all recipes. Equality is by fields; assignment after construction is validated and noticed.

    A refused assignment leaves the object as it was. Every other one raises ``version``, so that a module sees when
    the object it was built for has changed.
    """

    #: The recipe's family, inherited by a user's subclass; the predicates below read it.
    family: ClassVar[str] = ""

    #: Scaling mode of the recipe's quantized tensors; where roles differ, :meth:`mode_of` knows.
    scaling_mode: ClassVar[ScalingMode]

    #: Fields of other recipes that this one lacks on purpose: why, and what to do.
    lacks: ClassVar[Mapping[str, tuple[str, str]]] = {}

    def __new__(cls, *_: object, **given: object) -> Recipe:  # noqa: PYI034 - typing has Self from Python 3.11 on
        """Refuse, before ``__init__`` does in Python's words, a keyword that is no field.

        Raises:
            ArgumentTypeError: names it, and the fields that there are.
        """
        known = _parameters(cls) if given else None
        for name, value in given.items():
            if known is not None and name not in known:
                raise ArgumentTypeError(**_no_field(cls, "keyword", name, value, known))
        return super().__new__(cls)

    def __setattr__(self, name: str, value: Any) -> None:  # noqa: ANN401 - validated by the subclass
        known = {field.name for field in fields(self)}
        if name not in known:
            raise ArgumentError(**_no_field(type(self), "attribute", name, value, known))
        before = dict(self.__dict__)
        self._assign(name, value)
        if "version" not in before:  # under construction: __post_init__ validates
            return
        try:
            self._validate()
        except TeHalError:
            self.__dict__.update(before)
            raise
        object.__setattr__(self, "version", self.version + 1)

    def _assign(self, name: str, value: Any) -> None:  # noqa: ANN401
        """Set a field, and those derived from it."""
        object.__setattr__(self, name, value)

    def __post_init__(self) -> None:
        self._validate()
        object.__setattr__(self, "version", 0)

    version: ClassVar[int]

    @abc.abstractmethod
    def _validate(self) -> None:
        """Raise for a bad field or combination of fields."""

    @abc.abstractmethod
    def element_format(self, *, forward: bool) -> ElementFormat:
        """The 8-bit code of one direction."""

    def mode_of(self, role: str) -> ScalingMode:  # noqa: ARG002 - recipes with a mode per role look at it
        """How many elements share a scale in an operand: "input", "weight", "output", "grad_output", "grad_input"."""
        return self.scaling_mode

    @classmethod
    def nvfp4(cls) -> bool:
        """Whether this is the NVFP4 recipe."""
        return cls.family == "nvfp4"

    @classmethod
    def mxfp8(cls) -> bool:
        """Whether this is the MXFP8 recipe."""
        return cls.family == "mxfp8"

    @classmethod
    def delayed(cls) -> bool:
        """Whether scales come from an amax history."""
        return cls.family == "delayed"

    @classmethod
    def float8_current_scaling(cls) -> bool:
        """Whether scales come from the tensor at hand, one per tensor."""
        return cls.family == "float8_current_scaling"

    @classmethod
    def float8_per_tensor_scaling(cls) -> bool:
        """Whether there is one scale per tensor."""
        return cls.delayed() or cls.float8_current_scaling()

    @classmethod
    def float8_block_scaling(cls) -> bool:
        """Whether this is the 1x128 / 128x128 block recipe."""
        return cls.family == "float8_block_scaling"

    @classmethod
    def mtfp8_block_scaling(cls) -> bool:
        """Whether this is Moore Threads' block recipe."""
        return cls.family == "mtfp8_block_scaling"

    @classmethod
    def custom(cls) -> bool:
        """Whether quantizers come from the user's factory."""
        return cls.family == "custom"


@functools.cache
def _parameters(kind: type[Recipe]) -> frozenset[str] | None:
    """The keywords that a class takes; None where its ``__init__`` takes any."""
    parameters = inspect.signature(kind.__init__).parameters
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return None
    return frozenset(parameters) - {"self"}


def _no_field(kind: type[Recipe], what: str, name: str, value: object, known: Iterable[str]) -> dict[str, str]:
    """What an error about a keyword or attribute that a recipe does not have says."""
    if name in kind.lacks:
        why, todo = kind.lacks[name]
        return {
            "where": f"{kind.__name__}.{name}",
            "got": repr(value),
            "accepted": f"no such field: {why}",
            "todo": todo,
        }
    derived = name in {field.name for field in fields(kind)}
    todo = "assign it to the object, once that is made" if derived else "check the spelling"
    return {"where": kind.__name__, "got": f"{what} {name!r}", "accepted": ", ".join(sorted(known)), "todo": todo}


def check_format(recipe: Recipe, fp8_format: object) -> None:
    """Refuse what is no forward format: E5M2 has too little precision there, E2M1 is 4-bit.

    Raises:
        ArgumentError: anything but E4M3 and HYBRID.
    """
    if fp8_format not in (Format.E4M3, Format.HYBRID):
        raise ArgumentError(
            f"{type(recipe).__name__}.fp8_format",
            got=str(fp8_format),
            accepted="Format.E4M3, Format.HYBRID (E5M2 is for gradients only)",
            todo="use Format.HYBRID to have E5M2 gradients",
        )


_ATTENTION = "no backend has FP8 attention kernels; attention runs in the activation dtype"
_IN_FP8 = ("fp8_dpa", "fp8_mha")
for _name in (
    *("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling", "MTFP8BlockScaling"),
    *("NVFP4BlockScaling", "CustomRecipe"),
):
    declare(f"recipe.{_name}", dict.fromkeys(_IN_FP8, False), dict.fromkeys(_IN_FP8, _ATTENTION))


def refuse_attention(recipe: Recipe, *, fp8_dpa: bool, fp8_mha: bool) -> None:
    """Refuse FP8 attention by name.

    Raises:
        ArgumentError: a flag is no bool.
        UnsupportedError: either flag is set.
    """
    for name, value in (("fp8_dpa", fp8_dpa), ("fp8_mha", fp8_mha)):
        check_is(recipe, name, value, bool)
        if value:
            raise UnsupportedError(
                f"{type(recipe).__name__}.{name}",
                got=repr(value),
                accepted="False",
                todo=_ATTENTION,
            )


def check_is(recipe: Recipe, name: str, value: object, kind: type) -> None:
    """Refuse a field that is not of its type.

    Raises:
        ArgumentError: see above.
    """
    if not isinstance(value, kind):
        _refuse(recipe, name, value, kind.__name__)


def check_number(
    recipe: Recipe, name: str, value: object, kinds: tuple[type, ...], least: float, most: float = math.inf
) -> None:
    """Refuse a field that is no number of these types (a bool is none) or lies outside its range.

    Raises:
        ArgumentError: see above; NaN lies outside every range.
    """
    number = isinstance(value, kinds) and not isinstance(value, bool)
    if not number or not least <= value <= most:  # type: ignore[operator] # a number
        span = f"of at least {least}" if most == math.inf else f"from {least} to {most}"
        _refuse(recipe, name, value, f"{' or '.join(kind.__name__ for kind in kinds)} {span}")


def _refuse(recipe: Recipe, name: str, value: object, accepted: str) -> None:
    raise ArgumentError(f"{type(recipe).__name__}.{name}", got=repr(value), accepted=accepted, todo="correct the field")
