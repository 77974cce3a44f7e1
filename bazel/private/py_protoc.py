"""Runs protoc of grpcio-tools: the arguments are protoc's own."""

import importlib.resources
import sys

from grpc_tools import protoc

if __name__ == "__main__":
    well_known = importlib.resources.files("grpc_tools") / "_proto"
    sys.exit(protoc.main([sys.argv[0], *sys.argv[1:], f"-I{well_known}"]))
