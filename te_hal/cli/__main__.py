"""`python -m te_hal.cli`: the same as `te-hal`."""

from te_hal.cli import main

if __name__ == "__main__":
    main()
