"""NumPy twins of the kernels, written from the definitions; they import nothing from what they judge."""
