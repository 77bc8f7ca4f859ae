"""vLLM over statehold: pages of its KV cache in a PageStore, and weights from a run.

    kv_transfer_config={"kv_connector": "StateholdConnector", "kv_role": "kv_both",
                        "kv_connector_extra_config": {"path": "/nvme/kv"}}       # connector
    "secondary_tiers": [{"type": "statehold", "path": "/nvme/kv"}]              # tier

vLLM finds these names by an entry point (loader.register), or by kv_connector_module_path and
module_path. The classes that derive from vLLM's are made when vLLM asks for them: all modules here
import without vLLM, and the rest of statehold never imports them.
"""
