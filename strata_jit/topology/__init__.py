"""The machine: what it is, what this process may use of it, and the system calls that bind to it."""
