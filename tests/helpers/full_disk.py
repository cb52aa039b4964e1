"""A disk that is full, as far as one process can tell, without the rights to make a file system."""

import resource
from contextlib import contextmanager


@contextmanager
def full_disk(limit):
    """Let no file of this process grow beyond a limit in bytes; writes fail as they do on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
