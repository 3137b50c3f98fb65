"""The gRPC face of treadle: the only package that knows grpc and the protos.

Servicers and the server's life are here; `security`, `observability` and `training` are packages of their own.
"""
