"""The meaning of every kernel in torch: the oracle, and the kernels' own schedule, vectorised."""
