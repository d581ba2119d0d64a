"""`python -m playground` and the console script `playground`."""

from experiments.run import main

if __name__ == "__main__":
    main()
