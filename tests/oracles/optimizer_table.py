"""The table of optimizers: all rows, by the name of the rule."""

import matrix_updates  # noqa: F401  # these fill the table
import recent_updates  # noqa: F401
import updates  # noqa: F401
from oracle_rows import TABLE, Row

__all__ = ["ORACLES", "TABLE", "Row"]

ORACLES = {name: row.oracle for name, row in TABLE.items() if row.oracle is not None}
