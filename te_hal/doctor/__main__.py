"""`python -m te_hal.doctor`: `te-hal doctor` where the libraries of the command line are not installed."""

import sys

from te_hal.doctor import diagnose

found = diagnose()
sys.stdout.write(f"{found}\n")
sys.exit(not found.healthy)
