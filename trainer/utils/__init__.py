"""What the other folders use: processes, random numbers, interrupts and errors; and functions of `gluon.utils`."""
