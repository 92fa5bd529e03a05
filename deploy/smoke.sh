#!/usr/bin/env bash
# Checks a running server from outside, with curl alone: deploy/smoke.sh [URL] [API_KEY]
# Prints a line per check; exit code 1 at the first that fails.
set -euo pipefail

url=${1:-http://127.0.0.1:8000}
key=${2:-none}
answer=$(mktemp)
trap 'rm -f "$answer"' EXIT

# request STATUS PATH [BODY]: the body of the answer is then in $answer.
request() {
  local want=$1 path=$2 status
  local arguments=(--silent --show-error --max-time 60 --no-buffer -H "Authorization: Bearer $key")
  if [ $# -gt 2 ]; then arguments+=(-H "Content-Type: application/json" -d "$3"); fi
  status=$(curl "${arguments[@]}" -o "$answer" -w '%{http_code}' "$url$path") || fail "$path: no answer from $url"
  [ "$status" = "$want" ] || fail "$path: status $status, expected $want: $(head -c 500 "$answer")"
}

# holds TEXT WHAT: the last answer contains TEXT.
holds() {
  grep -q "$1" "$answer" || fail "$2: no $1 in $(head -c 500 "$answer")"
  echo "ok    $2"
}

fail() {
  echo "FAIL  $1" >&2
  exit 1
}

request 200 /health
holds '"status":"ready"' "health"

request 200 /v1/models
holds '"object":"list"' "models"
model=$(sed -n 's/.*"data":\[{[^}]*"id":"\([^"]*\)".*/\1/p' "$answer")
[ -n "$model" ] || fail "models: the list names no model: $(head -c 500 "$answer")"

question='"messages":[{"role":"user","content":"Say hello."}],"max_tokens":16'
request 200 /v1/chat/completions "{\"model\":\"$model\",$question}"
holds '"finish_reason":"' "chat with $model"

request 200 /v1/chat/completions "{\"model\":\"$model\",$question,\"stream\":true}"
holds '"object":"chat.completion.chunk"' "stream, in chunks"
holds '^data: \[DONE\]' "stream, to its end"

request 400 /v1/chat/completions "{\"model\":\"$model\",$question,\"temperature\":-1}"
holds '"error":' "bad request, refused"

request 404 /v1/chat/completions "{\"model\":\"no-such-model\",$question}"
holds '"error":' "unknown model, refused"

request 200 /health
holds '"status":"ready"' "health, after all that"
