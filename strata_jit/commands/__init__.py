"""The commands of `strata-jit`, a module each: options and environment in, one library call, a report out."""
