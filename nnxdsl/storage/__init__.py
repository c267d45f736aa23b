"""Files that survive a kill: atomic JSON and directories, JSON lines, manifests, mutexes, free space. Knows no runs."""
