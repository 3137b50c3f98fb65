"""A compiled compute backend: vector code emitted from Python with numba and llvmlite, NumPy for the rest."""
