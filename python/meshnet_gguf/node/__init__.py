"""The supervisor of one worker on one machine: `meshnet node`.

await Node(load_config(path), log).run(ended)
"""

from meshnet_gguf.node.config import NodeConfig, Supervision, load_config, parse_config
from meshnet_gguf.node.node import Backoff, Node

__all__ = ["Backoff", "Node", "NodeConfig", "Supervision", "load_config", "parse_config"]
