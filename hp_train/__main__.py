"""`python -m hp_train`: the command `hp-train` where its script is not on the PATH."""

import sys

from hp_train.cli import main

sys.exit(main())
