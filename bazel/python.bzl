"""Python targets of this repository.

    load("//bazel:python.bzl", "meshnet_py_library", "py_pytest")

Packages of PyPI are `@pypi//NAME` (third_party/python/requirements.in lists them).
"""

load("@rules_python//python:defs.bzl", "py_binary", "py_library", "py_test")

def meshnet_py_library(name, srcs, deps = [], imports = [], **kwargs):
    """A py_library of our own code.

    Args:
      name: name of the target.
      srcs: the .py files.
      deps: other libraries.
      imports: folders, relative to this package, from which the modules are imported.
      **kwargs: as for py_library.
    """
    py_library(
        name = name,
        srcs = srcs,
        imports = imports,
        deps = deps,
        **kwargs
    )

def meshnet_py_binary(name, srcs, deps = [], **kwargs):
    """A py_binary of our own code.

    Args:
      name: name of the target.
      srcs: the .py files.
      deps: libraries.
      **kwargs: as for py_binary.
    """
    py_binary(
        name = name,
        srcs = srcs,
        deps = deps,
        **kwargs
    )

def py_pytest(name, srcs, deps = [], data = [], args = [], size = "small", tags = [], **kwargs):
    """A test that pytest runs, with the settings of pyproject.toml.

    pytest, pytest-asyncio (mode auto) and hypothesis are there without being named.

    Args:
      name: name of the target.
      srcs: the test files and a conftest.py if there is one; pytest is given those named test_*.py or *_test.py.
      deps: libraries under test and `@pypi//` packages.
      data: files that the tests read.
      args: further arguments of pytest.
      size: Bazel's test size.
      tags: Bazel's tags; `real_model` for tests on a downloaded model.
      **kwargs: as for py_test.
    """
    main = Label("//bazel/private:pytest_main.py")
    tests = [
        "$(rootpath %s)" % src
        for src in srcs
        if src.split("/")[-1].split(":")[-1].startswith("test_") or src.endswith("_test.py")
    ]
    if not tests:
        fail("py_pytest %s: none of srcs is named test_*.py or *_test.py, so nothing would run" % name)
    py_test(
        name = name,
        size = size,
        srcs = srcs + [main],
        args = tests + args,
        data = data + [Label("//:pyproject.toml")],
        main = main,
        tags = tags,
        deps = deps + [
            Label("@pypi//hypothesis"),
            Label("@pypi//pytest"),
            Label("@pypi//pytest_asyncio"),
        ],
        **kwargs
    )
