"""Measurements of the parts of a run beside a bound measured in the same process (``flashdreams bench``)."""
