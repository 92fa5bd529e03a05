#!/usr/bin/env bash
# The same question in each API of a Tightwire server, with curl: ./examples/curl.sh [http://127.0.0.1:8000]
set -euo pipefail
url=${1:-http://127.0.0.1:8000}
json=(-sS --fail-with-body -H 'content-type: application/json')
question='What is the capital of France?'

echo "# chat completions"
curl "${json[@]}" "$url/v1/chat/completions" \
  -d '{"messages": [{"role": "user", "content": "'"$question"'"}], "temperature": 0, "max_tokens": 40}'

echo; echo "# chat completions, streamed"
curl "${json[@]}" -N "$url/v1/chat/completions" \
  -d '{"messages": [{"role": "user", "content": "'"$question"'"}], "temperature": 0, "max_tokens": 8, "stream": true}'

echo "# completions"
curl "${json[@]}" "$url/v1/completions" \
  -d '{"prompt": "The capital of France is", "temperature": 0, "max_tokens": 8}'

echo; echo "# responses"
curl "${json[@]}" "$url/v1/responses" \
  -d '{"input": "'"$question"'", "temperature": 0, "max_output_tokens": 40}'

echo; echo "# messages"
curl "${json[@]}" "$url/v1/messages" -H 'anthropic-version: 2023-06-01' \
  -d '{"messages": [{"role": "user", "content": "'"$question"'"}], "temperature": 0, "max_tokens": 40}'

echo; echo "# an answer that is one of several texts"
curl "${json[@]}" "$url/v1/chat/completions" \
  -d '{"messages": [{"role": "user", "content": "Is the sky blue?"}], "structured_outputs": {"choice": ["yes", "no"]}}'

echo; echo "# embeddings are not offered: an error says so"
curl -sS -H 'content-type: application/json' "$url/v1/embeddings" -d '{"input": "a"}'
echo
