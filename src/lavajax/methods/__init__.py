"""Meta-learning methods, one small file each."""
