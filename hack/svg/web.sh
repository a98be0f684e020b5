#!/usr/bin/env bash
# Takes docs/images/web.png: what `cgpu web` shows in Chromium after some minutes beside four containers on a private node with the simulated driver.
#
#   make build && hack/with-node.sh -- hack/svg/web.sh
set -euo pipefail
[[ ${CGPU_NODE:-} ]] || { echo "web.sh: CGPU_NODE is not set: run through hack/with-node.sh" >&2; exit 2; }
server=
finish() {
	[[ ! $server ]] || kill "$server"
	docker rm -f web train batch notebook >/dev/null 2>&1 || true
}
trap finish EXIT

hack=$(cd "$(dirname "$0")/.." && pwd)
# shellcheck source=hack/svg/work.sh
source "$hack/svg/work.sh"
cgpu web --listen 127.0.0.1:19472 >/dev/null &
server=$!
sleep 100
cgpu pause batch >/dev/null
sleep 40
cgpu resume batch >/dev/null
sleep 120
cd "$hack/.."
CGPU_TEST_SHOTS=$PWD/docs/images CGPU_TEST_PAGE=http://127.0.0.1:19472/ go test -count 1 -run TestPicture ./pkg/web
