"""Web pages over the facts of runs: `longtake board` serves them, `longtake report` writes them."""
