"""The error by which every command refuses a request."""


class Refused(Exception):
    """The request cannot be carried out.

    The message is one line that names what is wrong, its value and what to do; a command prints it and exits non-zero.
    """
