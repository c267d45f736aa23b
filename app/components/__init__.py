"""Parts that several pages draw: elements, charts, numbers."""
