"""Carry a release's stack to another release: a three-way merge of each hook, and a report of what became of it.

The merge base is the release that the stack was made for, so that a hook is placed by what it hooks and not by line
numbers; one whose own lines changed is a conflict. A file that git finds moved is followed, and said so.
"""

import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from lib.errors import Refused
from lib.patches.export import BASE, commit_base, commit_stack, scratch_beside
from lib.patches.releases import (
    VERL,
    Framework,
    Release,
    add_release,
    download,
    find_release,
    load_releases,
    package_blobs,
    package_tree_id,
    sha256,
    unpack,
    unpacked_wheel,
)
from lib.patches.stack import (
    Patch,
    Stack,
    closest,
    find_target,
    git,
    load_stack,
    load_stacks,
    locked,
    read_record,
    run_git,
    write,
)
from lib.paths import REPO

# The file of a framework's version holds it alone, or assigns it.
VERSION = re.compile(r"""^(?:__version__ = )?(["']?)(\d[\w.+!-]*)\1\s*$""", re.M)

SAME, MERGED, THERE, CONFLICT = "same", "merged", "there", "conflict"


@dataclass(frozen=True)
class Hook:
    """One hunk of a patch and what became of it in the other release.

    ``fate``: same (its file did not change), merged (it did, or moved), there (upstream has it already), conflict.
    """

    path: str
    at: str
    fate: str
    why: str = ""


def port(name: str, to: str, folder: Path, project: Path = REPO, framework: Framework = VERL) -> tuple[list[str], bool]:
    """Make ``folder`` a git tree like checkout's of the release or folder ``to``, with the stack of ``name`` on it.

    git's own cherry-pick carries the commits and stops at the first conflict, which it continues from. The stack as it
    was is the branch ``from/<name>``. A release that versions.toml does not know is added to it.

    Returns:
        a report, a line each, and whether nothing is left to resolve.

    Raises:
        Refused: a release without a stack, a target that is not pristine or the same release, a folder in use.
    """
    stack = load_stack(find_release(name, project, framework), project)
    if not stack.patches:
        raise Refused(f"{stack.release} has no patches to carry")
    with scratch_beside(folder) as (scratch, folder):
        target, root, unknown = destination(to, stack, project, scratch)
        tree = commit_base(target, root, stack.added, scratch, framework)
        (scratch / "from").mkdir()
        source = commit_stack(stack, scratch / "from")
        branch = f"from/{name}"
        git("fetch", "--quiet", "--no-tags", str(source), f"stack:{branch}", cwd=tree)
        base, new = f"{branch}~{len(stack.patches)}", BASE + target
        hooks = carry(stack, tree, renames(tree, f"{base}^", f"{new}^"))
        done = run_git("cherry-pick", "--keep-redundant-commits", f"{base}..{branch}", cwd=tree)
        if done.returncode and not git("diff", "--name-only", "--diff-filter=U", cwd=tree):
            raise Refused(f"git cherry-pick failed: {done.stderr.decode().strip()}")
        carried = int(git("rev-list", "--count", f"{new}..HEAD", cwd=tree))
        os.replace(tree, folder)
    lines = []
    if unknown:
        entry = add_release(unknown, framework.home(project) / "versions.toml")
        lines = [f"new in versions.toml, family and dependencies as {name} has them:", entry]
    lines += report(stack, target, hooks)
    lines += [f"{folder}: {carried} of {len(stack.patches)} patches are commits after the tag {new}"]
    if done.returncode:
        lines += [
            f"  {stack.patches[carried].name} has conflicts: git status; edit; git add; git cherry-pick --continue"
        ]
    lines += [f"  to review them: git range-diff {base}..{branch} {new}..HEAD"]
    if target in load_releases(project, framework):
        lines += [f"  to take them over: python scripts/patchset.py export {folder}"]
    else:
        lines += [f"  {to} is no release, so they cannot be exported; to use them: PYTHONPATH={folder}"]
    return lines, not done.returncode


def destination(to: str, stack: Stack, project: Path, scratch: Path) -> tuple[str, Path, Release | None]:
    """Return the name of what ``to`` is, a copy of it to be used up, and the entry of an unknown release.

    A folder that holds no release is named by its version and its content, as PEP 440 has it: 0.10.0.dev+1a2b3c4d.
    """
    framework = stack.release.framework
    releases, unknown = load_releases(project, framework), None
    if to in releases:
        name, root = to, unpacked_wheel(to, scratch / "wheel", framework)
    elif Path(to).is_dir():
        given = find_target(Path(os.path.abspath(to)), framework)
        skipped = shutil.ignore_patterns("__pycache__", given.book.name)
        root = scratch / "wheel"
        shutil.copytree(given.root / framework.name, root / framework.name, ignore=skipped)
        tree = package_tree_id(blobs := package_blobs(root, framework))
        if ours := [path for path in (*stack.added, *stack.shadowed) if path in blobs]:
            raise Refused(f"{to} has {ours[0]} already; take its patches out first: make unapply-patches {given.word}")
        if not (root / framework.version).exists():
            raise Refused(f"{to} has no {framework.version}, as every release has; give a checkout or a release")
        told = VERSION.search((root / framework.version).read_text())
        if not told:
            raise Refused(f"{to}: {framework.version} tells no version; give a checkout or a release")
        same = [release.name for release in releases.values() if release.tree_before == tree]
        name = same[0] if same else f"{told[2]}+{tree[:8]}"
    elif re.fullmatch(r"\d+(\.\w+)+", to):
        archive = download(to, framework)
        name, root = to, unpack(archive, scratch / "wheel")
        tree = package_tree_id(package_blobs(root, framework))
        unknown = replace(stack.release, name=to, wheel_sha256=sha256(archive), tree_before=tree, tree_after=tree)
    else:
        raise Refused(f"{to} is neither a release ({', '.join(releases)}, or a newer one on PyPI) nor a folder")
    if name == stack.release.name:
        raise Refused(f"{to} is {stack.release} itself; patchset.py checkout makes a tree of its stack")
    return name, root, unknown


def renames(tree: Path, old: str, new: str) -> dict[str, str]:
    """Return the new path, by the old one, of each file that git finds moved between two commits."""
    lines = git("diff", "--find-renames", "--diff-filter=R", "--name-status", old, new, cwd=tree).splitlines()
    return dict(line.split("\t")[1:] for line in lines)


def carry(stack: Stack, tree: Path, moved: Mapping[str, str]) -> dict[Patch, list[Hook]]:
    """Merge the hooks one by one into the files of ``tree`` and return what became of each; changes nothing.

    A conflict is left out, so that what follows from it is a conflict too. ``moved``: new paths by old ones.
    """
    now = {path: moved.get(path, path) for path in stack.before}
    ours = {path: (tree / now[path]).read_bytes() for path in stack.before if (tree / now[path]).exists()}
    found: dict[Patch, list[Hook]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for patch in stack.patches:
            hooks = found[patch] = []
            for path, before, _ in patch.blobs:
                base = git("cat-file", "blob", before, cwd=tree).encode()
                same = ours.get(path) == base and path not in moved
                shown = f"{path} -> {moved[path]}" if path in moved else path
                for at, hunk in hunks(patch, path):
                    if path not in ours:
                        hooks.append(Hook(shown, at, CONFLICT, "there is no such file"))
                        continue
                    merged = merge(ours[path], base, hunk, Path(folder))
                    if merged is None:
                        hooks.append(Hook(shown, at, CONFLICT, reason(hunk, ours[path].decode())))
                    else:
                        hooks.append(Hook(shown, at, SAME if same else THERE if merged == ours[path] else MERGED))
                        ours[path] = merged
    return found


def hunks(patch: Patch, path: str) -> Iterator[tuple[str, str]]:
    """Yield where it is, and its text, for each hunk of the patch in this file."""
    (diff,) = re.findall(rf"^diff --git a/{re.escape(path)} b/.*?(?=^diff --git |\Z)", patch.text, re.M | re.S)
    for hunk in re.findall(r"^@@ .*?(?=^@@ |\Z)", diff, re.M | re.S):
        line, function = re.match(r"@@ -(\d+)\S* \S+ @@ ?(.*)", hunk).groups()
        yield f"line {line}" + (f" in {function.rstrip(':')}" if function else ""), hunk


def merge(ours: bytes, base: bytes, hunk: str, scratch: Path) -> bytes | None:
    """Return ``ours`` with the hunk, which fits ``base``, merged in; None is a conflict."""
    for name, content in (("ours", ours), ("base", base), ("theirs", base)):
        write(scratch / name, content)
    git("apply", "--whitespace=nowarn", "-", cwd=scratch, stdin=f"--- a/theirs\n+++ b/theirs\n{hunk}")
    done = run_git("merge-file", "-p", "-q", "ours", "base", "theirs", cwd=scratch)
    if done.returncode > 127:  # fewer is the number of conflicts
        raise Refused(f"git merge-file failed: {done.stderr.decode().strip()}")
    return None if done.returncode else done.stdout


def reason(hunk: str, ours: str) -> str:
    """Say what of a conflicting hunk the file ``ours`` has."""
    there = {line.strip() for line in ours.splitlines()}
    old, new = ([line[1:].strip() for line in hunk.splitlines() if line[:1] == sign] for sign in "-+")
    if new and there.issuperset(new):
        return "its new lines are in the file, here or elsewhere"
    if lost := [line for line in old if line not in there]:
        return f"{len(lost)} of its {len(old)} old lines are gone, first: {lost[0]}"
    return "what surrounds it changed"


def report(stack: Stack, target: str, hooks: dict[Patch, list[Hook]]) -> Iterator[str]:
    """Tell what became of each patch; of the hooks that merged into a changed file where that is, of others each."""
    total = Counter(hook.fate for found in hooks.values() for hook in found)
    yield f"{stack.release} -> {target}: {len(hooks)} patches, {total.total()} hooks: {counts(total)}"
    for patch, found in hooks.items():
        count = Counter(hook.fate for hook in found)
        fate = CONFLICT if count[CONFLICT] else THERE if count[THERE] == len(found) else MERGED
        yield f"{fate:8} {patch.name}: {counts(count)}"
        for path, number in Counter(hook.path for hook in found if hook.fate == MERGED).items():
            yield f"    {MERGED:8} {path}: {number}"
        for hook in found:
            if hook.fate in (THERE, CONFLICT):
                yield f"    {hook.fate:8} {hook.path}: {hook.at}{hook.why and ': '}{hook.why}"


def counts(of: Counter) -> str:
    return ", ".join(f"{of[fate]} {fate}" for fate in (SAME, MERGED, THERE, CONFLICT) if of[fate])


def drift(path: Path, project: Path = REPO, framework: Framework = VERL) -> list[str]:
    """Say, per patch, which of its files the target has otherwise than the closest release; changes nothing."""
    with locked(path, framework) as target:
        blobs, record = target.blobs(), read_record(target)
    pristine = record.undone(blobs) if record else blobs
    stack = closest(pristine, load_stacks(project, framework))
    changed = {path: "changed" if path in pristine else "gone" for path in stack.changed(pristine)}
    lines = [f"closest to {stack.release}: {len(changed)} of the {len(stack.before)} files that its stack hooks differ"]
    for patch in stack.patches:
        drifted = [f"    {changed[path]:8} {path}" for path, _, _ in patch.blobs if path in changed]
        lines += [f"{patch.name}: {len(drifted)} of {len(patch.blobs)} files", *drifted] if drifted else []
    return lines
