"""`python -m experiments.fidelity`: short for `python -m experiments fidelity`."""

import sys

from experiments.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["fidelity", *sys.argv[1:]]))
