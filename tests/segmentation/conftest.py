"""MMSegmentation imports MMPretrain, which cannot be imported beside transformers 5 otherwise."""

from vim_mm import activate

activate()
