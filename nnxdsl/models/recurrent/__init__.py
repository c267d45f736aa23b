"""What mixers with a recurrent memory share: short convolutions, orders of tokens, rows with branches."""
