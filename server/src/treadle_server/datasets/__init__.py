"""Training data: files to documents, documents to packed batches of token ids, ahead of need in a thread of its own."""

from treadle_server.datasets.batches import BatchStream, Position, TokenBatch
from treadle_server.datasets.dataset import Dataset
from treadle_server.datasets.encoder import DocumentEncoder
from treadle_server.datasets.prefetcher import Prefetcher

__all__ = ["BatchStream", "Dataset", "DocumentEncoder", "Position", "Prefetcher", "TokenBatch"]
