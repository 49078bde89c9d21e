"""A stub, not mate: the one function of it that te_hal calls, in mate.gemm."""
