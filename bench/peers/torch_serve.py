"""The peer of the benchmark `serve`: the same model as plain torch, behind the same framework and HTTP server.

Tables are `nn.Embedding`; values are encoded by hostdev, in the same way; the dense layers are the same module. A
request is computed when it has been read, as in a handler that people write. Prints the port.
"""

import socket
import sys
from typing import Any

import numpy as np
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from torch import nn

import hostdev


class TorchTable:
    """A table of a checkpoint as an `nn.Embedding`."""

    is_by_key = False

    def __init__(self, table: Any) -> None:
        weights = torch.from_numpy(np.array(table.lookup(np.arange(table.rows))))
        self.rows, self.dim = table.rows, table.dim
        self.embedding = nn.Embedding.from_pretrained(weights)

    def lookup(self, ids: Any, unknown: Any = None) -> Any:
        """Return rows, float32 [n, dim]."""
        return self.embedding(torch.from_numpy(ids).long()).numpy()


def main(checkpoint: str, threads: int) -> None:
    """Serve until this process is ended."""
    torch.set_num_threads(threads)
    predictor = hostdev.Predictor(checkpoint)
    predictor.tables = {name: TorchTable(table) for name, table in predictor.tables.items()}

    async def predict(request: Request) -> JSONResponse:
        columns = (await request.json())["columns"]
        batch = predictor.encode(columns)
        return JSONResponse({"predictions": predictor.to_predictions(predictor.logits(batch)).tolist()})

    app = Starlette(routes=[Route("/v1/predict", predict, methods=["POST"])])
    # asyncio sets TCP_NODELAY only where the protocol is named.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    config = uvicorn.Config(app, http="httptools", loop="asyncio", lifespan="off", log_config=None, access_log=False)
    uvicorn.Server(config).run([listener])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
