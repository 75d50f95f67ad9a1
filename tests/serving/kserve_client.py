"""Asks a server by kserve's client; run with an interpreter that has kserve. Prints JSON."""

import asyncio
import json
import sys

import numpy as np
from kserve import InferenceRESTClient, InferInput, InferRequest, RESTConfig


def request(rows, *, binary):
    inputs = []
    for name, values in rows.items():
        array = np.array(values, np.float64 if name == "age" else np.object_)
        inputs.append(InferInput(name, list(array.shape), "FP64" if name == "age" else "BYTES"))
        inputs[-1].set_data_from_numpy(array, binary_data=binary)
    return InferRequest("deepfm", inputs)


async def main(url, rows):
    client = InferenceRESTClient(RESTConfig(protocol="v2", retries=1, timeout=60))
    ready = [
        await client.is_server_live(url),
        await client.is_server_ready(url),
        await client.is_model_ready(url, "deepfm"),
    ]
    values = []
    for binary in (True, False):
        answer = await client.infer(url, request(rows, binary=binary), model_name="deepfm")
        values.append(answer.outputs[0].as_numpy().tolist())
    plain = await client.infer(
        url,
        {"inputs": [one.to_dict() for one in request(rows, binary=False).inputs]},
        model_name="deepfm",
        headers={"Content-Type": "application/json"},
    )
    values.append(plain.outputs[0].as_numpy().tolist())
    wrong = request({name: rows[name] for name in rows if name != "user"}, binary=True)
    error = None
    try:
        await client.infer(url, wrong, model_name="deepfm")
    except Exception as raised:  # of httpx
        error = raised.response.text if hasattr(raised, "response") else repr(raised)
    await client.close()
    print(json.dumps({"ready": ready, "values": values, "error": error}))


given = json.loads(sys.argv[1])
asyncio.run(main(given["url"], given["rows"]))
