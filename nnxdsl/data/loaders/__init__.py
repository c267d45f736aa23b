"""From files to datasets: a file for each kind of data, and the report of bad rows."""
