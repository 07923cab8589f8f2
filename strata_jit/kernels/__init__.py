"""Arithmetic on arrays and packed blocks. Importing the package loads no Numba; its modules do."""
