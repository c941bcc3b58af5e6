"""Drives a server with the peers' own published clients; run by their own interpreter.

Prints one JSON object. Knows nothing of Deft: nothing of it is installed where this runs.
"""

import asyncio
import json
import sys
from typing import Any

import numpy as np


def picture(side: int = 224) -> Any:
    return np.arange(side * side * 3, dtype=np.uint8).reshape(side, side, 3)


def openvla(address: str) -> dict[str, Any]:
    import json_numpy

    json_numpy.patch()
    import requests

    url = f"http://{address}/act"
    asked = {"image": picture(), "instruction": "lift the cup", "unnorm_key": "bridge"}
    plain = requests.post(url, json=asked, timeout=60).json()
    encoded = requests.post(url, json={"encoded": json_numpy.dumps(asked)}, timeout=60).json()
    wrong = requests.post(url, json={**asked, "unnorm_key": "nothing"}, timeout=60)
    return {
        "plain": [type(plain).__name__, str(plain.dtype), plain.tolist()],
        "encoded": json_numpy.loads(encoded).tolist(),
        "wrong": [wrong.status_code, wrong.json()],
    }


def oft(address: str) -> dict[str, Any]:
    import json_numpy

    json_numpy.patch()
    import requests

    asked = {
        "full_image": picture(),
        "wrist_image": picture(64),
        "state": np.arange(8.0),
        "instruction": "lift the cup",
    }
    chunk = requests.post(f"http://{address}/act", json=asked, timeout=60).json()
    return {"actions": [action.tolist() for action in chunk]}


def openpi(address: str, api_key: str = "") -> dict[str, Any]:
    from openpi_client.websocket_client_policy import WebsocketClientPolicy

    host, _, port = address.rpartition(":")
    policy = WebsocketClientPolicy(host, int(port), api_key or None)
    observation = {
        "observation/image": picture(),
        "observation/wrist_image": picture(64),
        "observation/state": np.arange(8.0),
        "prompt": "lift the cup",
    }
    results = [policy.infer(observation) for _ in range(3)]
    try:
        policy.infer({"prompt": "no picture"})
        failure = ""
    except RuntimeError as error:
        failure = str(error)
    return {
        "metadata": policy.get_server_metadata()["policy"],
        "actions": results[0]["actions"].tolist(),
        "writeable": bool(results[0]["actions"].flags.writeable),
        "timings": [sorted(one["server_timing"]) for one in results],
        "failure": failure,
    }


def vla_eval(address: str) -> dict[str, Any]:
    from vla_eval.connection import Connection
    from vla_eval.protocol import numpy_codec
    from vla_eval.specs import (
        GRIPPER_CLOSE_POS,
        IMAGE_RGB,
        LANGUAGE,
        POSITION_DELTA,
        ROTATION_AA,
        DimSpec,
        check_specs,
    )

    async def episode() -> dict[str, Any]:
        async with Connection(f"ws://{address}/", timeout=60, max_retries=1) as connection:
            info = connection.server_info
            await connection.start_episode({"task": {"name": "lift the cup"}})
            actions = []
            for form in ("png", "jpeg", "raw"):
                numpy_codec.set_image_format(form)
                observed = {"images": {"agentview": picture(256)}, "task_description": "lift"}
                actions.append((await connection.act(observed))["actions"].tolist())
            try:
                await connection.act({"task_description": "no picture"})
                failure = ""
            except RuntimeError as error:
                failure = str(error)
            again = await connection.act(observed)
            await connection.end_episode({"success": True})
        theirs = [
            {name: DimSpec.from_dict(spec) for name, spec in info[kind].items()}
            for kind in ("action_spec", "observation_spec")
        ]
        benchmark = [
            {"position": POSITION_DELTA, "rotation": ROTATION_AA, "gripper": GRIPPER_CLOSE_POS},
            {"agentview": IMAGE_RGB, "language": LANGUAGE},  # as its LIBERO says
        ]
        return {
            "actions": actions,
            "failure": failure,
            "again": again["actions"].tolist(),
            "mismatches": check_specs(theirs[0], benchmark[0], theirs[1], benchmark[1]),
        }

    return asyncio.run(episode())


if __name__ == "__main__":
    clients = {"openvla": openvla, "oft": oft, "openpi": openpi, "vla-eval": vla_eval}
    sys.stdout.write(json.dumps(clients[sys.argv[1]](*sys.argv[2:])))
