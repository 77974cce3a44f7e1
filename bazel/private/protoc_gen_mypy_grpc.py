"""protoc's plugin that writes type stubs for gRPC services."""

from mypy_protobuf.main import grpc

if __name__ == "__main__":
    grpc()
