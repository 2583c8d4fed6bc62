# Shared by the examples: a daemon and engines that end with the script. Sourced, not run.
#
#   MODEL        what vLLM serves; a name of the hub or a folder
#   VLLM         the command that serves a model ("vllm serve")
#   ENGINE_ARGS  more arguments for it, as "--max-model-len 4096"
#   MEMORY       of the cache
#   PORT         of the first engine

set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
MODEL=${MODEL:-HuggingFaceTB/SmolLM2-135M-Instruct}
VLLM=${VLLM:-vllm serve}
ENGINE_ARGS=${ENGINE_ARGS:-}
MEMORY=${MEMORY:-2GiB}
PORT=${PORT:-8000}
DOCUMENT=${DOCUMENT:-$here/../demo/document.md}
TRANSFER=${TRANSFER:-'{"kv_connector":"KVHostConnector","kv_role":"kv_both","kv_connector_module_path":"kvhost_connector","kv_load_failure_policy":"recompute"}'}

folder=$(mktemp -d)
export KVHOST_SOCKET=$folder/kvhostd.sock
started=()

# end_one PID: asks it to end, and after half a minute does not ask.
end_one() {
    kill -TERM "$1" 2>/dev/null || return 0
    local try
    for try in $(seq 150); do
        kill -0 "$1" 2>/dev/null || break
        sleep 0.2
    done
    kill -KILL "$1" 2>/dev/null || true
    wait "$1" 2>/dev/null || true
}

end_all() {
    for pid in "${started[@]}"; do
        end_one "$pid"
    done
    rm -rf "$folder"
}
trap end_all EXIT

say() { printf '\n== %s\n' "$*"; }

# still_runs PID LOG: ends the script with the end of the log if that process is gone.
still_runs() {
    kill -0 "$1" 2>/dev/null && return
    tail -n 30 "$2" >&2
    echo "a program ended; above is the end of its log" >&2
    exit 1
}

start_daemon() {
    say "kvhostd with $MEMORY"
    kvhostd --memory "$MEMORY" --metrics off >"$folder/kvhostd.log" 2>&1 &
    local pid=$!
    started+=("$pid")
    until kvhostctl health >/dev/null 2>&1; do
        still_runs "$pid" "$folder/kvhostd.log"
        sleep 0.2
    done
}

# start_engine PORT: sets `engine` to its process.
start_engine() {
    say "vLLM on port $1 (this takes a while)"
    # VLLM and ENGINE_ARGS are several words each.
    # shellcheck disable=SC2086
    $VLLM "$MODEL" --host 127.0.0.1 --port "$1" --served-model-name example \
        --enable-prompt-tokens-details --kv-transfer-config "$TRANSFER" $ENGINE_ARGS \
        >"$folder/engine-$1.log" 2>&1 &
    engine=$!
    started+=("$engine")
    until curl --noproxy '*' -sf "http://127.0.0.1:$1/health" >/dev/null; do
        still_runs "$engine" "$folder/engine-$1.log"
        sleep 0.5
    done
}

end_engine() {
    say "the engine ends, and vLLM's own cache with it"
    end_one "$1"
}

# stored: returns when the cache grows no more: what an engine computed reaches it a moment later.
stored() {
    until kvhostctl status --json | grep -Eq '"committed_chunks": "?([1-9][0-9]*)'; do sleep 0.1; done
    local before=-1 now=0
    until [ "$now" = "$before" ]; do
        before=$now
        sleep 0.5
        now=$(kvhostctl status --json | grep -E '"committed_chunks"' | head -n 1)
    done
}
