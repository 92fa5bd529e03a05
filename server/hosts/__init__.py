"""The hosts of one server: how they find each other, compare themselves, share files and end together. Start at base."""
