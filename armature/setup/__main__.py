"""`python -m armature.setup NAME`: create an environment of a checkout, for the Makefile and the images."""

from __future__ import annotations

import argparse
import sys

from armature.components.contracts.installation import CHECKOUT
from armature.setup import set_up

OTHERS = (
    *("vllm", "trl", "checkov", "cluster", "lerobot", "programs", "ray"),
    *("verifiers-legacy", "verifiers-v1"),
)
NAMES = {"project": ".venv", "image": ".venv"} | {name: f".venv-{name}" for name in OTHERS}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m armature.setup", description=__doc__)
    parser.add_argument("environment", choices=list(NAMES))
    environment = parser.parse_args().environment
    if CHECKOUT is None:
        sys.exit("this needs a checkout; after pip install, `armature setup` creates the environment of model servers")
    set_up(environment, CHECKOUT / NAMES[environment])


if __name__ == "__main__":
    main()
