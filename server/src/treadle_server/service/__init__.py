"""The gRPC face of treadle: the only package that knows grpc and the protos."""
