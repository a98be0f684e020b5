#!/usr/bin/env bash
# Prints what `cgpu top` shows in a terminal of 110 columns after a minute beside four containers that work on a private node with the simulated
# driver: the text of docs/images/top.txt. Wants tmux, which knows what is on a screen.
#
#   make build && hack/with-node.sh -- hack/svg/top.sh >docs/images/top.txt && go test ./hack/svg -update
set -euo pipefail
[[ ${CGPU_NODE:-} ]] || { echo "top.sh: CGPU_NODE is not set: run through hack/with-node.sh" >&2; exit 2; }
tmux() { command tmux -S "$CGPU_NODE/tmux" "$@"; }
finish() {
	tmux kill-server >/dev/null 2>&1 || true
	docker rm -f web train batch notebook >/dev/null 2>&1 || true
}
trap finish EXIT

hack=$(cd "$(dirname "$0")/.." && pwd)
# shellcheck source=hack/svg/work.sh
source "$hack/svg/work.sh"
tmux new-session -d -x 110 -y 13 'LANG=C.UTF-8 cgpu top'
sleep 25
cgpu pause batch >/dev/null
sleep 12
cgpu resume batch >/dev/null
sleep 25
tmux send-keys Down Down
sleep 3
echo '$ sudo cgpu top'
tmux capture-pane -p
