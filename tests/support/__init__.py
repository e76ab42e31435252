"""What tests share: oracles, makers of inputs and of models, backends, and the paths of the checkout."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
