"""Fetch, verify and patch the pinned llama.cpp source.

Needs only the standard library, because the build runs it before any package is installed. `python3
-m third_party.llama_cpp.llama_source --help` (or tools/llama_cpp) shows the commands.

    manifest     what is pinned and where it may come from
    git_tree     git's tree hash, recomputed from unpacked files
    archive      unpacking archives that are not trusted
    fetch        the retrieval methods, in their declared order, and the cache
    diff         one patch file: parsing, applying, reversing
    patch_stack  the ordered patches and the rules that they obey
    regenerate   patches from the commits of a work tree
    cli          the commands
"""
