"""The table of optimizers: all rows, by the name of the rule."""

import matrix_updates  # noqa: F401  # these fill the table
import recent_updates  # noqa: F401
import updates  # noqa: F401
from oracle_rows import TABLE, Row

__all__ = ["ORACLES", "TABLE", "row_of"]

ORACLES = {name: row.oracle for name, row in TABLE.items() if row.oracle is not None}
_BY_OPTIMIZER = {name.replace("_", ""): row for name, row in TABLE.items()}


def row_of(optimizer: str) -> Row:
    """The row of the optimizer of this name, in any case; one without anything special where the table has none."""
    return _BY_OPTIMIZER.get(optimizer.lower(), Row())
