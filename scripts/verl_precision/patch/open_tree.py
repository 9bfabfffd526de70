"""Change a package below folders that are kept open, without following links.

Root may patch the tree of another user, who can meanwhile replace any file or folder by a link. So each change starts
from the open package, opens one folder after the other, and changes the owner only of what it has created.
"""

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY  # O_PATH, of Linux, needs no read permission
NO_FLUSH = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)  # raised by network file systems


@dataclass(frozen=True)
class OpenTree:
    """The folder ``root`` that contains a package; each method takes absolute paths below it.

    Raises:
        OSError: the change fails, or a folder on the way is a link or a file; it names the path.
    """

    root: Path
    above: int  # ``root``, open
    package: int  # the package's folder, open

    def write(self, path: Path, content: bytes, model: Path) -> None:
        """Create a file with the mode of ``model`` and, as root, its owner, and flush it to the disk."""
        with self._created(path) as file:
            file.write(content)
            set_mode_and_owner(file.fileno(), model.stat())

    def copy(self, source: Path, to: Path) -> None:
        """Copy a file with its mode, times and, as root, owner; copy a link as a link."""
        with self._folder_of(source) as folder:
            if stat.S_ISLNK(os.stat(source.name, dir_fd=folder, follow_symlinks=False).st_mode):
                leads_to = os.readlink(source.name, dir_fd=folder)
                with self._folder_of(to) as folder:
                    os.symlink(leads_to, to.name, dir_fd=folder)
                return
            opened = os.open(source.name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder)
            with open(opened, "rb") as original, self._created(to) as file:
                shutil.copyfileobj(original, file)
                file.flush()
                shutil.copystat(opened, file.fileno())
                set_mode_and_owner(file.fileno(), os.fstat(opened))

    def make_folder(self, path: Path) -> None:
        """Create a folder and its parents, each with the mode and owner of its parent."""
        if not path.is_dir():
            self.make_folder(path.parent)
            with self._folder_of(path) as folder:
                os.mkdir(path.name, dir_fd=folder)
                made = os.open(path.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
                try:
                    set_mode_and_owner(made, os.fstat(folder))
                finally:
                    os.close(made)

    def replace(self, path: Path, by: Path) -> None:
        try:
            with self._folder_of(by) as source, self._folder_of(path) as folder:
                os.replace(by.name, path.name, src_dir_fd=source, dst_dir_fd=folder)
        except OSError as fault:
            fault.filename, fault.filename2 = str(by), str(path)
            raise

    def remove(self, path: Path) -> None:
        with self._folder_of(path) as folder:
            os.unlink(path.name, dir_fd=folder)

    def remove_folder(self, path: Path) -> None:
        with self._folder_of(path) as folder:
            os.rmdir(path.name, dir_fd=folder)

    def flush(self, path: Path) -> None:
        """Flush the names in a folder to the disk."""
        with self._folder_of(path) as folder:
            opened = os.open(path.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            try:
                flush(opened)
            finally:
                os.close(opened)

    @contextlib.contextmanager
    def _folder_of(self, path: Path) -> Iterator[int]:
        """Yield the open folder that contains ``path``; an OSError that has no absolute path gets this one."""
        parts = path.relative_to(self.root).parts
        with contextlib.ExitStack() as opened:
            try:
                folder = self.package if parts[1:] else self.above
                for name in parts[1:-1]:
                    folder = os.open(name, FOLDER | os.O_NOFOLLOW, dir_fd=folder)
                    opened.callback(os.close, folder)
                yield folder
            except OSError as fault:
                if not os.path.isabs(str(fault.filename)):
                    fault.filename = str(path)
                raise

    @contextlib.contextmanager
    def _created(self, path: Path) -> Iterator[BinaryIO]:
        """Yield a new file and flush it to the disk; an existing file or link of its name is an error."""
        with self._folder_of(path) as folder:

            def create(_: str, flags: int) -> int:
                return os.open(path.name, flags, 0o600, dir_fd=folder)

            with open(path, "xb", opener=create) as file:
                yield file
                file.flush()
                flush(file.fileno())


def set_mode_and_owner(opened: int, model: os.stat_result) -> None:
    """Give an open file or folder the mode of ``model`` and, as root, its owner."""
    if os.geteuid() == 0:
        os.chown(opened, model.st_uid, model.st_gid)
    os.chmod(opened, stat.S_IMODE(model.st_mode))


def flush(opened: int) -> None:
    """Flush an open file or folder to the disk, if the file system supports it."""
    try:
        os.fsync(opened)
    except OSError as fault:
        if fault.errno not in NO_FLUSH:
            raise
