"""The null backend: empty results of the right shape and dtype, from the schemas alone; computes nothing.

For wiring tests, for measuring overhead, and as the smallest complete example of a backend.
"""

from te_hal.backends.null.kernels import KERNELS
from te_hal.backends.null.support import supports
from te_hal.schema.backend import ANY_DEVICE, Backend


def create_backend() -> Backend:
    """The entry point's function. Serves tensors on any device, claims none unasked."""
    return Backend(
        name="null",
        kernels=KERNELS,
        serves=frozenset({ANY_DEVICE}),
        supports=supports,
        description="computes nothing; results have the right shape and dtype, and no defined values",
    )
