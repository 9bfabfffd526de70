"""Readers of logged runs, one module a format; ``dispatch`` chooses among them.

They write nothing and use no network. What cannot be read is refused in one line that names it.
"""
