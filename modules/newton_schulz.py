"""newton_schulz: a matrix made nearly orthogonal by polynomials of products, as Muon's step does with a gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from te_hal.modules.arguments import check_size, check_tensor
from te_hal.schema.errors import ArgumentError
from te_hal.schema.refusals import declare, refuse

if TYPE_CHECKING:
    from collections.abc import Sequence

_REFUSED = declare(
    "newton_schulz",
    {"ctx": None},
    {"ctx": "cuSolverMp, NVIDIA's own, takes columns of several processes; gather them, and pass the whole"},
)

_WHERE = "newton_schulz"
_DTYPES = (torch.float32, torch.bfloat16)
#: Of five steps, as in Transformer Engine: they bring singular values from about 0.001 to 1 near 1 soonest.
_QUINTIC = (
    *(4.0848, -6.8946, 2.9270),
    *(3.9505, -6.3029, 2.6377),
    *(3.7418, -5.5913, 2.3037),
    *(2.8769, -3.1427, 1.2046),
    *(2.8366, -3.0525, 1.2012),
)
#: Of one step of any other number: converges to 1 from wherever between 0 and the root of 3.
_CUBIC = (1.5, -0.5, 0.0)


@torch.no_grad()
def newton_schulz(
    x: torch.Tensor, ctx: None = None, num_iterations: int = 5, coefficients: Sequence[float] | None = None
) -> None:
    """Bring every singular value of a matrix near 1, in place.

    Each step is ``x = a x + b (x xT) x + c (x xT)^2 x``. Products are in fp32, and the result is rounded once.

    Args:
        x: ``[m, n]``, fp32 or bf16, on any device; no singular value above 1 (divide it by its norm).
        ctx: None: the matrix is whole. Transformer Engine's context for columns over several processes is refused.
        num_iterations: steps.
        coefficients: a, b, c of each step, ``3 * num_iterations``; None: Transformer Engine's.

    Raises:
        ArgumentTypeError: no tensor.
        ArgumentError: another rank or dtype; another number of steps or coefficients than can be.
        UnsupportedError: a ``ctx``.
    """
    refuse(_WHERE, {"ctx": ctx}, _REFUSED)
    x = check_tensor(f"{_WHERE}: x", x)
    if x.dim() != 2 or x.dtype not in _DTYPES:  # noqa: PLR2004 - a matrix
        got, accepted = f"shape {tuple(x.shape)} of {x.dtype}", "[m, n] in torch.float32 or torch.bfloat16"
        raise ArgumentError(f"{_WHERE}: x", got=got, accepted=accepted, todo="view it as a matrix, or cast it")
    check_size(f"{_WHERE}: num_iterations", num_iterations)
    steps = _steps(num_iterations, coefficients)
    wide = x.float()
    tall = wide.shape[0] > wide.shape[1]
    made = wide.T if tall else wide  # the smaller product
    for a, b, c in steps:
        product = made @ made.T
        polynomial = torch.addmm(product, product, product, beta=b, alpha=c)
        made = torch.addmm(made, polynomial, made, beta=a)
    x.copy_(made.T if tall else made)


def _steps(count: int, coefficients: Sequence[float] | None) -> list[tuple[float, float, float]]:
    if coefficients is None:
        coefficients = _QUINTIC if 3 * count == len(_QUINTIC) else _CUBIC * count
    if len(coefficients) != 3 * count:
        raise ArgumentError(
            f"{_WHERE}: coefficients",
            got=f"{len(coefficients)} of them",
            accepted=f"{3 * count}: three for each of num_iterations={count}",
            todo="correct one of the two",
        )
    return [(coefficients[i], coefficients[i + 1], coefficients[i + 2]) for i in range(0, 3 * count, 3)]
