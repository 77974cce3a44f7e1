"""The version that worker, wheel and tarballs carry."""

VERSION = "0.1.0"
