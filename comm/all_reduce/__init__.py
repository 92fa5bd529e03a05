"""AllReduce algorithms, each in a file with its cost and registry entry. Start with `entry` and `one_shot`."""
