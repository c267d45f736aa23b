"""From files to rows: one file for each kind of data, and the report of rows that were left out."""
