"""`python -m longtake`, which torchrun starts too."""

from longtake.cli import main

if __name__ == "__main__":
    main()
