"""`python -m strata_jit`: the same command as `strata-jit`."""

from strata_jit.cli import main

if __name__ == "__main__":
    main(prog_name="strata-jit")
