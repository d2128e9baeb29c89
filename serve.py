"""Serve a model over HTTP: `python serve.py MODEL ...` is `jaxinfer serve MODEL ...` from a checkout."""

import sys

from jaxinfer.cli import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
