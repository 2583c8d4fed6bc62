#!/usr/bin/env bash
# A conversation that goes on after the engine's restart. Answers are stored as well as prompts, so that a turn
# finds everything that was said before it.
TRANSFER='{"kv_connector":"KVHostConnector","kv_role":"kv_both","kv_connector_module_path":"kvhost_connector","kv_load_failure_policy":"recompute","kv_connector_extra_config":{"offload_prompt_only":false}}'
source "$(dirname "$0")/common.sh"

start_daemon
start_engine "$PORT"
python3 "$here/chat.py" "http://127.0.0.1:$PORT" "$DOCUMENT" "$folder/conversation.json" \
    "What is the warehouse called?" "Who works there?"
stored
end_engine "$engine"

start_engine "$PORT"
python3 "$here/chat.py" "http://127.0.0.1:$PORT" "$DOCUMENT" "$folder/conversation.json" \
    "Summarise what you told me in one sentence."
