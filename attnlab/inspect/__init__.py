"""Looking inside: the workbench, real samples and request lengths, merges step by step, what kernels take."""
