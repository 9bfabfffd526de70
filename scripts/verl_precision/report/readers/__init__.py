"""Readers of logged runs, one module per format; ``dispatch`` chooses among them.

They write nothing and use no network. A file that cannot be read is refused in one line that names it.
"""
