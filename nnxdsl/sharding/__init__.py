"""Where arrays live: logical axis rules, the layout, the device mesh, and hardware by name."""
