"""AllReduce algorithms, one a file with its cost and registry entry. Start with `entry` and `one_shot`."""
