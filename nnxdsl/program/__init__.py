"""From a spec to one training step: layout, adapters, losses, optimizer, and the compiler that puts them together."""
