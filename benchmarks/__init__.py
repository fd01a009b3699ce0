"""What ``bench.py`` is made of, and benchmarks of single parts. Not installed with the library."""
